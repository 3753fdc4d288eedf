//! The simplest data parallelism: after backward, one blocking all-reduce per parameter.
//!
//! Nothing overlaps, and every parameter pays the latency of its own operation. The other strategies improve
//! on that. Operations per step: one per parameter. Bytes: the gradients. Memory: nothing beyond them. It is
//! never the fastest, but all others are checked against it.

use paceline_collectives::{MeshShape, ReduceOp};

use crate::{Exactness, Replica, Result, StepContext, Strategy, span};

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

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        let Replica { model, storage, group, .. } = cx.replica;
        for (id, _) in model.layout.trained() {
            let grad = storage.grad(id)?;
            cx.track.record(span::EXPOSED, || group.all_reduce(&grad, ReduceOp::Sum))?;
            cx.track.record(span::GRAD_SYNC, || cx.replica.average(&grad))?;
        }
        Ok(())
    }
}
