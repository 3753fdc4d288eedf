//! Reduce-scatter: every rank reduces its own share of all ranks' data.
//!
//! Steps: barrier phase, reduce, barrier phase. For a message of `S` bytes, each rank reads `S` bytes (its share of every
//! rank's data) and writes its share. Order of summation: the tree over ranks
//! 0, 1, 2, ...

use super::pull::{Fetch, pull};
use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;
use crate::reduce::Reduction;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let (call, shares) = (context.call, met.shares());
    let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: shared.world };
    let block = |_, reader| shares.bytes(reader, call.dtype);
    pull(shared, context, &met, Fetch::Blocks, block, |window| {
        let (sources, range) = window.of_all();
        if range.is_empty() {
            return;
        }
        let elems = range.len() / call.dtype.size_bytes();
        // SAFETY: every source is valid for the range, and nobody writes to it. The receiving memory is this
        // rank's own, and either lies apart from the rank's data or is exactly this share of them.
        unsafe { reduction.run(sources, &[call.recv.base.add(range.start)], elems) };
    })?;
    Ok(met.present_ns)
}
