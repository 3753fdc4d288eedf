//! The tables of Holistic Trace Analysis: why streams were idle, launches, queues, copies, and the
//! critical path of each rank.

use super::kernels;
use super::shared::{COUNT, PERCENT, RANK, US, label, ms, us};
use crate::calls::Calls;
use crate::hta::{
    Analysis, BoundBy, CopyBandwidth, IdleTime, LaunchStats, NameLaunches, PathName, StreamQueue,
};
use crate::report::chart::{Color, Row, Series, Stroke};
use crate::report::{Body, Note, Panel, Section, Weight};
use crate::table::Columns;

/// The most rows per rank in tables by name.
const NAMES: usize = 12;

/// The note for ranks that have computed on an emulated device.
const EMULATED: &str = "These ranks have computed on an emulated accelerator: its streams, launches and copies have the times that \
                        were stated for it, and its kernels those of the processor.";

/// The note for ranks that have computed on a CPU: the parts that the report leaves out.
const NO_DEVICE: &str = "These ranks have computed on a CPU, where nothing is launched: launches, their delays, queues and \
    the causes of idle time are left out.";

/// The panels of each rank. `on_cpu` is true if the ranks have computed on a CPU.
pub(super) fn section(analysis: &Analysis, calls: &Calls, on_cpu: bool) -> Section {
    let mut panels = vec![path_bounds(analysis, on_cpu), path_names(analysis, on_cpu)];
    if !on_cpu {
        panels.extend([idle(analysis), launches(analysis), launches_by_kernel(analysis)]);
        panels.extend([queue_lines(analysis), queues(analysis)]);
    }
    panels.extend([copies(analysis), kernels::statistics(analysis, calls)]);
    Section::new(
        "device",
        "Each rank by itself",
        "The critical path, idle time, launches, queues and copies, by the formulas of Holistic Trace \
         Analysis (HTA).",
        panels,
    )
}

/// A note that a reader of these panels needs.
pub(super) fn note(on_cpu: bool, is_emulated: bool) -> Option<Note> {
    let text = match (on_cpu, is_emulated) {
        (true, _) => NO_DEVICE,
        (_, true) => EMULATED,
        _ => return None,
    };
    Some(Note { weight: Weight::Note, text: text.into() })
}

const NO_PATH: &str = "No rank has a critical path.";
const NO_LAUNCHES: &str = "The traces show no launches.";
// -1 means that the file names no stream.
const STREAM: &str = "The stream's number in the trace.";

fn path_bounds(analysis: &Analysis, on_cpu: bool) -> Panel {
    let stacks = analysis.ranks.iter().filter_map(|rank| {
        let path = rank.critical_path.as_ref()?;
        let mut parts: Vec<(&str, f64, Color)> = Vec::new();
        for &(bound, ns) in &path.by_bound {
            let (name, color) = words(bound, on_cpu);
            match parts.iter_mut().find(|part| part.0 == name) {
                Some(part) => part.1 += ms(ns),
                None => parts.push((name, ms(ns), color)),
            }
        }
        let step = path.step.map_or(String::new(), |step| format!(", step {step}"));
        Some(Row::stack(format!("{}{step}", label(rank)), parts))
    });
    let body = Body::stacked("ms", stacks).or(NO_PATH);
    Panel::new(
        "critical-path",
        "Critical path within a rank",
        "ms",
        "The longest chain of work in one step in which each piece had to wait for the one before, divided \
         by what limits each piece, in HTA's classes where there is a device. Making a piece shorter makes the step \
         shorter.",
        body,
    )
}

/// The limit of a piece. On a CPU nothing is launched: there a launch stands for a thread that takes over work.
fn words(bound: BoundBy, on_cpu: bool) -> (&'static str, Color) {
    match bound {
        BoundBy::Cpu | BoundBy::GpuCompute if on_cpu => ("computation", Color::Compute),
        BoundBy::KernelGap | BoundBy::LaunchDelay if on_cpu => ("between threads", Color::Idle),
        BoundBy::Cpu => ("host", Color::Host),
        BoundBy::GpuCompute => ("compute kernels", Color::Compute),
        BoundBy::GpuCommunication => ("communication", Color::Communication),
        BoundBy::KernelGap => ("gaps between kernels", Color::Idle),
        BoundBy::LaunchDelay => ("launch delay", Color::Wait),
    }
}

