//! Gather: the root copies every rank's data, in rank order; lengths may differ.
//!
//! Steps: barrier phase, the root copies, barrier phase. The root reads and writes `S` bytes for a result of `S`; the
//! others only wait. Nothing is summed.

use super::pull::{Fetch, pull};
use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let (call, shares) = (context.call, met.shares());
    let block = |source, _| 0..shares.bytes(source, call.dtype).len();
    pull(shared, context, &met, Fetch::Whole, block, |window| {
        if shared.rank != call.root {
            return;
        }
        for source in 0..shared.world {
            let own = call.recv.part(shares.bytes(source, call.dtype));
            // SAFETY: the receiving memory is the root's own, and the shares fill it exactly.
            unsafe { window.copy(source, own.base) };
        }
    })?;
    Ok(met.present_ns)
}
