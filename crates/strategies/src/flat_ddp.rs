//! One all-reduce of all gradients at once, after backward.
//!
//! The opposite of `simple_ddp`: the latency is paid only once, but nothing can overlap, because the last
//! gradient must be final first. Flat storage makes copies unnecessary; its padding is reduced too.
//!
//! Operations per step: one. Bytes: the gradients. Memory: nothing beyond them. It is faster than
//! `simple_ddp` for models with many small parameters, and faster than `ddp` if each step has too little
//! computation to overlap with.

use paceline_collectives::MeshShape;

use crate::{Exactness, Replica, Result, StepContext, Strategy, span};

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

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        let Replica { storage, group, .. } = cx.replica;
        let grads = storage.grads().tensor();
        cx.track.record(span::EXPOSED, || group.all_reduce(grads, cx.replica.reduce_op()))?;
        Ok(())
    }
}
