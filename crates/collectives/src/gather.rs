//! Gather: the root gets every rank's data, in rank order.
//!
//! Steps: gate, the root copies, gate. The root reads and writes `world` times `S` bytes; the
//! others only wait. Nothing is summed.

use crate::CollectiveError;
use crate::round::{Plan, STAGING_BYTES, Trip};

pub(crate) fn run(trip: &Trip) -> Result<u64, CollectiveError> {
    let call = trip.call;
    // The root's receiving area is private to it, so it claims every unit itself.
    let claims = trip.core.rank == call.root;
    let plan = Plan { copy_in: true, copy_out: false, claims, unit_bytes: STAGING_BYTES };
    trip.in_pieces(&plan, |peers, unit, piece_start| {
        for (rank, peer) in peers.iter().enumerate() {
            let to = rank * call.data.len_bytes + piece_start + unit.start;
            // SAFETY: the unit lies within every rank's piece, and the receiving area, which the
            // group checked to hold `world` messages, belongs to this rank alone.
            unsafe {
                let to = call.recv.base.add(to);
                std::ptr::copy_nonoverlapping(peer.add(unit.start), to, unit.len());
            }
        }
    })
}
