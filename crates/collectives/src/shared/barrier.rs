//! Barrier: nobody goes on before all have arrived.
//!
//! Steps: one gate. No bytes, nothing summed.

use super::state::Shared;
use crate::CollectiveError;
use crate::context::Trip;

pub(super) fn run(shared: &Shared, trip: &Trip) -> Result<u64, CollectiveError> {
    Ok(shared.meet(trip)?.present_ns)
}
