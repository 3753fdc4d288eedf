//! Scatter: every rank copies its share of the root's data; shares may differ in length.
//!
//! Steps: gate, copy, gate. Each rank reads and writes its share. Nothing is summed.

use super::pull::{Cut, pull};
use super::state::Shared;
use crate::CollectiveError;
use crate::context::Trip;

pub(super) fn run(shared: &Shared, trip: &Trip) -> Result<u64, CollectiveError> {
    let met = shared.meet(trip)?;
    let (call, shares) = (trip.call, met.shares());
    let block = |source, reader| match source == call.root {
        true => shares.bytes(reader, call.dtype),
        false => 0..0,
    };
    pull(shared, trip, &met, Cut::Blocks, block, |window| {
        // SAFETY: the receiving side is this rank's own, and as long as its share.
        unsafe { window.copy(call.root, call.recv.base) };
    })?;
    Ok(met.present_ns)
}
