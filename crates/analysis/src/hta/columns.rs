//! The columns of the summary, each declared once: its name, unit, definition, and how to get the figure of a rank from
//! its analysis.

use std::borrow::Cow;
use std::sync::LazyLock;

use super::{CollectiveKind, KernelKind, Kind, MemoryUse, RankAnalysis};
use crate::table::{Cell, Column, Head};

/// The columns of a kind of run, in the order of `summary.csv`. A cell is missing if the figure is not defined, such as
/// the overlap of a rank that did not communicate.
pub fn columns(kind: Kind) -> impl Iterator<Item = &'static Column<RankAnalysis>> {
    ALL.iter()
        .filter(move |(only, _)| only.is_none_or(|only| only == kind))
        .map(|(_, column)| column)
}

/// A column. `key` is its name in `summary.csv`, which ends with its unit as HTA writes it; the label is the name without
/// that. Where HTA's words mean something else in the rest of paceline, the label has other words.
fn column<C: Into<Cell> + 'static>(
    key: &'static str,
    get: fn(&RankAnalysis) -> C,
    definition: &'static str,
) -> Column<RankAnalysis> {
    // Memory is counted in 2^20 bytes, although the names end in `_mb`.
    let units = [("_us", "us", 1), ("_ms", "ms", 2), ("_pctg", "%", 2), ("_mb", "MiB", 2)];
    let (label, unit, decimals) = units
        .into_iter()
        .find_map(|(ending, unit, decimals)| Some((key.strip_suffix(ending)?, unit, decimals)))
        .unwrap_or((key, "", 0));
    let label = match key {
        "comm_comp_overlap_pctg" => Cow::Borrowed("communication hidden"),
        "comm_overhead_pctg" => Cow::Borrowed("comm. of kernel time"),
        _ => Cow::Owned(label.replace('_', " ")),
    };
    Column::new(Head { label, ..Head::new(key, "", (unit, decimals), definition) }, get)
}

fn us(time_ns: i64) -> f64 {
    time_ns as f64 / 1e3
}

fn kind_us(of: &RankAnalysis, kind: KernelKind) -> f64 {
    us(of.kernels.iter().filter(|kernel| kernel.kind == kind).map(|kernel| kernel.sum_ns).sum())
}

/// Waits are not work, so [`KernelKind::Other`] does not count.
fn kernels_us(of: &RankAnalysis) -> f64 {
    use KernelKind::{Communication, Computation, Memory};
    [Computation, Communication, Memory].map(|kind| kind_us(of, kind)).iter().sum()
}

fn comm_overhead_pctg(of: &RankAnalysis) -> Option<f64> {
    let total_us = kernels_us(of);
    (total_us > 0.0).then(|| 100.0 * kind_us(of, KernelKind::Communication) / total_us)
}

fn mib(of: &RankAnalysis, bytes: fn(&MemoryUse) -> f64) -> Option<f64> {
    of.memory.as_ref().map(|memory| bytes(memory) / f64::from(1 << 20))
}

const DDP: Option<Kind> = Some(Kind::Ddp);
const SHARDING: Option<Kind> = Some(Kind::Sharding);

