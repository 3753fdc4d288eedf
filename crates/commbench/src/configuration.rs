//! One configuration of a sweep: how it is measured, in words, and which sizes fit into the memory of this host.

use paceline_collectives::{Algorithm, OpKind};
use paceline_host::resources;
use paceline_launch::TransportName;
use paceline_launch::device::Device;

use super::plan::Plan;
use super::result::Skipped;
use crate::args::MeasuringArgs;

/// The fraction of the available memory that buffers may take.
const MEMORY_PART: f64 = 0.9;

/// Bytes of messages in flight that the system keeps for sockets, on each rank.
const SOCKET_BYTES: f64 = 1e6;

/// A transport and a number of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Configuration<'a> {
    pub(super) plan: &'a Plan,
    pub(super) transport: TransportName,
    pub(super) nproc: usize,
}

impl Plan {
    /// The configurations, in the order in which they are measured.
    pub(super) fn configurations(&self) -> impl Iterator<Item = Configuration<'_>> {
        let of = move |transport| move |&nproc| Configuration { plan: self, transport, nproc };
        self.transports.iter().flat_map(move |&transport| self.nprocs.iter().map(of(transport)))
    }
}

impl Configuration<'_> {
    /// The reason why it cannot run at all; `None` if it can.
    pub(super) fn refusal(&self) -> Option<String> {
        let (nproc, cores) = (self.nproc, resources::num_cores());
        if self.plan.ranks.pin_cores && nproc > cores {
            return Some(format!("--pin-cores: {nproc} ranks, but {cores} cores"));
        }
        self.plan.comm.refusal(self.transport, nproc)
    }

    /// The record that it is not measured, or not with this size.
    pub(super) fn skipped(&self, bytes: Option<u64>, reason: String) -> Skipped {
        let transport = self.transport.name().to_owned();
        Skipped { transport, nproc: self.nproc, bytes, reason }
    }

    /// The name of the algorithm by which the transport carries out the operation.
    pub(super) fn algorithm(&self) -> &'static str {
        let Plan { operation, ranks, comm, .. } = self.plan;
        match self.transport {
            TransportName::Thread | TransportName::Shm if ranks.private => "private",
            // Only all-reduce has a choice.
            TransportName::Tcp if operation.kind == OpKind::AllReduce => comm.algorithm.name(),
            TransportName::Mpi => "library",
            TransportName::Nccl => comm.nccl_order.name(),
            _ => Algorithm::Direct.name(),
        }
    }

    /// How it is measured, in words after the name of its transport. `pinned` names each rank's processors.
    pub(super) fn about(&self, pinned: Option<String>) -> String {
        let Plan { measuring, ranks, comm, operation, .. } = self.plan;
        let MeasuringArgs { iters, agg_iters, warmup_iters, .. } = measuring;
        let calls = if *agg_iters > 1 { format!(" of {agg_iters} calls") } else { String::new() };
        let name = self.algorithm();
        let note = if operation.kind.reduces() && matches!(name, "ring" | "auto" | "library") {
            " (another order of sums: their last bits may differ)"
        } else {
            ""
        };
        let words = [
            Some(format!(
                "medians of {iters} iterations{calls} after {warmup_iters}, each the slowest rank's"
            )),
            ranks.private.then(|| "private buffers".to_owned()),
            (ranks.device != Device::Cpu).then(|| format!("in memory of {}", ranks.device)),
            Some(format!("algorithm {name}{note}")),
            comm.link.map(|link| format!("on an emulated link of {link}")),
            pinned,
        ];
        format!(": {}", words.into_iter().flatten().collect::<Vec<_>>().join("; "))
    }

    /// Splits the sizes into those that fit into memory with `local_ranks` ranks on this host, and skipped ones.
    pub(super) fn fitting(&self, local_ranks: usize) -> (Vec<u64>, Vec<Skipped>) {
        let available = resources::available_bytes().map_or(f64::INFINITY, |bytes| bytes as f64);
        let usable = MEMORY_PART * available;
        let (mut sizes, mut skipped) = (Vec::new(), Vec::new());
        for &size in &self.plan.sizes {
            let operation = &self.plan.operation;
            let bytes = operation.bytes(size, self.nproc);
            // Each rank has two buffers, and for a device their copies on the host.
            let num_buffers = if self.plan.ranks.device == Device::Cpu { 2.0 } else { 4.0 };
            let per_rank = num_buffers * bytes as f64 + self.scratch_bytes(local_ranks, bytes);
            let needed = per_rank * local_ranks as f64;
            if needed <= usable {
                sizes.push(size);
                continue;
            }
            let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
            let (needed, usable) = (gb(needed), gb(usable));
            let reason = format!("{local_ranks} ranks need {needed}, {usable} may be used");
            skipped.push(self.skipped(Some(bytes), reason));
        }
        (sizes, skipped)
    }

    /// Bytes that the transport needs on each rank for a message of `bytes` bytes.
    fn scratch_bytes(&self, local_ranks: usize, bytes: u64) -> f64 {
        let Plan { operation, comm, .. } = self.plan;
        match self.transport {
            TransportName::Hybrid if operation.kind.reduces() => {
                let hosts_here = if local_ranks == self.nproc { comm.hosts } else { 1 };
                let ranks_per_host = (local_ranks / hosts_here).max(1);
                // A rank has its slice of its host's partial sums, of four bytes per element if the type has two; at most
                // this many if the number of ranks is not a power of two.
                let num_partials = match ranks_per_host {
                    count if count.is_power_of_two() => 1,
                    count => 2 * count.ilog2(),
                };
                let width = if operation.dtype.size_bytes() == 2 { 2 } else { 1 };
                // A reduce needs room for a slice of the result too.
                let slices = num_partials * width + u32::from(operation.kind == OpKind::Reduce);
                SOCKET_BYTES + f64::from(slices) * bytes as f64 / ranks_per_host as f64
            }
            TransportName::Tcp | TransportName::Hybrid => SOCKET_BYTES,
            TransportName::Thread
            | TransportName::Shm
            | TransportName::Mpi
            | TransportName::Nccl => 0.0,
        }
    }
}