#[rustfmt::skip]
fn path_names(analysis: &Analysis, on_cpu: bool) -> Panel {
    let columns = Columns::<(usize, &PathName, i64)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("name", "name", COUNT, "The operator, call or kernel that the time belongs to.",
            |of| of.1.name.clone())
        .add("bound_by", "limited by", COUNT, "What limits these pieces, in HTA's words where there is a device.",
            move |of| if on_cpu { words(of.1.bound_by, true).0 } else { of.1.bound_by.name() })
        .add("pieces", "pieces", COUNT, "How many pieces of the path have this name.", |of| of.1.pieces)
        .add("time_us", "time", US, "Sum of the lengths of these pieces on the path.", |of| us(of.1.time_ns))
        .add("share_pctg", "share", PERCENT, "Share of the path's length.",
            |of| 100.0 * of.1.time_ns as f64 / of.2 as f64);
    let rows = analysis.ranks.iter().filter_map(|rank| Some((rank.rank, rank.critical_path.as_ref()?)));
    let rows = rows.flat_map(|(rank, path)| {
        path.by_name.iter().take(NAMES).map(move |name| (rank, name, path.total_ns))
    });
    let definition = "The twelve names with the most time on the critical path of each rank.";
    Panel::table("critical-path-names", "What the critical path consists of", definition, columns.table(rows), NO_PATH)
}

#[rustfmt::skip]
fn idle(analysis: &Analysis) -> Panel {
    let columns = Columns::<(usize, i64, &IdleTime)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("stream", "stream", COUNT, STREAM, |of| of.1 as f64)
        .add("category", "category", COUNT,
            "host_wait: the next kernel was launched only after the last one had ended, so the host was \
             too slow. kernel_wait: the next kernel was launched in time, and the gap is short. other: \
             neither; the stream waited for another stream, or for memory.",
            |of| of.2.category.name())
        .add("gaps", "gaps", COUNT, "How many gaps between kernels are of this category.", |of| of.2.gaps)
        .add("idle_us", "idle", US, "Sum of the lengths of these gaps.", |of| us(of.2.time_ns))
        .add("share_pctg", "share", PERCENT, "Share of the stream's idle time.",
            |of| of.2.ratio.map(|ratio| 100.0 * ratio));
    let rows = analysis.ranks.iter().flat_map(|rank| {
        rank.idle.iter().flat_map(|stream| {
            stream.by_category.iter().map(|of| (rank.rank, stream.stream, of))
        })
    });
    let definition = "Gaps between the kernels of a stream, by their cause according to HTA's rules.";
    Panel::table("idle", "Idle-time breakdown", definition, columns.table(rows), "No stream has two kernels.")
}

#[rustfmt::skip]
fn launches(analysis: &Analysis) -> Panel {
    const US: (&str, usize) = ("us", 2);
    let columns = Columns::<(usize, &LaunchStats)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("launches", "launches", COUNT, "Calls of the host that led to a kernel.", |of| of.1.cpu_ns.count)
        .add("cpu_mean_us", "call, mean", US, "Mean duration of the calls on the host.",
            |of| of.1.cpu_ns.mean / 1e3)
        .add("cpu_p95_us", "call, p95", US, "95th percentile of the durations of the calls.",
            |of| of.1.cpu_ns.p95 / 1e3)
        .add("gpu_mean_us", "kernel, mean", US, "Mean duration of the kernels.", |of| of.1.gpu_ns.mean / 1e3)
        .add("delay_mean_us", "delay, mean", US,
            "Mean time from the end of the call to the start of the kernel.", |of| of.1.delay_ns.mean / 1e3)
        .add("delay_p95_us", "delay, p95", US, "95th percentile of that time.", |of| of.1.delay_ns.p95 / 1e3)
        .add("delay_max_us", "delay, max", US, "Longest of these times.", |of| of.1.delay_ns.max / 1e3)
        .add("short_kernels", "short kernels", COUNT,
            "Kernels that were shorter than the call that launched them.", |of| of.1.short_kernels)
        .add("slow_calls", "slow calls", COUNT, "Calls longer than 50 us, as in HTA.", |of| of.1.slow_calls)
        .add("long_delays", "long delays", COUNT, "Delays longer than 100 us, as in HTA.",
            |of| of.1.long_delays);
    let rows = analysis.ranks.iter().filter_map(|rank| Some((rank.rank, rank.launches.as_ref()?)));
    let definition = "What it took to launch kernels, by HTA's formulas. Many short kernels with long delays mean that the host holds the device \
        back.";
    Panel::table("launches", "Launch statistics", definition, columns.table(rows), NO_LAUNCHES)
}

