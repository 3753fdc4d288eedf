//! All-reduce, direct: every element is summed in rank order and written to every rank at once.
//!
//! Steps: gate, units, gate. Each rank reads and writes its own share of every rank's data: `S`
//! bytes read and `S` written per rank for a message of `S` bytes, the least there can be when
//! every rank keeps a copy of its own. Order of summation: rank 0, 1, 2, ..., for each element,
//! whichever rank happens to do the unit.

use crate::CollectiveError;
use crate::control::MAX_RANKS;
use crate::reduce::reduce_everywhere;
use crate::round::{Plan, Trip, UNIT_BYTES};

pub(crate) fn run(trip: &Trip) -> Result<u64, CollectiveError> {
    let call = trip.call;
    if trip.core.world == 1 {
        // Any reduction of one value is that value.
        return trip.meet();
    }
    let plan = Plan { copy_in: true, copy_out: true, claims: true, unit_bytes: UNIT_BYTES };
    trip.in_pieces(&plan, |peers, unit, _| {
        let mut regions = [std::ptr::null_mut(); MAX_RANKS];
        for (region, peer) in regions.iter_mut().zip(peers) {
            // SAFETY: the unit lies within every rank's piece.
            *region = unsafe { peer.add(unit.start) };
        }
        let regions = &regions[..peers.len()];
        // SAFETY: every rank's piece is valid and aligned (units and pieces are multiples of the
        // element size), the ranks' data are distinct, and a claimed unit is this rank's alone.
        unsafe { reduce_everywhere(regions, unit.len(), call.dtype, call.op) }
    })
}
