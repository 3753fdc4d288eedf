//! One all-reduce of all gradients at once, after backward.
//!
//! The opposite of `simple_ddp`: the latency is paid only once, but nothing can overlap, because the last
//! gradient must be final first. Flat storage makes copies unnecessary; its padding is reduced too.
//!
//! Operations per step: one. Bytes: the gradients. Memory: nothing beyond them. It is faster than
//! `simple_ddp` for models with many small parameters, and faster than `ddp` if each step has too little
//! computation to overlap with.

use paceline_collectives::{MeshShape, ReduceOp};
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

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        let grads = replica.storage.grads().tensor();
        track.record(span::EXPOSED, || replica.group.all_reduce(grads, ReduceOp::Mean))?;
        Ok(())
    }
}
