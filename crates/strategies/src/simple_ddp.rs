//! The simplest data parallelism: after backward, one blocking all-reduce per parameter.
//!
//! Nothing overlaps, and every parameter pays the latency of its own operation. The other strategies improve
//! on that. Operations per step: one per parameter. Bytes: the gradients. Memory: nothing beyond them. It is
//! never the fastest, but all others are checked against it.

use paceline_collectives::{MeshShape, ReduceOp};
use paceline_kernels::elementwise;
use paceline_trace::SpanTrack;

use crate::strategy::span;
use crate::{Exactness, Replica, Result, Strategy};

/// Sums each gradient over the ranks, then divides by their number.
#[derive(Debug, Default)]
pub struct SimpleDdp;

impl Strategy for SimpleDdp {
    fn name(&self) -> &'static str {
        "simple_ddp"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        let world_size = replica.group.world_size() as f64;
        for (id, _) in replica.model.layout.trained() {
            let grad = replica.storage.grad(id)?;
            track.record(span::EXPOSED, || replica.group.all_reduce(&grad, ReduceOp::Sum))?;
            track.record(span::GRAD_SYNC, || {
                elementwise::divide(&replica.compute, &grad, world_size)
            })?;
        }
        Ok(())
    }
}