#[rustfmt::skip]
fn launches_by_kernel(analysis: &Analysis) -> Panel {
    const US: (&str, usize) = ("us", 2);
    let columns = Columns::<(usize, &NameLaunches)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("name", "kernel", COUNT, "The kernel's name.", |of| of.1.name.clone())
        .add("launches", "launches", COUNT, "How often it was launched.", |of| of.1.launches)
        .add("cpu_mean_us", "call, mean", US, "Mean duration of the calls on the host.",
            |of| of.1.cpu_mean_ns / 1e3)
        .add("gpu_mean_us", "kernel, mean", US, "Mean duration of the kernel.", |of| of.1.gpu_mean_ns / 1e3)
        .add("delay_mean_us", "delay, mean", US,
            "Mean time from the end of the call to the start of the kernel.", |of| of.1.delay_mean_ns / 1e3)
        .add("delay_max_us", "delay, max", US, "Longest of these times.", |of| us(of.1.delay_max_ns))
        .add("short", "short", COUNT, "How many of them were shorter than their call.", |of| of.1.short);
    let rows = analysis.ranks.iter().flat_map(|rank| {
        let all = rank.launches.iter().flat_map(|of| of.by_kernel.iter().take(NAMES));
        all.map(|of| (rank.rank, of))
    });
    let definition = "The twelve kernels of each rank with the largest sums of delays.";
    Panel::table("launches-by-kernel", "Launches by kernel", definition, columns.table(rows), NO_LAUNCHES)
}

fn queue_lines(analysis: &Analysis) -> Panel {
    let lines = analysis.ranks.iter().filter_map(|rank| {
        let longest =
            rank.queues.iter().rev().max_by(|a, b| a.length.max.total_cmp(&b.length.max))?;
        let begin = longest.series.first()?.at_ns;
        let points = longest.series.iter().map(|p| (ms(p.at_ns - begin), p.value));
        let name = format!("{}, stream {}", label(rank), longest.stream);
        Some(Series::line(name, points).stroke(Stroke::Steps).look(rank.rank))
    });
    let body = Body::over_time("launches", lines).or(NO_LAUNCHES);
    Panel::new(
        "queue",
        "Queue length over time",
        "launches",
        "Work that was launched but had not begun, on the stream of each rank with the longest queue. At \
         zero the device has nothing to do next.",
        body,
    )
}

#[rustfmt::skip]
fn queues(analysis: &Analysis) -> Panel {
    const LENGTH: (&str, usize) = ("", 2);
    let columns = Columns::<(usize, &StreamQueue)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("stream", "stream", COUNT, STREAM, |of| of.1.stream as f64)
        .add("changes", "changes", COUNT, "How often the length changed.", |of| of.1.length.count)
        .add("mean", "mean", LENGTH,
            "Mean of the length after each change, not weighted with time, as in HTA.", |of| of.1.length.mean)
        .add("p50", "median", LENGTH, "Median of the length after each change.", |of| of.1.length.p50)
        .add("p95", "p95", LENGTH, "95th percentile of the length after each change.", |of| of.1.length.p95)
        .add("max", "max", LENGTH, "Greatest length.", |of| of.1.length.max)
        .add("full_us", "full", US, "Time in which it held 1024 launches or more, which holds the host back.",
            |of| us(of.1.full_ns));
    let rows = analysis.ranks.iter();
    let rows = rows.flat_map(|rank| rank.queues.iter().map(|queue| (rank.rank, queue)));
    let definition = "Work that was launched but had not begun, per stream.";
    Panel::table("queues", "Queue length", definition, columns.table(rows), NO_LAUNCHES)
}

#[rustfmt::skip]
fn copies(analysis: &Analysis) -> Panel {
    const RATE: (&str, usize) = ("GB/s", 3);
    let columns = Columns::<(usize, &CopyBandwidth)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("name", "copy", COUNT, "The kind of copy.", |of| of.1.name.clone())
        .add("copies", "copies", COUNT, "How many there were.", |of| of.1.copies)
        .add("mb", "moved", ("MB", 2), "Sum of their bytes, in MB of 1e6.", |of| of.1.bytes as f64 / 1e6)
        .add("time_us", "time", US, "Sum of their durations.", |of| us(of.1.time_ns))
        .add("mean_gb_s", "mean", RATE,
            "Mean of the summed bandwidth of running copies, after each change where it \
             is above zero, as in HTA. A GB is 1e9 bytes.",
            |of| of.1.gb_per_s.map(|of| of.mean))
        .add("p95_gb_s", "p95", RATE, "95th percentile of that bandwidth.", |of| of.1.gb_per_s.map(|of| of.p95))
        .add("max_gb_s", "max", RATE, "Greatest bandwidth.", |of| of.1.gb_per_s.map(|of| of.max));
    let rows = analysis.ranks.iter();
    let rows = rows.flat_map(|rank| rank.copies.iter().map(|copies| (rank.rank, copies)));
    let definition = "Copies and memory sets of the device, by kind.";
    Panel::table("copies", "Memory bandwidth", definition, columns.table(rows), "The traces hold no copies.")
}
