//! The tables of Holistic Trace Analysis: why streams were idle, launches, queues, copies, and the
//! critical path of each rank.

use super::{kernels, label, ms, us};
use crate::hta::{Analysis, BoundBy, RankAnalysis};
use crate::report::chart::{Ink, Line, Lines, Part, Stack, Stacked};
use crate::report::{Body, Panel, Section};
use crate::table::{Cell, Column, Table};

/// Rows of each rank in tables by name.
const NAMES: usize = 12;

/// What launches are in a trace that has lanes of our own, said where they are shown.
const LANES: &str = " These ranks have computed on a CPU: a launch is how the trace writes which work of a \
    lane belongs to which call, and no device was waited for, so launches, delays and queues measure \
    nothing here, and host is where the main thread computes.";
const OF_LAUNCHES: [&str; 6] =
    ["critical-path", "critical-path-names", "launches", "launches-by-kernel", "queue", "queues"];

/// The panels of each rank; `has_lanes` where ranks have written lanes of a CPU as streams.
pub(super) fn section(analysis: &Analysis, has_lanes: bool) -> Section {
    let mut panels = vec![
        path_bounds(analysis),
        path_names(analysis),
        idle(analysis),
        launches(analysis),
        launches_by_kernel(analysis),
        queue_lines(analysis),
        queues(analysis),
        copies(analysis),
        kernels::statistics(analysis),
    ];
    for panel in panels.iter_mut().filter(|panel| OF_LAUNCHES.contains(&panel.id.as_str())) {
        panel.definition += if has_lanes { LANES } else { "" };
    }
    Section::new(
        "device",
        "Each rank by itself",
        "The critical path, idle time, launches, queues and copies, by the formulas of Holistic Trace \
         Analysis (HTA).",
        panels,
    )
}

fn rank_column() -> Column {
    Column::new("rank", "rank", "", 0, "The rank of the process.")
}

fn rank_cell(rank: &RankAnalysis) -> Cell {
    Cell::Whole(rank.rank as u64)
}

/// A table, or why there is none.
fn table_or(columns: Vec<Column>, rows: Vec<Vec<Cell>>, reason: &str) -> Body {
    match rows.is_empty() {
        true => Body::Nothing(reason.to_owned()),
        false => Body::Table(Table { columns, rows, mean: None }),
    }
}

fn path_bounds(analysis: &Analysis) -> Panel {
    let stacks = analysis.ranks.iter().filter_map(|rank| {
        let path = rank.critical_path.as_ref()?;
        let parts = path.by_bound.iter().filter(|(bound, _)| *bound != BoundBy::None);
        let parts = parts.map(|&(bound, ns)| {
            let (name, ink) = words(bound);
            Part { name: name.into(), value: ms(ns), ink }
        });
        let step = path.step.map_or(String::new(), |step| format!(", step {step}"));
        Some(Stack { label: format!("{}{step}", label(rank)), parts: parts.collect() })
    });
    let stacks: Vec<Stack> = stacks.collect();
    let body = if stacks.is_empty() {
        Body::Nothing("No rank has a critical path.".into())
    } else {
        Body::Stacked(Stacked { unit: "ms".into(), stacks })
    };
    Panel::new(
        "critical-path",
        "Critical path within a rank",
        "ms",
        "The longest chain of work of one step in which each piece had to wait for the one before, by \
         what limits its pieces, in HTA's classes. Making a piece of it shorter makes the step shorter.",
        body,
    )
}

fn words(bound: BoundBy) -> (&'static str, Ink) {
    match bound {
        BoundBy::Cpu => ("host", Ink::Host),
        BoundBy::GpuCompute => ("compute kernels", Ink::Compute),
        BoundBy::GpuCommunication => ("communication", Ink::Communication),
        BoundBy::KernelGap => ("gaps between kernels", Ink::Idle),
        BoundBy::LaunchDelay => ("launch delay", Ink::Wait),
        BoundBy::None => ("dependency", Ink::Other),
    }
}

fn path_names(analysis: &Analysis) -> Panel {
    let columns = vec![
        rank_column(),
        Column::new(
            "name",
            "name",
            "",
            0,
            "The operator, call or kernel that the time belongs to.",
        ),
        Column::new("bound_by", "limited by", "", 0, "What limits these pieces, in HTA's words."),
        Column::new("pieces", "pieces", "", 0, "How many pieces of the path bear the name."),
        Column::new("time_us", "time", "us", 1, "Sum of the lengths of these pieces on the path."),
        Column::new("share_pctg", "share", "%", 2, "Part of the path's length."),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        let path = rank.critical_path.iter();
        path.flat_map(move |path| {
            path.by_name.iter().take(NAMES).map(move |of| {
                let share = 100.0 * of.time_ns as f64 / path.total_ns as f64;
                vec![
                    rank_cell(rank),
                    Cell::Text(of.name.clone()),
                    of.bound_by.name().into(),
                    Cell::Whole(of.pieces),
                    Cell::Number(us(of.time_ns as f64)),
                    Cell::Number(share),
                ]
            })
        })
    });
    Panel::new(
        "critical-path-names",
        "What the critical path consists of",
        "",
        "The twelve names with the most time on the critical path of each rank.",
        table_or(columns, rows.collect(), "No rank has a critical path."),
    )
}

