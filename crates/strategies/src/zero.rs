//! Whole parameters, each owned by one rank: the three stages of ZeRO as in a first implementation, with blocking operations.
//!
//! Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Every stage divides what the one
//! before divides, and more:
//!
//! 1. *The optimizer's state.* After backward, one blocking all-reduce per parameter gives all ranks all gradients. Each rank updates
//!    the parameters that it owns, and then sends them to all others.
//! 2. *The gradients too.* When the backward pass of a unit is over, each of its gradients is reduced to its owner, and the other
//!    ranks drop theirs.
//! 3. *The parameters too.* Before the forward pass and before the backward pass of a unit, each of its parameters is sent by its owner
//!    to all ranks, and freed afterward.
//!
//! | stage | operations per step | bytes, with an all-reduce of the gradients as 1 | memory for open units |
//! |---|---|---|---|
//! | 1 | two per parameter | 1.5 | |
//! | 2 | two per parameter | 1 | the whole gradients of the largest unit |
//! | 3 | three per parameter | 1.5 | the whole parameters and gradients of the largest unit |
//!
//! Memory is divided unevenly: a rank with a large parameter has more of it. These strategies show the idea, and are never
//! the fastest. [`Sharded`](crate::Sharded) divides evenly, and communicates while the ranks compute.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Held, Model, Optimizer, Owned, Precision, Storage, UnitId, View};

use crate::sharding::arena::UnitMemory;
use crate::sharding::gathers::exposed;
use crate::sharding::owners::{OwnerReductions, gather};
use crate::sharding::place::ShardPlace;
use crate::sharding::{ShardOptions, ZeroStage, plan_backward};
use crate::strategy::allocate;
use crate::{Exactness, Footprint, Replica, Result, SimpleDdp, StepContext, Strategy, span};

/// Divides the optimizer's state, gradients and parameters by whole parameters, by its stage.
#[derive(Debug)]
pub struct Zero {
    stage: ZeroStage,
    options: ShardOptions,
    /// Memory for the parameters of open units, from stage 3 on.
    values: Option<UnitMemory>,
    /// From stage 2 on.
    reductions: Option<OwnerReductions>,
}

impl Zero {
    /// A stage with these options. Nothing is gathered ahead here, and stage 1 always holds whole gradients.
    pub fn new(stage: ZeroStage, options: ShardOptions) -> Self {
        Self { stage, options: options.of_stage(stage), values: None, reductions: None }
    }
}

impl Strategy for Zero {
    fn name(&self) -> &'static str {
        ["zero1", "zero2", "zero3"][self.stage as usize]
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        if self.stage == ZeroStage::One { Exactness::Exact } else { self.options.exactness(mesh) }
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let place = ShardPlace::new(mesh, rank);
        let [all, trained] = [false, true].map(|trained| place.params(&model.layout, trained));
        let mut owned = Owned { state: trained.clone(), ..Owned::everything(model) };
        if self.stage >= ZeroStage::Two {
            owned.grads = trained;
        }
        if self.stage == ZeroStage::Three {
            owned.values = all;
        }
        owned
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let is_gathered = self.stage == ZeroStage::Three;
        let gathered = if is_gathered { plan_backward(model, false, 0).len() } else { 0 };
        let unsharded = gathered * precision.master.size_bytes()
            + OwnerReductions::num_bytes(model, &self.options, precision);
        self.options.footprint(model, precision, self.owned(model, mesh, rank), unsharded)
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        let owned = self.owned(model, mesh.shape(), mesh.world().rank());
        let held = self.options.held(model, owned);
        let in_place = [self.stage < ZeroStage::Three, self.stage == ZeroStage::One];
        allocate(model, precision, compute, mesh, (held, in_place))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        if self.stage == ZeroStage::Three {
            let arena = plan_backward(&replica.model, false, 0);
            let dtype = replica.options.precision.master;
            self.values = Some(UnitMemory::new(replica, arena, dtype)?);
        }
        if self.stage >= ZeroStage::Two {
            self.reductions = Some(OwnerReductions::new(replica, &self.options)?);
        }
        Ok(())
    }

    fn pre_forward(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<View> {
        Ok(View::new(self.gather_unit(cx, unit)?, None, false))
    }

    fn post_forward(&mut self, _: &mut StepContext, unit: UnitId) -> Result<()> {
        self.values.as_ref().map_or(Ok(()), |values| values.free(unit))
    }

    fn pre_backward(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let values = self.gather_unit(cx, unit)?;
        match &self.reductions {
            Some(reductions) => reductions.open(cx.replica, unit, values, writes_grads),
            None => Ok(View::whole(&cx.replica.storage)),
        }
    }

    fn post_backward(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        if let Some(reductions) = self.reductions.as_mut().filter(|_| writes_grads) {
            reductions.close(cx, unit)?;
        }
        self.post_forward(cx, unit)
    }

    fn max_micro_batches(&self) -> Option<usize> {
        Some(self.options.max_micro_batches)
    }

    fn passes_are_local(&self) -> bool {
        self.stage == ZeroStage::One
    }

    fn begin_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.reductions.iter_mut().for_each(OwnerReductions::begin);
        Ok(())
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        match &mut self.reductions {
            Some(reductions) => reductions.finish(cx),
            None => SimpleDdp.finish_gradients(cx),
        }
    }

    /// Updates the parameters that this rank owns. Then every owner sends them to all ranks, unless these gather them
    /// when they need them.
    fn optimizer_step(&mut self, cx: &mut StepContext, optimizer: &mut Optimizer) -> Result<()> {
        let Replica { model, compute, storage, group, .. } = cx.replica;
        cx.track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        if self.stage == ZeroStage::Three {
            return Ok(());
        }
        let place = ShardPlace::of(cx.replica);
        for (id, _) in model.layout.trained() {
            let value = storage.value(id)?;
            let owner = place.owner(&model.layout, id);
            exposed(cx.track, span::PARAM_BROADCAST, || group.broadcast(&value, owner))?;
        }
        Ok(())
    }

    fn gather_unit(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<Held> {
        match &self.values {
            Some(memory) => gather(cx, memory, unit),
            None => Ok(cx.replica.storage.values().clone()),
        }
    }
}
