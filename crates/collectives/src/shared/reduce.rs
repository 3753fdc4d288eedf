//! Reduce: the root gets the reduction of all ranks' data.
//!
//! As all-reduce, with one output: steps gate, units, gate; together the ranks read `world` times `S`
//! bytes and write `S`. Order of summation: rank 0, 1, 2, ..., for each element.

use super::all_reduce;
use super::state::Shared;
use crate::CollectiveError;
use crate::context::Trip;

pub(super) fn run(shared: &Shared, trip: &Trip) -> Result<u64, CollectiveError> {
    let root = trip.call.root;
    all_reduce::reduce_to(shared, trip, root..root + 1)
}
