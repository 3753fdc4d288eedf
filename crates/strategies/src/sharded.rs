//! Even shards of each unit: the three stages of ZeRO, on flat storage, while the ranks compute.
//!
//! Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Stage 3 is also known as fully
//! sharded data parallelism (Zhao et al., "PyTorch FSDP", 2023). Every stage divides what the one before divides, and more:
//!
//! 1. *The optimizer's state.* The gradients of a unit are reduce-scattered when they are final, while the backward pass goes on. Each
//!    rank then updates its shards of the parameters, for which alone it has optimizer state. Each unit's parameters are
//!    all-gathered after the optimizer, and the next forward pass waits for them when it needs them.
//! 2. *The gradients too.* The backward pass writes the gradients of a unit to memory that units share, until they are
//!    reduced to the shards of their owners. With several micro-batches per step see [`ShardAccumulation`](crate::ShardAccumulation).
//! 3. *The parameters too.* A unit is gathered before its forward pass and before its backward pass, into memory that units share, and
//!    freed afterward. While one unit is in use, the next ones are gathered. The last units of the forward pass
//!    may stay until their backward pass.
//!
//! | stage | operations per step | bytes | memory for open units |
//! |---|---|---|---|
//! | 1 | two per unit | those of `ddp`, whose all-reduce does the same work in one operation | |
//! | 2 | two per unit | those of `ddp` | the whole gradients of two units that follow each other |
//! | 3 | three per unit, two for the last units, which stay | half as many again | also the whole parameters of two units, by default |
//!
//! Stage 1 is faster than `ddp` where the optimizer takes a large part of the step. Stage 3 is
//! for models that do not fit otherwise.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::DType;
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};

use crate::sharding::arena::{UnitArena, UnitMemory};
use crate::sharding::gathers::Gathers;
use crate::sharding::place::ShardPlace;
use crate::sharding::reductions::Reductions;
use crate::sharding::{ShardOptions, ZeroStage, forward_order, units_of};
use crate::strategy::allocate;
use crate::{Exactness, Footprint, Replica, Result, StepContext, Strategy, span};

/// Divides the optimizer's state, gradients and parameters evenly among the ranks, by its stage.
///
/// ```
/// use paceline_strategies::{ShardOptions, Sharded, Strategy, ZeroStage};
///
/// let options = ShardOptions { prefetch: 2, ..ShardOptions::default() };
/// assert_eq!(Sharded::new(ZeroStage::Three, options).name(), "sharded3");
/// ```
#[derive(Debug)]
pub struct Sharded {
    stage: ZeroStage,
    options: ShardOptions,
    units: Option<ShardedUnits>,
}

/// The units of a replica: where their values and gradients go, and which is used next.
#[derive(Debug)]
struct ShardedUnits {
    gathers: Gathers,
    reductions: Reductions,
    /// The units in the order of a step: forward, then backward. Empty if all values are held.
    uses: Vec<UnitId>,
    /// The use that comes next.
    next: usize,
    /// The number of uses that are part of the forward pass.
    num_forward: usize,
}

impl Sharded {
    /// A stage with these options. Stages 1 and 2 gather nothing ahead, and stage 1 always holds whole gradients.
    pub fn new(stage: ZeroStage, options: ShardOptions) -> Self {
        Self { stage, options: options.of_stage(stage), units: None }
    }

    fn units(&mut self) -> &mut ShardedUnits {
        self.units.as_mut().expect("a replica prepares its strategy before it trains")
    }

    /// Where gathered units lie: each apart from those that are gathered ahead of it.
    fn plan_values(&self, model: &Model) -> UnitArena {
        let layout = &model.layout;
        let mut in_use = forward_order(model);
        let mut kept = self.options.keep_after_forward;
        if let Some(unit) = inner_of_objective(model) {
            in_use.push(unit);
            kept += 1;
        }
        // No pass opens the others, but the digest of all parameters does.
        let mut sequence = units_of(layout, |unit| !unit.is_root);
        sequence.retain(|unit| !in_use.contains(unit));
        sequence.extend(in_use);
        let roots = units_of(layout, |unit| unit.is_root);
        UnitArena::plan(layout, &sequence, &roots, self.options.prefetch, kept)
    }

    /// Waits for the values of a unit. Before that, starts to gather it and the units that follow.
    fn open(&mut self, cx: &mut StepContext, unit: UnitId, is_backward: bool) -> Result<Held> {
        let prefetch = self.options.prefetch;
        let ShardedUnits { gathers, uses, next, num_forward, .. } = self.units();
        let pass = if is_backward { *num_forward..uses.len() } else { 0..*num_forward };
        if let Some(at) = uses[pass.clone()].iter().position(|of| *of == unit) {
            *next = pass.start + at + 1;
        }
        gathers.start(cx, unit)?;
        if !cx.replica.model.layout.unit(unit).is_root {
            for ahead in uses.iter().skip(*next).take(prefetch).filter(|ahead| **ahead != unit) {
                gathers.start(cx, *ahead)?;
            }
        }
        gathers.open(cx, unit)
    }
}

