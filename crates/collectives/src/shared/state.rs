//! One rank's view of the state that the ranks of a host share.
//!
//! This module does not know which operations exist.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use paceline_memory::Mapping;

use super::control::Control;
use super::segment::Reach;

/// Bytes that each of `world` ranks stages at a time. All ranks meet once for each such piece, which takes long if they do not
/// all have a core, and the ranks divide it.
pub(crate) fn half_bytes(world: usize) -> usize {
    (512 << 10) * world.min(8)
}

/// One rank's view of the shared state.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    memory: Arc<Mapping>,
    pub(crate) reach: Reach,
    pub(super) rounds: AtomicU32,
    /// Bytes that this rank has copied to its staging area.
    staged_bytes: AtomicU64,
    /// The rank that arrived last in the latest operation of all ranks.
    pub(crate) slowest: AtomicUsize,
}

impl SharedState {
    /// `memory` begins with the group's [`Control`].
    pub(crate) fn new(rank: usize, world: usize, memory: Arc<Mapping>, reach: Reach) -> Self {
        Self {
            rank,
            world,
            memory,
            reach,
            rounds: AtomicU32::new(0),
            staged_bytes: AtomicU64::new(0),
            slowest: AtomicUsize::new(0),
        }
    }

    /// Counts bytes that this rank copies to its staging area.
    pub(super) fn count_staged(&self, len_bytes: usize) {
        self.staged_bytes.fetch_add(len_bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that this rank has copied to its staging area since the group was formed.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn staged_bytes(&self) -> u64 {
        self.staged_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn control(&self) -> &Control {
        Control::of(&self.memory, self.world)
    }
}
