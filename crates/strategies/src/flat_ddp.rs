//! One all-reduce of all gradients at once, after backward.
//!
//! The opposite of `simple_ddp`: the latency is paid once, and nothing can overlap because the last
//! gradient must be there first. Flat storage makes it free of copies, padding included.
//!
//! Operations per step: one. Bytes: the gradients. Memory: nothing beyond them. It wins over
//! `simple_ddp` when there are many small parameters, and over `ddp` where there is nothing to hide
//! behind, as with very little computation per step.

use paceline_collectives::ReduceOp;
use paceline_trace::SpanTrack;

use crate::strategy::span;
use crate::{Exactness, Replica, Result, Strategy};

/// Averages all gradients in one operation.
#[derive(Debug, Default)]
pub struct FlatDdp;

impl Strategy for FlatDdp {
    fn name(&self) -> &'static str {
        "flat_ddp"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Exact
    }

    fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        let grads = replica.storage.grads();
        track.record(span::EXPOSED, || replica.group.all_reduce(grads, ReduceOp::Mean))?;
        Ok(())
    }
}
