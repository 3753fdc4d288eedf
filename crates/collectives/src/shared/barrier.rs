//! Barrier: no rank goes on before all have arrived.
//!
//! Steps: one barrier phase. No bytes are moved, and nothing is summed.

use super::state::SharedState;
use crate::Result;
use crate::context::OpContext;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    Ok(shared.meet(context)?.present_ns)
}
