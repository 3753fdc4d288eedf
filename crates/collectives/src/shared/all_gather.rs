//! All-gather: every rank's data reach every rank, in rank order; lengths may differ.
//!
//! Steps: gate, copy, gate. For a result of `S` bytes the ranks together read and write `(n-1) S` (in
//! place) or `n S`. Nothing is summed.
//!
//! Where all results can be reached, each rank writes its own share to all of them: a share that this
//! rank has just computed is still in its cache, and so, after a reduce-scatter of the same memory, are
//! the places that it goes to. Staged, each rank copies for itself.

use super::pull::{Cut, pull};
use super::round::Round;
use super::state::Shared;
use crate::CollectiveError;
use crate::call::Shares;
use crate::context::OpContext;

pub(super) fn run(shared: &Shared, context: &OpContext) -> Result<u64, CollectiveError> {
    let met = shared.meet(context)?;
    let (call, shares) = (context.call, met.shares());
    if !met.is_anyone_staged {
        push(shared, context, &met, &shares)?;
        return Ok(met.present_ns);
    }
    let block = |source, _| 0..shares.bytes(source, call.dtype).len();
    pull(shared, context, &met, Cut::Whole, block, |window| {
        for source in 0..shared.world {
            let own = call.recv.part(shares.bytes(source, call.dtype));
            // SAFETY: the receiving side is this rank's own, and the shares fill it exactly.
            unsafe { window.copy(source, own.base) };
        }
    })?;
    Ok(met.present_ns)
}

fn push(
    shared: &Shared,
    context: &OpContext,
    met: &Round,
    shares: &Shares,
) -> Result<(), CollectiveError> {
    let own = shares.bytes(shared.rank, context.call.dtype);
    // Beginning with the next rank, so that not all write to the same one's memory at a time.
    for target in (0..shared.world).map(|step| (shared.rank + step) % shared.world) {
        let place = shared.control().slot(met.number, target).recv.load();
        let place = place.map(|place| place.after(own.start));
        let to = shared.resolve(context, target, place, own.len())?;
        let from = context.call.send.base;
        if own.is_empty() || std::ptr::eq(from, to) {
            continue;
        }
        // SAFETY: both are valid for the share until the last gate; the place belongs to this rank's
        // share alone, and lies apart from it unless it is the same.
        unsafe { std::ptr::copy_nonoverlapping(from, to, own.len()) };
    }
    shared.finish(context, met.number)
}
