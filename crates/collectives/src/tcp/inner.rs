//! The connections of a rank and the memory beside them, which every operation over tcp uses.
//!
//! Knows nothing of which operations there are.

use super::mesh::{Interruption, Mesh};
use crate::CollectiveError;
use crate::call::Region;
use crate::context::OpContext;

/// The connections, and memory that is used again by every operation.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) mesh: Mesh,
    pub(crate) scratch: Scratch,
}

/// Memory for data that are on their way, aligned for every element type.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<[u64; 8]>);

impl Scratch {
    /// At least `len_bytes` bytes, with any contents, until the next call.
    pub(crate) fn get(&mut self, len_bytes: usize) -> Region {
        let lines = len_bytes.div_ceil(64);
        if self.0.len() < lines {
            self.0.resize(lines, [0; 8]);
        }
        Region { base: self.0.as_mut_ptr().cast(), len_bytes, is_claimed: false }
    }
}

/// Forgets what is posted after a failed operation. Calls that do not fit together have been named to
/// all peers; otherwise they learn here that this rank gives up.
pub(crate) fn give_up(mesh: &mut Mesh, error: &CollectiveError) {
    match error {
        CollectiveError::Mismatch { .. } | CollectiveError::Counts { .. } => mesh.clear(),
        _ => mesh.give_up(),
    }
}

/// The error for an interrupted operation.
pub(crate) fn explain(mesh: &Mesh, context: &OpContext, why: Interruption) -> CollectiveError {
    match why {
        Interruption::Lost(peer) => context.lost(peer),
        Interruption::GivenUp(missing) => context.given_up(missing),
        Interruption::TimedOut => context.timed_out(mesh.awaited()),
    }
}
