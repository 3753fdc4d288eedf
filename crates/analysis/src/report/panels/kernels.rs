//! What the devices did: temporal breakdown, kinds of kernels, and the longest kernels.

use std::collections::HashMap;

use super::{label, ms};
use crate::hta::{Analysis, KernelKind, Temporal, top_kernels};
use crate::report::chart::{Bar, Bars, Donut, Donuts, Ink, Part, Stack, Stacked};
use crate::report::{Body, Panel};

/// Kernels that are shown.
const LONGEST: usize = 12;

/// Idle, computing, or neither.
pub(super) fn temporal(analysis: &Analysis) -> Panel {
    let stacks = analysis.ranks.iter().map(|rank| {
        let Temporal { idle_ns, compute_ns, non_compute_ns, .. } = rank.temporal;
        let part = |name: &str, ns, ink| Part { name: name.into(), value: ms(ns), ink };
        let parts = vec![
            part("compute", compute_ns, Ink::Compute),
            part("non-compute", non_compute_ns, Ink::NonCompute),
            part("idle", idle_ns, Ink::Idle),
        ];
        Stack { label: label(rank), parts }
    });
    Panel::new(
        "temporal",
        "Temporal breakdown",
        "ms",
        "From the first to the last kernel: time with a compute kernel, time with other kernels only \
         (communication that nothing hides, copies), and time without any; as HTA computes it.",
        Body::Stacked(Stacked { unit: "ms".into(), stacks: stacks.collect() }),
    )
}

fn ink(kind: KernelKind) -> Ink {
    match kind {
        KernelKind::Computation => Ink::Compute,
        KernelKind::Communication => Ink::Communication,
        KernelKind::Memory => Ink::Memory,
        KernelKind::Other => Ink::Other,
    }
}

/// Kinds of kernels of each rank.
pub(super) fn donuts(analysis: &Analysis) -> Panel {
    let donuts = analysis.ranks.iter().map(|rank| {
        let parts = rank.kinds.iter().map(|of| {
            let names: Vec<&str> = of.kinds.iter().map(|kind| kind.name()).collect();
            let ink = match of.kinds.as_slice() {
                [kind] => ink(*kind),
                kinds if kinds.contains(&KernelKind::Memory) && kinds.len() == 2 => Ink::Series(6),
                kinds if kinds.len() == 2 => Ink::Both,
                _ => Ink::Other,
            };
            Part { name: names.join(" + "), value: ms(of.time_ns), ink }
        });
        Donut { label: label(rank), parts: parts.filter(|part| part.value > 0.0).collect() }
    });
    let donuts: Vec<Donut> = donuts.collect();
    let body = if donuts.iter().all(|donut| donut.parts.is_empty()) {
        Body::Nothing("No rank has a kernel.".into())
    } else {
        Body::Donuts(Donuts { unit: "ms".into(), donuts })
    };
    Panel::new(
        "kinds",
        "Kinds of kernels",
        "% of the time with kernels",
        "Time in which kernels of exactly these kinds ran: \"computation + communication\" is \
         communication behind computation; as HTA has it.",
        body,
    )
}

/// The longest kernels, as means over ranks.
pub(super) fn longest(analysis: &Analysis) -> Panel {
    let mut sums: HashMap<&str, (KernelKind, i64, u64)> = HashMap::new();
    let kernels = analysis.ranks.iter().flat_map(|rank| &rank.kernels);
    // What is left of kinds is waiting for a stream or an event, which is no work.
    for kernel in kernels.filter(|kernel| kernel.kind != KernelKind::Other) {
        let sum = sums.entry(kernel.name.as_str()).or_insert((kernel.kind, 0, 0));
        (sum.1, sum.2) = (sum.1 + kernel.sum_ns, sum.2 + kernel.calls);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.1.cmp(&a.1.1).then(a.0.cmp(b.0)));
    let num_ranks = analysis.ranks.len().max(1) as f64;
    let bars = sums.iter().take(LONGEST).map(|&(name, (kind, sum_ns, _))| Bar {
        label: name.to_owned(),
        value: Some(ms(sum_ns) / num_ranks),
        ink: ink(kind),
    });
    let bars: Vec<Bar> = bars.collect();
    let body = if bars.is_empty() {
        Body::Nothing("No rank has a kernel.".into())
    } else {
        Body::Bars(Bars { unit: "ms".into(), whole: None, bars })
    };
    Panel::new(
        "longest",
        "The longest kernels",
        "ms",
        "The twelve names with the largest sum of durations, as a mean over ranks, in the colour of \
         their kind. Waits for streams and events are left out.",
        body,
    )
}

/// Statistics of the longest kernels of each rank.
pub(super) fn statistics(analysis: &Analysis) -> Panel {
    use crate::table::{Cell, Column, Table};
    let time =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "us", 1, definition);
    let columns = vec![
        Column::new("rank", "rank", "", 0, "The rank of the process."),
        Column::new("name", "kernel", "", 0, "The kernel's name."),
        Column::new("kind", "kind", "", 0, "What it does, told from its name as HTA does."),
        Column::new("calls", "calls", "", 0, "How often it ran."),
        time("sum_us", "sum", "Sum of its durations."),
        time("mean_us", "mean", "Mean duration."),
        time("std_us", "deviation", "Deviation of the durations from their mean (n - 1)."),
        time("min_us", "min", "Shortest duration."),
        time("max_us", "max", "Longest duration."),
    ];
    let rows = analysis.ranks.iter().flat_map(|rank| {
        top_kernels(&rank.kernels, None, LONGEST).into_iter().map(|kernel| {
            vec![
                Cell::Whole(rank.rank as u64),
                Cell::Text(kernel.name),
                kernel.kind.name().into(),
                Cell::Whole(kernel.calls),
                Cell::Number(kernel.sum_ns as f64 / 1e3),
                Cell::Number(kernel.mean_ns / 1e3),
                Cell::Number(kernel.std_ns / 1e3),
                Cell::Number(kernel.min_ns as f64 / 1e3),
                Cell::Number(kernel.max_ns as f64 / 1e3),
            ]
        })
    });
    Panel::new(
        "kernels",
        "Kernels",
        "",
        "The twelve longest kernels of each rank, and all others as one.",
        Body::Table(Table { columns, rows: rows.collect(), mean: None }),
    )
}
