//! All-to-all: every rank copies the block that each rank has for it; blocks may differ in length.
//!
//! Steps: barrier phase, copy, barrier phase. Each rank reads and writes as many bytes as it receives. Nothing is summed.

use std::sync::atomic::Ordering;

use super::pull::{Fetch, pull};
use super::state::SharedState;
use crate::Result;
use crate::call::Shares;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let met = shared.meet(context)?;
    let (call, world) = (context.call, shared.world);
    let sent = |from, to| shared.control().blocks(met.number, from, to)[0].load(Ordering::Relaxed);
    let rows: Vec<Shares> =
        (0..world).map(|from| Shares::of((0..world).map(|to| sent(from, to)))).collect();
    let column = Shares::of((0..world).map(|from| sent(from, shared.rank)));
    let block = |source: usize, reader| rows[source].bytes(reader, call.dtype);
    pull(shared, context, &met, Fetch::Blocks, block, |window| {
        for source in 0..world {
            let own = call.recv.part(column.bytes(source, call.dtype));
            // SAFETY: the receiving memory is this rank's own, and the blocks fill it exactly.
            unsafe { window.copy(source, own.base) };
        }
    })?;
    Ok(met.present_ns)
}
