//! Reduce: the root gets the reduction of all ranks' data.
//!
//! As all-reduce, with one output: steps gate, units, gate; together the ranks read `world` times `S`
//! bytes and write `S`. Order of summation: rank 0, 1, 2, ..., for each element.

use super::all_reduce;
use super::state::Shared;
use crate::CollectiveError;
use crate::context::OpContext;

pub(super) fn run(shared: &Shared, context: &OpContext) -> Result<u64, CollectiveError> {
    let root = context.call.root;
    all_reduce::reduce_to(shared, context, root..root + 1)
}
