//! Gradients and optimizer state divided among the ranks by whole parameters, as in a first implementation of ZeRO's
//! stage 2.
//!
//! Every parameter has an owner (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//! 2020). When the backward pass of a unit is over, each of its gradients is reduced to its owner, and the other ranks drop
//! theirs. The rest is as in [`Zero1`](crate::Zero1). [`Sharded2`](crate::Sharded2) divides evenly, and reduces while the
//! backward pass goes on.
//!
//! Operations per step: two per parameter. Bytes: those of an all-reduce of the gradients. Memory: gradients and
//! optimizer state are divided, but unevenly, and there is memory for the whole gradients of the largest unit.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Model, Optimizer, Owned, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::sharding::ShardOptions;
use crate::sharding::owners::OwnerReductions;
use crate::sharding::place::{ShardPlace, num_elems};
use crate::strategy::allocate;
use crate::{Exactness, Footprint, Replica, Result, Strategy, Zero1};

/// Divides gradients and the optimizer's state by whole parameters.
#[derive(Debug, Default)]
pub struct Zero2 {
    options: ShardOptions,
    reductions: Option<OwnerReductions>,
}

impl Zero2 {
    /// With these options. What they say of gathers does not matter here.
    pub fn new(options: ShardOptions) -> Self {
        Self { options, reductions: None }
    }

    fn reductions(&mut self) -> &mut OwnerReductions {
        self.reductions.as_mut().expect("a replica prepares its strategy before it trains")
    }
}

impl Strategy for Zero2 {
    fn name(&self) -> &'static str {
        "zero2"
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.options.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let own = ShardPlace::new(mesh, rank).params(&model.layout, true);
        Owned { grads: own.clone(), state: own, ..Owned::everything(model) }
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let held = self.options.held(&model.layout, self.owned(model, mesh, rank).grads);
        Footprint {
            gradients: num_elems(&held) * precision.grads.size_bytes(),
            unsharded: OwnerReductions::num_bytes(model, &self.options, precision),
            ..Footprint::of_replica(&model.layout, precision)
        }
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        let mut held = self.owned(model, mesh.shape(), mesh.world().rank());
        held.grads = self.options.held(&model.layout, held.grads);
        allocate(model, precision, compute, mesh, (held, [true, false]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.reductions = Some(OwnerReductions::new(replica, &self.options)?);
        Ok(())
    }

    fn pre_backward(
        &mut self,
        replica: &Replica,
        _: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let values = replica.storage.values().clone();
        self.reductions().open(replica, unit, (values, writes_grads))
    }

    fn post_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        if writes_grads { self.reductions().close(replica, track, unit) } else { Ok(()) }
    }

    fn max_micro_batches(&self) -> Option<usize> {
        Some(self.options.max_micro_batches)
    }

    fn passes_are_local(&self) -> bool {
        false
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.reductions().finish(replica, track)
    }

    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        Zero1.optimizer_step(replica, optimizer, track)
    }
}
