//! Broadcast: the root's data is copied to every other rank.
//!
//! Steps: gate, units, gate. The root's `S` bytes are read, and written once per other rank; any
//! rank may copy any unit. Nothing is summed.

use crate::CollectiveError;
use crate::round::{Plan, Trip, UNIT_BYTES};

pub(crate) fn run(trip: &Trip) -> Result<u64, CollectiveError> {
    let root = trip.call.root;
    let is_root = trip.core.rank == root;
    let plan = Plan { copy_in: is_root, copy_out: !is_root, claims: true, unit_bytes: UNIT_BYTES };
    trip.in_pieces(&plan, |peers, unit, _| {
        for (_, peer) in peers.iter().enumerate().filter(|(rank, _)| *rank != root) {
            // SAFETY: the unit lies within every rank's piece, the ranks' data are distinct, and a
            // claimed unit is this rank's alone.
            unsafe {
                let from = peers[root].add(unit.start);
                std::ptr::copy_nonoverlapping(from, peer.add(unit.start), unit.len());
            }
        }
    })
}
