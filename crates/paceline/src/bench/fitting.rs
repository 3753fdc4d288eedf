//! Which sizes the memory of this host can hold.

use super::plan::Plan;
use super::result::Skipped;
use crate::cli::TransportName;
use crate::resources;

/// The part of the available memory that buffers may take.
const MEMORY_PART: f64 = 0.9;

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
            let needed = 2.0 * bytes as f64 * local_ranks as f64;
            if needed <= MEMORY_PART * available {
                fitting.sizes.push(size);
                continue;
            }
            let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
            let reason = format!(
                "{local_ranks} ranks need {}, {} are free",
                gb(needed),
                gb(MEMORY_PART * available)
            );
            let (transport, bytes) = (transport.name().to_owned(), Some(bytes as u64));
            fitting.skipped.push(Skipped { transport, nproc, bytes, reason });
        }
        fitting
    }
}
