//! All-gather: every rank gets the data of every rank, in rank order; lengths may differ.
//!
//! Steps: barrier phase, copy, barrier phase. For a result of `S` bytes, all ranks together read and write `(n-1) S` (in
//! place) or `n S`. Nothing is summed.
//!
//! If every rank's result can be reached, each rank writes its own share to all results: a share that it
//! has just computed is still in its cache. After a reduce-scatter of the same memory, so are the
//! places that the share goes to. If data are staged, each rank copies all shares for itself.

use super::pull::{Fetch, pull};
use super::round::Round;
use super::state::SharedState;
use crate::Result;
use crate::call::Shares;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let (call, shares) = (context.call, met.shares());
    if !met.is_anyone_staged {
        push(shared, context, &met, &shares)?;
        return Ok(met.present_ns);
    }
    let block = |source, _| 0..shares.bytes(source, call.dtype).len();
    pull(shared, context, &met, Fetch::Whole, block, |window| {
        for source in 0..shared.world {
            let own = call.recv.part(shares.bytes(source, call.dtype));
            // SAFETY: the receiving side is this rank's own, and the shares fill it exactly.
            unsafe { window.copy(source, own.base) };
        }
    })?;
    Ok(met.present_ns)
}

fn push(shared: &SharedState, context: &OpContext, met: &Round, shares: &Shares) -> Result<()> {
    let own = shares.bytes(shared.rank, context.call.dtype);
    // Each rank begins with itself, so that the ranks do not all write to one rank's memory at the same time.
    for target in (0..shared.world).map(|step| (shared.rank + step) % shared.world) {
        let place = shared.control().slot(met.number, target).recv.load();
        let place = place.map(|place| place.after(own.start));
        let to = shared.resolve(context, target, place, own.len())?;
        let from = context.call.send.base;
        if own.is_empty() || std::ptr::eq(from, to) {
            continue;
        }
        // SAFETY: both are valid for the share until the last phase completes. Only this rank's share is written to
        // `to`, which does not overlap `from`: the case in which both are the same was skipped above.
        unsafe { std::ptr::copy_nonoverlapping(from, to, own.len()) };
    }
    shared.finish(context, met.number)
}
