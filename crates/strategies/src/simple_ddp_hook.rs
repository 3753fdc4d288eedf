//! A blocking all-reduce inside each gradient-ready hook, while the backward pass waits.
//!
//! Communication happens *during* the backward pass, yet nothing overlaps: the thread that waits is the
//! thread that would compute. A step takes as long as with `simple_ddp`. This strategy shows where to
//! communicate; the next improvement is not to block there (`simple_ddp_async`).
//!
//! Operations per step: one per parameter. Bytes: the gradients. Memory: nothing beyond them. It is never the
//! fastest.

use paceline_collectives::{MeshShape, ReduceOp};
use paceline_model::ParamId;

use crate::in_order::InOrder;
use crate::{Exactness, Replica, Result, StepContext, Strategy, span};

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

    fn begin_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.order.restart();
        Ok(())
    }

    fn gradient_ready(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        let Replica { storage, group, .. } = cx.replica;
        self.order.ready(id);
        while let Some(id) = self.order.pop() {
            let grad = storage.grad(id)?;
            cx.track.record(span::EXPOSED, || group.all_reduce(&grad, ReduceOp::Sum))?;
            cx.track.record(span::GRAD_SYNC, || cx.replica.average(&grad))?;
        }
        Ok(())
    }

    fn finish_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.order.finish();
        Ok(())
    }
}
