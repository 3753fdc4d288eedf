//! The summary line of one rank.

use super::collectives::{CollectiveKind, CollectiveTimes};
use super::kernels::{KernelKind, KernelStats};
use super::{MemoryUse, Overlap, Temporal};

/// The figures of one rank, for both kinds of runs. [`columns`](super::columns) defines the figures and their
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Row {
    pub rank: usize,
    pub idle_time_us: f64,
    pub temporal_compute_time_us: f64,
    pub non_compute_time_us: f64,
    pub kernel_time_us: f64,
    pub idle_time_pctg: Option<f64>,
    pub compute_time_pctg: Option<f64>,
    pub non_compute_time_pctg: Option<f64>,
    pub comm_comp_overlap_pctg: Option<f64>,
    pub total_kernel_time_us: f64,
    pub compute_time_us: f64,
    pub comm_time_us: f64,
    pub memory_time_us: f64,
    pub all_reduce_time_us: f64,
    pub all_reduce_calls: u64,
    pub all_gather_time_us: f64,
    pub reduce_scatter_time_us: f64,
    pub broadcast_time_us: f64,
    pub all_to_all_time_us: f64,
    pub collective_calls: u64,
    pub collective_time_us: f64,
    pub comm_overhead_pctg: Option<f64>,
    pub memory_samples: u64,
    pub peak_allocated_mb: Option<f64>,
    pub peak_reserved_mb: Option<f64>,
    pub p50_allocated_mb: Option<f64>,
    pub p95_allocated_mb: Option<f64>,
    pub final_allocated_mb: Option<f64>,
    pub final_reserved_mb: Option<f64>,
}

impl Row {
    pub(super) fn of(
        rank: usize,
        temporal: &Temporal,
        overlap: &Overlap,
        kernels: &[KernelStats],
        collectives: &CollectiveTimes,
        memory: Option<&MemoryUse>,
    ) -> Self {
        let us = |time_ns: i64| time_ns as f64 / 1e3;
        let mb = |bytes: f64| bytes / f64::from(1 << 20);
        let sum = |kind: KernelKind| {
            let of_kind = kernels.iter().filter(|kernel| kernel.kind == kind);
            us(of_kind.map(|kernel| kernel.sum_ns).sum())
        };
        let (compute, comm, copies) =
            (sum(KernelKind::Computation), sum(KernelKind::Communication), sum(KernelKind::Memory));
        let total = compute + comm + copies;
        let collective = |kind| us(collectives.time_ns(kind));
        let (collective_calls, collective_ns) = collectives.all();
        Self {
            rank,
            idle_time_us: us(temporal.idle_ns),
            temporal_compute_time_us: us(temporal.compute_ns),
            non_compute_time_us: us(temporal.non_compute_ns),
            kernel_time_us: us(temporal.kernel_time_ns),
            idle_time_pctg: temporal.pctg(temporal.idle_ns),
            compute_time_pctg: temporal.pctg(temporal.compute_ns),
            non_compute_time_pctg: temporal.pctg(temporal.non_compute_ns),
            comm_comp_overlap_pctg: overlap.pctg(),
            total_kernel_time_us: total,
            compute_time_us: compute,
            comm_time_us: comm,
            memory_time_us: copies,
            all_reduce_time_us: collective(CollectiveKind::AllReduce),
            all_reduce_calls: collectives.calls(CollectiveKind::AllReduce),
            all_gather_time_us: collective(CollectiveKind::AllGather),
            reduce_scatter_time_us: collective(CollectiveKind::ReduceScatter),
            broadcast_time_us: collective(CollectiveKind::Broadcast),
            all_to_all_time_us: collective(CollectiveKind::AllToAll),
            collective_calls,
            collective_time_us: us(collective_ns),
            comm_overhead_pctg: (total > 0.0).then(|| 100.0 * comm / total),
            memory_samples: memory.map_or(0, |memory| memory.samples),
            peak_allocated_mb: memory.map(|memory| mb(memory.peak_allocated as f64)),
            peak_reserved_mb: memory.map(|memory| mb(memory.peak_reserved as f64)),
            p50_allocated_mb: memory.map(|memory| mb(memory.p50_allocated)),
            p95_allocated_mb: memory.map(|memory| mb(memory.p95_allocated)),
            final_allocated_mb: memory.map(|memory| mb(memory.final_allocated as f64)),
            final_reserved_mb: memory.map(|memory| mb(memory.final_reserved as f64)),
        }
    }
}
