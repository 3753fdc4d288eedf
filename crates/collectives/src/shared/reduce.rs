//! Reduce: the root gets the reduction of all ranks' data.
//!
//! Like all-reduce, with one output. Steps: barrier phase, chunks, barrier phase. All ranks together read
//! `world` times `S` bytes and write `S` bytes. Order of summation: the tree over ranks 0, 1, 2, ...

use super::all_reduce;
use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let root = context.call.root;
    all_reduce::reduce_to(shared, context, root..root + 1)
}