fn idle(analysis: &Analysis) -> Panel {
    let columns = vec![
        rank_column(),
        Column::new("stream", "stream", "", 0, "The stream's number in the trace."),
        Column::new(
            "category",
            "category",
            "",
            0,
            "host_wait: the next kernel was launched only after the last one had ended, so the host was \
             too slow. kernel_wait: it had been launched in time, and the gap is short. other: neither; \
             the stream waited for another one, or for memory.",
        ),
        Column::new(
            "gaps",
            "gaps",
            "",
            0,
            "How many gaps between kernels there are of the category.",
        ),
        Column::new("idle_us", "idle", "us", 1, "Sum of the lengths of these gaps."),
        Column::new("share_pctg", "share", "%", 2, "Part of the stream's idle time."),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        rank.idle.iter().flat_map(move |stream| {
            stream.by_category.iter().map(move |of| {
                vec![
                    rank_cell(rank),
                    stream_cell(stream.stream),
                    of.category.name().into(),
                    Cell::Whole(of.gaps),
                    Cell::Number(us(of.time_ns as f64)),
                    Cell::maybe(of.ratio.map(|ratio| 100.0 * ratio)),
                ]
            })
        })
    });
    Panel::new(
        "idle",
        "Idle-time breakdown",
        "",
        "Gaps between the kernels of a stream, by what they are put down to; as HTA has it.",
        table_or(columns, rows.collect(), "No stream has two kernels."),
    )
}

/// Streams are whole numbers, of which -1 stands for none.
fn stream_cell(stream: i64) -> Cell {
    Cell::Number(stream as f64)
}

fn launches(analysis: &Analysis) -> Panel {
    let time =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "us", 2, definition);
    let count =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "", 0, definition);
    let columns = vec![
        rank_column(),
        count("launches", "launches", "Calls of the host that led to a kernel."),
        time("cpu_mean_us", "call, mean", "Mean duration of the calls on the host."),
        time("cpu_p95_us", "call, p95", "95th percentile of the durations of the calls."),
        time("gpu_mean_us", "kernel, mean", "Mean duration of the kernels."),
        time(
            "delay_mean_us",
            "delay, mean",
            "Mean time from the end of the call to the begin of the kernel.",
        ),
        time("delay_p95_us", "delay, p95", "95th percentile of that time."),
        time("delay_max_us", "delay, max", "Longest of these times."),
        count(
            "short_kernels",
            "short kernels",
            "Kernels that were shorter than the call that launched them.",
        ),
        count("slow_calls", "slow calls", "Calls longer than 50 us, as HTA has it."),
        count("long_delays", "long delays", "Delays longer than 100 us, as HTA has it."),
    ];
    let rows = analysis.ranks.iter().filter_map(|rank| {
        let of = rank.launches.as_ref()?;
        Some(vec![
            rank_cell(rank),
            Cell::Whole(of.cpu_ns.count),
            Cell::Number(us(of.cpu_ns.mean)),
            Cell::Number(us(of.cpu_ns.p95)),
            Cell::Number(us(of.gpu_ns.mean)),
            Cell::Number(us(of.delay_ns.mean)),
            Cell::Number(us(of.delay_ns.p95)),
            Cell::Number(us(of.delay_ns.max)),
            Cell::Whole(of.short_kernels),
            Cell::Whole(of.slow_calls),
            Cell::Whole(of.long_delays),
        ])
    });
    Panel::new(
        "launches",
        "Launch statistics",
        "",
        "What it took to launch kernels, by HTA's formulas. Many short kernels with long delays mean \
         that the host holds the device back.",
        table_or(columns, rows.collect(), "The traces show no launches."),
    )
}

