//! Which sizes the memory of this host can hold.

use super::plan::Plan;
use super::result::Skipped;
use crate::cli::TransportName;
use crate::resources;

/// The part of the available memory that buffers may take.
const MEMORY_PART: f64 = 0.9;

/// What an exchange over sockets keeps of messages that are under way, on each rank.
const SOCKET_ROOM: f64 = 1e6;

/// The sizes that the memory has room for, and the others.
pub(super) struct Fitting {
    pub(super) sizes: Vec<u64>,
    pub(super) skipped: Vec<Skipped>,
}

impl Fitting {
    pub(super) fn of(
        plan: &Plan,
        transport: TransportName,
        nproc: usize,
        local_ranks: usize,
    ) -> Self {
        let available = resources::available_bytes().map_or(f64::INFINITY, |bytes| bytes as f64);
        let mut fitting = Self { sizes: Vec::new(), skipped: Vec::new() };
        for &size in &plan.sizes {
            let bytes = plan.operation.elements(size, nproc) * plan.operation.dtype.size_bytes();
            // Each rank has two buffers of the whole size.
            let per_rank = 2.0 * bytes as f64 + scratch(plan, transport, nproc, local_ranks, bytes);
            let needed = per_rank * local_ranks as f64;
            if needed <= MEMORY_PART * available {
                fitting.sizes.push(size);
                continue;
            }
            let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
            let reason = format!(
                "{local_ranks} ranks need {}, {} may be used",
                gb(needed),
                gb(MEMORY_PART * available)
            );
            let (transport, bytes) = (transport.name().to_owned(), Some(bytes as u64));
            fitting.skipped.push(Skipped { transport, nproc, bytes, reason });
        }
        fitting
    }
}

/// Bytes that the transport itself takes on each rank, for a message of `bytes` bytes.
fn scratch(
    plan: &Plan,
    transport: TransportName,
    nproc: usize,
    local_ranks: usize,
    bytes: usize,
) -> f64 {
    match transport {
        TransportName::Hybrid if plan.operation.is_reduction() => {
            let hosts_here = if local_ranks == nproc { plan.comm.hosts } else { 1 };
            let ranks_per_host = (local_ranks / hosts_here).max(1) as f64;
            // A rank's slice of the running result, which is wider than types of two bytes, and of
            // the finished one.
            let slices = if plan.operation.dtype.size_bytes() == 2 { 3.0 } else { 2.0 };
            SOCKET_ROOM + slices * bytes as f64 / ranks_per_host
        }
        TransportName::Tcp | TransportName::Hybrid => SOCKET_ROOM,
        TransportName::Thread | TransportName::Shm | TransportName::Mpi => 0.0,
    }
}
