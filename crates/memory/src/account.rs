//! Bytes by category: how many are in use now, and the most that were ever in use at once.
//!
//! Input: changes of the memory in use. Output: usage by category, and events on a track. This module knows
//! nothing of where memory comes from.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use paceline_trace::{Event, Track, now_ns};

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Model parameters.
    Parameters,
    /// Gradients of the parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// What a rank holds of sharded tensors besides its shard: the parameters and gradients of units that are open.
    Unsharded,
    /// Layer outputs and what layers save for their backward pass.
    Activations,
    /// Scratch memory inside one kernel.
    Workspace,
    /// Staging areas of collectives.
    Communication,
    /// Batches, before the model uses them.
    Data,
}

impl Category {
    /// Every category, in the order of reports.
    pub const ALL: [Category; 8] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Unsharded,
        Category::Activations,
        Category::Workspace,
        Category::Communication,
        Category::Data,
    ];

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Unsharded => "unsharded",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
            Category::Data => "data",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of one category, or of all categories together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use now.
    pub current_bytes: u64,
    /// The most bytes that were in use at once.
    pub peak_bytes: u64,
}

#[derive(Debug, Default)]
struct Counter {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Counter {
    /// Returns how many bytes are in use now.
    fn add(&self, bytes: u64) -> u64 {
        let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        now
    }

    /// Returns how many bytes are in use now.
    fn remove(&self, bytes: u64) -> u64 {
        self.current.fetch_sub(bytes, Ordering::Relaxed) - bytes
    }

    fn usage(&self) -> Usage {
        Usage {
            current_bytes: self.current.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }
}

/// The account of one allocator.
#[derive(Debug, Default)]
pub(crate) struct Account {
    by_category: [Counter; Category::ALL.len()],
    total: Counter,
    /// Memory obtained from the system, in bytes: in use, or free in a pool.
    reserved_bytes: AtomicU64,
    /// The track on which every change is recorded.
    track: OnceLock<Arc<Track>>,
}

impl Account {
    pub(crate) fn add(&self, category: Category, bytes: usize, address: usize) {
        self.by_category[category as usize].add(bytes as u64);
        let now = self.total.add(bytes as u64);
        self.record(category, bytes as i64, now, address);
    }

    pub(crate) fn remove(&self, category: Category, bytes: usize, address: usize) {
        self.by_category[category as usize].remove(bytes as u64);
        let now = self.total.remove(bytes as u64);
        self.record(category, -(bytes as i64), now, address);
    }

    fn record(&self, category: Category, delta_bytes: i64, allocated_bytes: u64, address: usize) {
        if let Some(track) = self.track.get().filter(|track| track.is_on()) {
            track.record(Event::Memory {
                at_ns: now_ns(),
                category: category.name(),
                delta_bytes,
                allocated_bytes,
                reserved_bytes: self.reserved_bytes(),
                address: address as u64,
            });
        }
    }

    /// Records every change from now on, unless a track is set already.
    pub(crate) fn record_on(&self, track: Arc<Track>) {
        let _ = self.track.set(track);
    }

    pub(crate) fn reserve(&self, bytes: usize) {
        self.reserved_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn release(&self, bytes: usize) {
        self.reserved_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn usage(&self, category: Category) -> Usage {
        self.by_category[category as usize].usage()
    }

    pub(crate) fn total(&self) -> Usage {
        self.total.usage()
    }
}
