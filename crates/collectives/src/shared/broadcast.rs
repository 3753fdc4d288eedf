//! Broadcast: every rank copies the root's data.
//!
//! Steps: barrier phase, copy, barrier phase. Every rank except the root reads and writes `S` bytes. Nothing is summed.

use super::pull::{Fetch, pull};
use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let call = context.call;
    let whole = 0..call.recv.len_bytes;
    let block = |source, _| if source == call.root { whole.clone() } else { 0..0 };
    pull(shared, context, &met, Fetch::Whole, block, |window| {
        // SAFETY: the receiving memory is this rank's own, and has the same length on every rank.
        unsafe { window.copy(call.root, call.recv.base) };
    })?;
    Ok(met.present_ns)
}
