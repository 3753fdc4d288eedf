//! Scatter: every rank copies its share of the root's data; shares may differ in length.
//!
//! Steps: barrier phase, copy, barrier phase. Each rank reads and writes its share. Nothing is summed.

use super::pull::{Fetch, pull};
use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let (call, shares) = (context.call, met.shares());
    let block =
        |source, reader| if source == call.root { shares.bytes(reader, call.dtype) } else { 0..0 };
    pull(shared, context, &met, Fetch::Blocks, block, |window| {
        // SAFETY: the receiving memory is this rank's own, and as long as its share.
        unsafe { window.copy(call.root, call.recv.base) };
    })?;
    Ok(met.present_ns)
}