fn launches_by_kernel(analysis: &Analysis) -> Panel {
    let time =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "us", 2, definition);
    let columns = vec![
        rank_column(),
        Column::new("name", "kernel", "", 0, "The kernel's name."),
        Column::new("launches", "launches", "", 0, "How often it was launched."),
        time("cpu_mean_us", "call, mean", "Mean duration of the calls on the host."),
        time("gpu_mean_us", "kernel, mean", "Mean duration of the kernel."),
        time(
            "delay_mean_us",
            "delay, mean",
            "Mean time from the end of the call to the begin of the kernel.",
        ),
        time("delay_max_us", "delay, max", "Longest of these times."),
        Column::new("short", "short", "", 0, "How many of them were shorter than their call."),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        let all = rank.launches.iter().flat_map(|of| of.by_kernel.iter().take(NAMES));
        all.map(|of| {
            vec![
                rank_cell(rank),
                Cell::Text(of.name.clone()),
                Cell::Whole(of.launches),
                Cell::Number(us(of.cpu_mean_ns)),
                Cell::Number(us(of.gpu_mean_ns)),
                Cell::Number(us(of.delay_mean_ns)),
                Cell::Number(us(of.delay_max_ns as f64)),
                Cell::Whole(of.short),
            ]
        })
    });
    Panel::new(
        "launches-by-kernel",
        "Launches by kernel",
        "",
        "The twelve kernels of each rank with the largest sums of delays.",
        table_or(columns, rows.collect(), "The traces show no launches."),
    )
}

fn queue_lines(analysis: &Analysis) -> Panel {
    let lines = analysis.ranks.iter().filter_map(|rank| {
        let longest =
            rank.queues.iter().rev().max_by(|a, b| a.length.max.total_cmp(&b.length.max))?;
        let begin = longest.series.first()?.at_ns;
        let points = longest.series.iter().map(|p| (ms(p.at_ns - begin), p.value)).collect();
        let name = format!("{}, stream {}", label(rank), longest.stream);
        Some(Line { name, ink: Ink::Series(rank.rank), points })
    });
    let lines: Vec<Line> = lines.collect();
    let body = if lines.is_empty() {
        Body::Nothing("The traces show no launches.".into())
    } else {
        Body::Lines(Lines { x_unit: "ms".into(), y_unit: "launches".into(), lines })
    };
    Panel::new(
        "queue",
        "Queue length over time",
        "launches",
        "Work that was launched and had not begun, on the stream of each rank where it was longest. At \
         zero the device has nothing to do next.",
        body,
    )
}

fn queues(analysis: &Analysis) -> Panel {
    let plain =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "", 2, definition);
    let columns = vec![
        rank_column(),
        Column::new("stream", "stream", "", 0, "The stream's number in the trace."),
        Column::new("changes", "changes", "", 0, "How often the length changed."),
        plain(
            "mean",
            "mean",
            "Mean of the length after each change, not weighted with time, as in HTA.",
        ),
        plain("p50", "median", "Median of the length after each change."),
        plain("p95", "p95", "95th percentile of the length after each change."),
        plain("max", "max", "Greatest length."),
        Column::new(
            "full_us",
            "full",
            "us",
            1,
            "Time at which it held 1024 launches or more, which holds the host back.",
        ),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        rank.queues.iter().map(move |queue| {
            vec![
                rank_cell(rank),
                stream_cell(queue.stream),
                Cell::Whole(queue.length.count),
                Cell::Number(queue.length.mean),
                Cell::Number(queue.length.p50),
                Cell::Number(queue.length.p95),
                Cell::Number(queue.length.max),
                Cell::Number(us(queue.full_ns as f64)),
            ]
        })
    });
    Panel::new(
        "queues",
        "Queue length",
        "",
        "Work that was launched and had not begun, per stream.",
        table_or(columns, rows.collect(), "The traces show no launches."),
    )
}

fn copies(analysis: &Analysis) -> Panel {
    let rate =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "GB/s", 3, definition);
    let columns = vec![
        rank_column(),
        Column::new("name", "copy", "", 0, "The kind of copy."),
        Column::new("copies", "copies", "", 0, "How many there were."),
        Column::new("mb", "moved", "MB", 2, "Sum of their bytes, in MB of 1e6."),
        Column::new("time_us", "time", "us", 1, "Sum of their durations."),
        rate(
            "mean_gb_s",
            "mean",
            "Mean of the summed bandwidth of running copies, after each change where it \
             is above zero, as HTA has it; GB are 1e9 bytes.",
        ),
        rate("p95_gb_s", "p95", "95th percentile of that bandwidth."),
        rate("max_gb_s", "max", "Greatest bandwidth."),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        rank.copies.iter().map(move |of| {
            vec![
                rank_cell(rank),
                Cell::Text(of.name.clone()),
                Cell::Whole(of.copies),
                Cell::Number(of.bytes as f64 / 1e6),
                Cell::Number(us(of.time_ns as f64)),
                Cell::maybe(of.gb_per_s.map(|of| of.mean)),
                Cell::maybe(of.gb_per_s.map(|of| of.p95)),
                Cell::maybe(of.gb_per_s.map(|of| of.max)),
            ]
        })
    });
    Panel::new(
        "copies",
        "Memory bandwidth",
        "",
        "Copies and memory sets of the device, by kind.",
        table_or(columns, rows.collect(), "The traces hold no copies."),
    )
}
