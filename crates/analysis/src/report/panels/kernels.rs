//! The work of the devices: temporal breakdown, kinds of kernels, and the longest kernels.

use std::collections::HashMap;

use super::shared::{COUNT, PerStep, RANK, US, label, ms, us};
use crate::calls::{Calls, Launcher, functor};
use crate::hta::{Analysis, KernelKind, KernelStats, Temporal, top_kernels};
use crate::limit::{DEFINITION, Operations, ROWS};
use crate::report::chart::{Color, Row};
use crate::report::{Body, Panel};
use crate::table::{Cell, Columns};
use crate::timeline::Timeline;

const NO_KERNEL: &str = "No rank has a kernel.";

/// The most kernels that are shown.
const LONGEST: usize = 12;

/// The columns that are left out if no kernel has them.
const OPTIONAL: [&str; 3] = ["functor", "operator", "line"];

/// Time that each device was idle, computing, or neither.
pub(super) fn temporal(analysis: &Analysis) -> Panel {
    let per_step = PerStep::of(analysis);
    let stacks = analysis.ranks.iter().map(|rank| {
        let Temporal { idle_ns, compute_ns, non_compute_ns, .. } = rank.temporal;
        let parts = [
            ("compute", per_step.ms(rank, compute_ns), Color::Compute),
            ("non-compute", per_step.ms(rank, non_compute_ns), Color::NonCompute),
            ("idle", per_step.ms(rank, idle_ns), Color::Idle),
        ];
        Row::stack(label(rank), parts)
    });
    let definition = format!(
        "From the first to the last kernel, {}: time with a compute kernel, time with other kernels only \
         (communication that nothing hides, copies), and time without any; as HTA computes it.",
        per_step.words()
    );
    let body = Body::stacked(per_step.unit(), stacks);
    Panel::new("temporal", "Temporal breakdown", per_step.unit(), &definition, body)
}

pub(super) fn color(kind: KernelKind) -> Color {
    match kind {
        KernelKind::Computation => Color::Compute,
        KernelKind::Communication => Color::Communication,
        KernelKind::Memory => Color::Memory,
        KernelKind::Other => Color::Other,
    }
}

/// Kinds of kernels of each rank.
pub(super) fn kinds(analysis: &Analysis) -> Panel {
    let stacks = analysis.ranks.iter().map(|rank| {
        let parts = rank.kinds.iter().filter(|(_, ns)| *ns > 0).map(|(kinds, ns)| {
            let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
            let color = match kinds.as_slice() {
                [kind] => color(*kind),
                kinds if kinds.contains(&KernelKind::Memory) && kinds.len() == 2 => {
                    Color::Series(6)
                }
                kinds if kinds.len() == 2 => Color::Both,
                _ => Color::Other,
            };
            (names.join(" + "), ms(*ns), color)
        });
        let parts: Vec<_> = parts.collect();
        Row::stack(label(rank), parts.iter().map(|(name, ms, color)| (name.as_str(), *ms, *color)))
    });
    let body = Body::stacked("ms", stacks).or(NO_KERNEL);
    Panel::new(
        "kinds",
        "Kinds of kernels",
        "ms",
        "Time in which kernels of exactly these kinds ran, as in HTA: \"computation + communication\" is \
         communication that is hidden behind computation.",
        body,
    )
}

/// The longest kernels, as means over ranks.
pub(super) fn longest(analysis: &Analysis) -> Panel {
    let per_step = PerStep::of(analysis);
    let mut sums: HashMap<&str, (KernelKind, f64)> = HashMap::new();
    let kernels =
        analysis.ranks.iter().flat_map(|rank| rank.kernels.iter().map(move |of| (rank, of)));
    // Kernels of the kind `Other` wait for a stream or an event, which is not work.
    for (rank, kernel) in kernels.filter(|(_, kernel)| kernel.kind != KernelKind::Other) {
        let sum = sums.entry(kernel.name.as_str()).or_insert((kernel.kind, 0.0));
        sum.1 += per_step.ms(rank, kernel.sum_ns);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.1.total_cmp(&a.1.1).then(a.0.cmp(b.0)));
    let num_ranks = analysis.ranks.len().max(1) as f64;
    let bars = sums.iter().take(LONGEST);
    let bars = bars.map(|&(name, (kind, sum))| Row::bar(name, Some(sum / num_ranks), color(kind)));
    let body = Body::bars(per_step.unit(), bars).or(NO_KERNEL);
    let definition = format!(
        "The twelve names with the largest sum of durations, {}, and as a mean over ranks, in the color of \
         their kind. Waits for streams and events are left out.",
        per_step.words()
    );
    Panel::new("longest", "The longest kernels", per_step.unit(), &definition, body)
}

/// Operations set against their limit.
pub(super) fn operations(timelines: &[Timeline]) -> Panel {
    let of = Operations::of(timelines);
    let definition = format!("{DEFINITION} {}", of.sentence());
    let (title, empty) = ("Operations and their limit", "No operation has arithmetic or shapes.");
    Panel::table("operations", title, definition.trim_end(), of.table(ROWS), empty)
}

/// Statistics of the longest kernels of each rank.
#[rustfmt::skip]
pub(super) fn statistics(analysis: &Analysis, calls: &Calls) -> Panel {
    let launchers = calls.launchers.clone();
    let columns = Columns::<(usize, KernelStats, Launcher)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("name", "kernel", COUNT, "The kernel's name.", |of| of.1.name.clone())
        .add("functor", "computes", COUNT, "The part of its name that says what an element-wise kernel or a reduction computes.", |of| functor(&of.1.name).map(str::to_owned))
        .add("operator", "operator", COUNT, "The innermost operator that launched it, for most of its time.", |of| of.2.0.clone())
        .add("line", "line", COUNT, "The line of the program that called it, for most of its time, if the trace has stacks (with_stack=True).", |of| of.2.1.clone())
        .add("kind", "kind", COUNT, "What it does, according to its name, as in HTA.", |of| of.1.kind.name())
        .add("calls", "calls", COUNT, "How often it ran.", |of| of.1.calls)
        .add("sum_us", "sum", US, "Sum of its durations.", |of| us(of.1.sum_ns))
        .add("mean_us", "mean", US, "Mean duration.", |of| of.1.mean_ns / 1e3)
        .add("std_us", "deviation", US, "Deviation of the durations from their mean (n - 1).",
            |of| of.1.std_ns / 1e3)
        .add("min_us", "min", US, "Shortest duration.", |of| us(of.1.min_ns))
        .add("max_us", "max", US, "Longest duration.", |of| us(of.1.max_ns));
    let rows = analysis.ranks.iter();
    let rows = rows.flat_map(|rank| {
        let top = top_kernels(&rank.kernels, None, LONGEST).into_iter();
        top.map(|kernel| {
            let launcher = launchers.get(&kernel.name).cloned().unwrap_or_default();
            (rank.rank, kernel, launcher)
        })
    });
    let definition = "The twelve longest kernels of each rank, and all others in one row.";
    let table = columns.table(rows);
    let is_known = |key: &str| {
        let at = table.columns.iter().position(|of| of.key == key);
        at.is_some_and(|at| table.rows.iter().any(|row| row[at] != Cell::Missing))
    };
    let table = table.with_columns(|of| !OPTIONAL.contains(&&*of.key) || is_known(&of.key));
    Panel::table("kernels", "Kernels", definition, table, NO_KERNEL)
}
