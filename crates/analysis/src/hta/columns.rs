//! The columns of the summary, each declared once: its name, unit, definition, and how to get the figure from
//! a [`Row`].

use super::{Kind, Row};

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// The number of a rank.
    Rank,
    /// Microseconds.
    Us,
    /// Milliseconds.
    Ms,
    /// Percent.
    Percent,
    /// A number of things.
    Count,
    /// 2^20 bytes.
    Mb,
}

impl Unit {
    /// The symbol after a number; empty for ranks and counts.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Rank | Self::Count => "",
            Self::Us => "us",
            Self::Ms => "ms",
            Self::Percent => "%",
            Self::Mb => "MB",
        }
    }
}

/// A column of the summary.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// The name in the header of `summary.csv`.
    pub name: &'static str,
    /// Its unit.
    pub unit: Unit,
    /// What it means, in a whole sentence.
    pub definition: &'static str,
    /// The figure of a rank; `None` if it is not defined, such as the overlap of a rank that did not
    /// communicate.
    pub get: fn(&Row) -> Option<f64>,
}

/// The columns of a kind of run, in the order of `summary.csv`.
pub fn columns(kind: Kind) -> impl Iterator<Item = &'static Column> {
    ALL.iter()
        .filter(move |(only, _)| only.is_none_or(|only| only == kind))
        .map(|(_, column)| column)
}

macro_rules! column {
    ($only:expr, $name:literal, $unit:ident, $get:expr, $definition:literal) => {
        ($only, Column { name: $name, unit: Unit::$unit, definition: $definition, get: $get })
    };
}

const DDP: Option<Kind> = Some(Kind::Ddp);
const SHARDING: Option<Kind> = Some(Kind::Sharding);

/// All columns. `None` stands for a column of both kinds of runs, `Some` for the only kind that has it.
#[rustfmt::skip]
static ALL: &[(Option<Kind>, Column)] = &[
    column!(None, "rank", Rank, |row| Some(row.rank as f64),
        "The rank of the process."),
    column!(None, "idle_time_us", Us, |row| Some(row.idle_time_us),
        "Time between the first and the last kernel in which no kernel ran."),
    column!(None, "temporal_compute_time_us", Us, |row| Some(row.temporal_compute_time_us),
        "Time in which at least one compute kernel ran; kernels that run at the same time count once."),
    column!(None, "non_compute_time_us", Us, |row| Some(row.non_compute_time_us),
        "Time in which kernels ran, but none that computes: kernel time - compute - idle."),
    column!(None, "kernel_time_us", Us, |row| Some(row.kernel_time_us),
        "From the begin of the first to the end of the last kernel."),
    column!(None, "idle_time_pctg", Percent, |row| row.idle_time_pctg,
        "Idle time as a share of kernel time: 100 * idle_time_us / kernel_time_us."),
    column!(None, "compute_time_pctg", Percent, |row| row.compute_time_pctg,
        "Time with compute kernels as a share of kernel time: 100 * temporal_compute_time_us / kernel_time_us."),
    column!(None, "non_compute_time_pctg", Percent, |row| row.non_compute_time_pctg,
        "Time with other kernels only as a share of kernel time: 100 * non_compute_time_us / kernel_time_us."),
    column!(None, "comm_comp_overlap_pctg", Percent, |row| row.comm_comp_overlap_pctg,
        "Share of communication during which a compute kernel ran as well: 100 * |communication and computation| / |communication|."),
    column!(None, "total_kernel_time_us", Us, |row| Some(row.total_kernel_time_us),
        "Sum of the durations of compute, communication and memory kernels; kernels that run at the same time count each."),
    column!(None, "compute_time_us", Us, |row| Some(row.compute_time_us),
        "Sum of the durations of compute kernels."),
    column!(None, "comm_time_us", Us, |row| Some(row.comm_time_us),
        "Sum of the durations of communication kernels, waiting for other ranks included."),
    column!(None, "memory_time_us", Us, |row| Some(row.memory_time_us),
        "Sum of the durations of copies and memory sets."),
    column!(None, "all_reduce_time_us", Us, |row| Some(row.all_reduce_time_us),
        "Sum of the durations of all-reduces."),
    column!(DDP, "all_reduce_calls", Count, |row| Some(row.all_reduce_calls as f64),
        "How many all-reduces ran."),
    column!(SHARDING, "all_gather_time_us", Us, |row| Some(row.all_gather_time_us),
        "Sum of the durations of all-gathers."),
    column!(SHARDING, "reduce_scatter_time_us", Us, |row| Some(row.reduce_scatter_time_us),
        "Sum of the durations of reduce-scatters."),
    column!(SHARDING, "broadcast_time_us", Us, |row| Some(row.broadcast_time_us),
        "Sum of the durations of broadcasts."),
    column!(SHARDING, "all_to_all_time_us", Us, |row| Some(row.all_to_all_time_us),
        "Sum of the durations of all-to-alls."),
    column!(SHARDING, "collective_calls", Count, |row| Some(row.collective_calls as f64),
        "How many collectives of any kind ran."),
    column!(SHARDING, "collective_time_us", Us, |row| Some(row.collective_time_us),
        "Sum of the durations of collectives of any kind."),
    column!(None, "comm_overhead_pctg", Percent, |row| row.comm_overhead_pctg,
        "Communication as a share of all kernels: 100 * comm_time_us / total_kernel_time_us."),
    column!(DDP, "all_reduce_time_ms", Ms, |row| Some(row.all_reduce_time_us / 1e3),
        "Sum of the durations of all-reduces, in milliseconds."),
    column!(SHARDING, "collective_time_ms", Ms, |row| Some(row.collective_time_us / 1e3),
        "Sum of the durations of collectives of any kind, in milliseconds."),
    column!(None, "compute_time_ms", Ms, |row| Some(row.compute_time_us / 1e3),
        "Sum of the durations of compute kernels, in milliseconds."),
    column!(SHARDING, "memory_samples", Count, |row| Some(row.memory_samples as f64),
        "How many times the trace says how much memory was in use."),
    column!(SHARDING, "peak_allocated_mb", Mb, |row| row.peak_allocated_mb,
        "Most memory that was alive at one moment."),
    column!(SHARDING, "peak_reserved_mb", Mb, |row| row.peak_reserved_mb,
        "Most memory that was taken from the system at one moment."),
    column!(SHARDING, "p50_allocated_mb", Mb, |row| row.p50_allocated_mb,
        "Median over samples of the memory that was alive."),
    column!(SHARDING, "p95_allocated_mb", Mb, |row| row.p95_allocated_mb,
        "95th percentile over samples of the memory that was alive."),
    column!(SHARDING, "final_allocated_mb", Mb, |row| row.final_allocated_mb,
        "Memory that was alive at the last sample."),
    column!(SHARDING, "final_reserved_mb", Mb, |row| row.final_reserved_mb,
        "Memory taken from the system at the last sample."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_have_the_columns_that_users_of_their_tables_know() {
        let names = |kind| columns(kind).map(|column| column.name).collect::<Vec<_>>().join(" ");
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
