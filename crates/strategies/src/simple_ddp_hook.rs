//! A blocking all-reduce inside each gradient-ready hook, while the backward pass waits.
//!
//! Communication happens *during* the backward pass, yet nothing overlaps: the thread that waits is the
//! thread that would compute. A step takes as long as with `simple_ddp`. This strategy shows where to
//! communicate; the next improvement is not to block there (`simple_ddp_async`).
//!
//! Operations per step: one per parameter. Bytes: the gradients. Memory: nothing beyond them. It is never the
//! fastest.

use paceline_collectives::{MeshShape, ReduceOp};
use paceline_kernels::elementwise;
use paceline_model::ParamId;
use paceline_trace::SpanTrack;

use crate::in_order::InOrder;
use crate::strategy::span;
use crate::{Exactness, Replica, Result, Strategy};

/// Sums each gradient over the ranks as soon as it is final, then divides by their number.
#[derive(Debug, Default)]
pub struct SimpleDdpHook {
    order: InOrder,
}

impl Strategy for SimpleDdpHook {
    fn name(&self) -> &'static str {
        "simple_ddp_hook"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.order = InOrder::new(&replica.model.layout);
        Ok(())
    }

    fn gradient_ready(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        id: ParamId,
    ) -> Result<()> {
        let world_size = replica.group.world_size() as f64;
        self.order.ready(id);
        while let Some(id) = self.order.pop() {
            let grad = replica.storage.grad(id)?;
            track.record(span::EXPOSED, || replica.group.all_reduce(&grad, ReduceOp::Sum))?;
            track.record(span::GRAD_SYNC, || {
                elementwise::divide(&replica.compute, &grad, world_size)
            })?;
        }
        Ok(())
    }

    fn finish_gradients(&mut self, _: &Replica, _: &mut SpanTrack) -> Result<()> {
        self.order.restart();
        Ok(())
    }
}