/// All columns. `None` stands for a column of both kinds of runs, `Some` for the only kind that has it.
#[rustfmt::skip]
static ALL: LazyLock<Vec<(Option<Kind>, Column<RankAnalysis>)>> = LazyLock::new(|| vec![
    (None, column("rank", |of| of.rank,
        "The rank of the process.")),
    (None, column("idle_time_us", |of| us(of.temporal.idle_ns),
        "Time between the first and the last kernel in which no kernel ran.")),
    (None, column("temporal_compute_time_us", |of| us(of.temporal.compute_ns),
        "Time in which at least one compute kernel ran; kernels that run at the same time count once.")),
    (None, column("non_compute_time_us", |of| us(of.temporal.non_compute_ns),
        "Time in which kernels ran, but none that computes: kernel time - compute - idle.")),
    (None, column("kernel_time_us", |of| us(of.temporal.kernel_time_ns),
        "From the begin of the first to the end of the last kernel.")),
    (None, column("idle_time_pctg", |of| of.temporal.pctg(of.temporal.idle_ns),
        "Idle time as a share of kernel time: 100 * idle_time_us / kernel_time_us.")),
    (None, column("compute_time_pctg", |of| of.temporal.pctg(of.temporal.compute_ns),
        "Time with compute kernels as a share of kernel time: 100 * temporal_compute_time_us / kernel_time_us.")),
    (None, column("non_compute_time_pctg", |of| of.temporal.pctg(of.temporal.non_compute_ns),
        "Time with other kernels only as a share of kernel time: 100 * non_compute_time_us / kernel_time_us.")),
    (None, column("comm_comp_overlap_pctg", |of| of.overlap.pctg(),
        "Share of communication during which a compute kernel ran as well: 100 * |communication and computation| / |communication|, \
         over the steps of the trace that were looked at. `paceline train` measures hidden communication itself, over all measured \
         steps, as communication while the main thread computed.")),
    (None, column("total_kernel_time_us", kernels_us,
        "Sum of the durations of compute, communication and memory kernels; kernels that run at the same time count each.")),
    (None, column("compute_time_us", |of| kind_us(of, KernelKind::Computation),
        "Sum of the durations of compute kernels.")),
    (None, column("comm_time_us", |of| kind_us(of, KernelKind::Communication),
        "Sum of the durations of communication kernels, waiting for other ranks included.")),
    (None, column("memory_time_us", |of| kind_us(of, KernelKind::Memory),
        "Sum of the durations of copies and memory sets.")),
    (None, column("all_reduce_time_us", |of| us(of.collectives.time_ns(CollectiveKind::AllReduce)),
        "Sum of the durations of all-reduces.")),
    (DDP, column("all_reduce_calls", |of| of.collectives.calls(CollectiveKind::AllReduce),
        "How many all-reduces ran.")),
    (SHARDING, column("all_gather_time_us", |of| us(of.collectives.time_ns(CollectiveKind::AllGather)),
        "Sum of the durations of all-gathers.")),
    (SHARDING, column("reduce_scatter_time_us", |of| us(of.collectives.time_ns(CollectiveKind::ReduceScatter)),
        "Sum of the durations of reduce-scatters.")),
    (SHARDING, column("broadcast_time_us", |of| us(of.collectives.time_ns(CollectiveKind::Broadcast)),
        "Sum of the durations of broadcasts.")),
    (SHARDING, column("all_to_all_time_us", |of| us(of.collectives.time_ns(CollectiveKind::AllToAll)),
        "Sum of the durations of all-to-alls.")),
    (SHARDING, column("collective_calls", |of| of.collectives.all().0,
        "How many collectives of any kind ran.")),
    (SHARDING, column("collective_time_us", |of| us(of.collectives.all().1),
        "Sum of the durations of collectives of any kind.")),
    (None, column("comm_overhead_pctg", comm_overhead_pctg,
        "Communication as a share of all kernels: 100 * comm_time_us / total_kernel_time_us. Communication counts \
         whether it was hidden or not.")),
    (DDP, column("all_reduce_time_ms", |of| us(of.collectives.time_ns(CollectiveKind::AllReduce)) / 1e3,
        "Sum of the durations of all-reduces, in milliseconds.")),
    (SHARDING, column("collective_time_ms", |of| us(of.collectives.all().1) / 1e3,
        "Sum of the durations of collectives of any kind, in milliseconds.")),
    (None, column("compute_time_ms", |of| kind_us(of, KernelKind::Computation) / 1e3,
        "Sum of the durations of compute kernels, in milliseconds.")),
    (SHARDING, column("memory_samples", |of| of.memory.as_ref().map_or(0, |memory| memory.samples),
        "How many times the trace says how much memory was in use.")),
    (SHARDING, column("peak_allocated_mb", |of| mib(of, |memory| memory.peak_allocated as f64),
        "Most memory that was alive at one moment.")),
    (SHARDING, column("peak_reserved_mb", |of| mib(of, |memory| memory.peak_reserved as f64),
        "Most memory that was taken from the system at one moment.")),
    (SHARDING, column("p50_allocated_mb", |of| mib(of, |memory| memory.p50_allocated),
        "Median over samples of the memory that was alive.")),
    (SHARDING, column("p95_allocated_mb", |of| mib(of, |memory| memory.p95_allocated),
        "95th percentile over samples of the memory that was alive.")),
    (SHARDING, column("final_allocated_mb", |of| mib(of, |memory| memory.final_allocated as f64),
        "Memory that was alive at the last sample.")),
    (SHARDING, column("final_reserved_mb", |of| mib(of, |memory| memory.final_reserved as f64),
        "Memory taken from the system at the last sample.")),
]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_have_the_columns_that_users_of_their_tables_know() {
        let names =
            |kind| columns(kind).map(|column| &*column.head.key).collect::<Vec<_>>().join(" ");
        let shared = "rank idle_time_us temporal_compute_time_us non_compute_time_us kernel_time_us \
            idle_time_pctg compute_time_pctg non_compute_time_pctg comm_comp_overlap_pctg \
            total_kernel_time_us compute_time_us comm_time_us memory_time_us";
        let ddp = "all_reduce_time_us all_reduce_calls comm_overhead_pctg all_reduce_time_ms \
            compute_time_ms";
        let sharding = "all_reduce_time_us all_gather_time_us reduce_scatter_time_us \
            broadcast_time_us all_to_all_time_us collective_calls collective_time_us \
            comm_overhead_pctg collective_time_ms compute_time_ms memory_samples peak_allocated_mb \
            peak_reserved_mb p50_allocated_mb p95_allocated_mb final_allocated_mb final_reserved_mb";
        assert_eq!(names(Kind::Ddp), format!("{shared} {ddp}"));
        assert_eq!(names(Kind::Sharding), format!("{shared} {sharding}"));
    }
}