/// The unit of the objective, unless it is open for the whole step.
fn inner_of_objective(model: &Model) -> Option<UnitId> {
    model.objective.unit().filter(|unit| !model.layout.unit(*unit).is_root)
}

impl Strategy for Sharded {
    fn name(&self) -> &'static str {
        ["sharded1", "sharded2", "sharded3"][self.stage as usize]
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.options.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let place = ShardPlace::new(mesh, rank);
        let [all, trained] = [false, true].map(|trained| place.shards(&model.layout, trained));
        let owned = Owned { grads: trained.clone(), state: trained, ..Owned::everything(model) };
        if self.stage == ZeroStage::Three { Owned { values: all, ..owned } } else { owned }
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let is_gathered = self.stage == ZeroStage::Three;
        let gathered = if is_gathered { self.plan_values(model).len() } else { 0 };
        let place = ShardPlace::new(mesh, rank);
        let rounded = if self.options.gathers_bf16 { DType::BF16.size_bytes() } else { 0 };
        let unsharded = gathered * (precision.master.size_bytes() + rounded)
            + self.options.grad_arena_bytes(model, precision, place);
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
        allocate(model, precision, compute, mesh, (held, [true; 2]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let Replica { model, options, .. } = replica;
        let (mut uses, mut num_forward, mut memory, mut rounded) = (Vec::new(), 0, None, None);
        let is_gathered = self.stage == ZeroStage::Three;
        if is_gathered {
            let (arena, dtype) = (self.plan_values(model), options.precision.master);
            if self.options.gathers_bf16 {
                rounded = Some(UnitMemory::new(replica, self.plan_values(model), DType::BF16)?);
            }
            memory = Some(UnitMemory::new(replica, arena, dtype)?);
            uses = forward_order(model);
            num_forward = uses.len();
            uses.extend(inner_of_objective(model));
            uses.extend(forward_order(model).into_iter().rev());
        }
        let arena = self.options.grad_arena(replica)?;
        let gathers = Gathers::new(replica, memory, rounded);
        let reductions = Reductions::new(replica, arena, is_gathered);
        self.units = Some(ShardedUnits { gathers, reductions, uses, next: 0, num_forward });
        Ok(())
    }

    fn pre_forward(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<View> {
        Ok(View::new(self.open(cx, unit, false)?, None, false))
    }

    fn post_forward(&mut self, _: &mut StepContext, unit: UnitId) -> Result<()> {
        let keep = self.options.keep_after_forward;
        let ShardedUnits { gathers, uses, num_forward, .. } = self.units();
        let kept = &uses[num_forward.saturating_sub(keep)..*num_forward];
        if !kept.contains(&unit) {
            gathers.close(unit);
        }
        Ok(())
    }

    fn pre_backward(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let values = self.open(cx, unit, true)?;
        self.units().reductions.open(cx, unit, values, writes_grads)
    }

    fn post_backward(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        let ShardedUnits { gathers, reductions, .. } = self.units();
        if writes_grads {
            reductions.close(cx.replica, unit)?;
        }
        gathers.close(unit);
        Ok(())
    }

    fn max_micro_batches(&self) -> Option<usize> {
        Some(self.options.max_micro_batches)
    }

    fn reduces_every_pass(&self) -> bool {
        self.options.adds_shards()
    }

    fn passes_are_local(&self) -> bool {
        false
    }

    fn begin_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        self.units().reductions.begin(cx)
    }

    fn gradient_ready(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        self.units().reductions.ready(cx.replica, id)
    }

    /// Waits for the gathers of units that no pass has opened too: an update in place must not depend on other ranks.
    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        let ShardedUnits { gathers, reductions, .. } = self.units();
        gathers.wait_all(cx)?;
        reductions.finish(cx)
    }

    /// Updates the shards. Then starts to gather the updates of the owners: all units, or the first ones of the next step.
    fn optimizer_step(&mut self, cx: &mut StepContext, optimizer: &mut Optimizer) -> Result<()> {
        let Replica { compute, storage, .. } = cx.replica;
        let (holds_all, prefetch) = (self.stage < ZeroStage::Three, self.options.prefetch);
        let ShardedUnits { gathers, uses, next, num_forward, .. } = self.units();
        if holds_all {
            gathers.wait_all(cx)?
        } else {
            gathers.evict_all(cx)?
        }
        cx.track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        *next = 0;
        cx.track.mark(span::NEXT_STEP, 0);
        if holds_all {
            return gathers.send_updated(cx);
        }
        let first = uses[..*num_forward].iter().take(prefetch);
        first.copied().try_for_each(|unit| gathers.start(cx, unit))
    }

    fn gather_unit(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<Held> {
        self.units().gathers.masters(cx, unit)
    }

    fn sync_replicas(&mut self, cx: &mut StepContext) -> Result<()> {
        self.units().gathers.wait_all(cx)?;
        cx.sync_buffers()
    }
}
