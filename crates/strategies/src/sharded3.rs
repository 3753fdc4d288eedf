//! Every rank keeps an even shard of each unit's parameters, gradients and optimizer state.
//!
//! Stage 3 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020), on
//! flat storage; also known as fully sharded data parallelism (Zhao et al., "PyTorch FSDP", 2023). A unit is gathered
//! before its forward pass and before its backward pass, into memory that units share, and its place is free again
//! afterward. While one unit is in use, the next ones are gathered. The last units of the forward pass may stay until
//! their backward pass. Gradients are reduced as in [`Sharded2`](crate::Sharded2).
//!
//! Operations per step: three per unit, two for the last units, which are still there when their backward pass begins.
//! Bytes: half as many again as `ddp`. Memory: parameters, gradients and optimizer state are divided by the number of
//! ranks, and there is memory for the whole parameters and gradients of the units that are open together: two of each by
//! default. It is the choice for models that do not fit otherwise.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::{Category, Tensor};
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::footprint::buffer_bytes;
use crate::sharding::arena::Arena;
use crate::sharding::gathers::{GatherTarget, Gathers};
use crate::sharding::place::{ShardPlace, num_elems};
use crate::sharding::reductions::Reductions;
use crate::sharding::{ShardOptions, forward_order, groups};
use crate::strategy::{allocate, span};
use crate::{Exactness, Footprint, Replica, Result, Strategy};

/// Shards parameters, gradients and the optimizer's state.
#[derive(Debug, Default)]
pub struct Sharded3 {
    options: ShardOptions,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    gathers: Gathers,
    reductions: Reductions,
    /// The units in the order of a step: forward, then backward.
    uses: Vec<UnitId>,
    /// The use that comes next.
    next: usize,
    /// The number of uses that are part of the forward pass.
    num_forward: usize,
}

impl Sharded3 {
    /// With these options.
    pub fn new(options: ShardOptions) -> Self {
        Self { options, running: None }
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("a replica prepares its strategy before it trains")
    }

    /// Where gathered units lie: each apart from those that are gathered ahead of it, or while it is in use.
    fn plan_values(&self, model: &Model) -> Arena {
        let layout = &model.layout;
        let in_use = forward_order(model);
        let is_unused = |unit: &UnitId| {
            !in_use.contains(unit)
                && !layout.unit(*unit).is_root
                && model.objective.unit() != Some(*unit)
        };
        // No pass opens them, but the digest of all parameters does.
        let all = (0..layout.units().len()).map(UnitId);
        let mut sequence: Vec<UnitId> = all.filter(is_unused).collect();
        sequence.extend(&in_use);
        let mut kept = self.options.keep_after_forward;
        if let Some(unit) = model.objective.unit().filter(|unit| !layout.unit(*unit).is_root) {
            sequence.push(unit);
            kept += 1;
        }
        let all = (0..layout.units().len()).map(UnitId);
        let roots: Vec<UnitId> = all.filter(|unit| layout.unit(*unit).is_root).collect();
        Arena::plan(layout, &sequence, &roots, self.options.prefetch, kept)
    }

    /// Opens a unit whose next use is at `place` of a step or later, and gathers the units that follow.
    fn open(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        is_backward: bool,
    ) -> Result<Held> {
        let prefetch = self.options.prefetch;
        let Running { gathers, uses, next, num_forward, .. } = self.running();
        let pass = if is_backward { *num_forward..uses.len() } else { 0..*num_forward };
        if let Some(at) = uses[pass.clone()].iter().position(|of| *of == unit) {
            *next = pass.start + at + 1;
        }
        gathers.start(replica, track, unit)?;
        if !replica.model.layout.unit(unit).is_root {
            for ahead in uses.iter().skip(*next).take(prefetch).filter(|ahead| **ahead != unit) {
                gathers.start(replica, track, *ahead)?;
            }
        }
        gathers.open(replica, track, unit)
    }
}

impl Strategy for Sharded3 {
    fn name(&self) -> &'static str {
        "sharded3"
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.options.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let place = ShardPlace::new(mesh, rank);
        let [values, shards] = [false, true].map(|trained| place.shards(&model.layout, trained));
        Owned { values, grads: shards.clone(), state: shards }
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let place = ShardPlace::new(mesh, rank);
        let Owned { values, grads, .. } = self.owned(model, mesh, rank);
        let held = self.options.held(&model.layout, grads);
        let gathered = self.plan_values(model).len() * precision.master.size_bytes();
        Footprint {
            parameters: num_elems(&values) * precision.master.size_bytes()
                + buffer_bytes(&model.layout, precision),
            gradients: num_elems(&held) * precision.grads.size_bytes(),
            unsharded: gathered + self.options.grad_arena_bytes(model, precision, place),
            communication: 0,
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
        allocate(model, precision, compute, mesh, (held, [true; 2]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let Replica { model, compute, mesh, options, .. } = replica;
        let place = ShardPlace::new(mesh.shape(), replica.group.rank());
        let groups = groups(mesh);
        let arena = self.plan_values(model);
        let dtype = options.precision.master;
        let bytes = arena.len() * dtype.size_bytes();
        let memory = mesh.allocate(&compute.allocator, bytes, Category::Unsharded)?;
        let memory = Tensor::new(memory, 0, dtype, [arena.len()])?;
        let room = GatherTarget::Arena(arena, memory);
        let gathers = Gathers::new(groups.0.clone(), place, room, &model.layout);
        let arena = self.options.grad_arena(replica)?;
        let reductions = Reductions::new(replica, groups, place, arena).beside_gathers();
        let mut uses = forward_order(model);
        let num_forward = uses.len();
        uses.extend(model.objective.unit().filter(|unit| !model.layout.unit(*unit).is_root));
        uses.extend(forward_order(model).into_iter().rev());
        self.running = Some(Running { gathers, reductions, uses, next: 0, num_forward });
        Ok(())
    }

    fn pre_forward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<View> {
        Ok(View::new(self.open(replica, track, unit, false)?, None, true))
    }

    fn post_forward(&mut self, _: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<()> {
        let keep = self.options.keep_after_forward;
        let Running { gathers, uses, num_forward, .. } = self.running();
        let kept = &uses[num_forward.saturating_sub(keep)..*num_forward];
        if !kept.contains(&unit) {
            gathers.close(unit);
        }
        Ok(())
    }

    fn pre_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let values = self.open(replica, track, unit, true)?;
        self.running().reductions.open(replica, track, unit, (values, writes_grads))
    }

    fn post_backward(
        &mut self,
        replica: &Replica,
        _: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        let Running { gathers, reductions, .. } = self.running();
        if writes_grads {
            reductions.close(replica, unit)?;
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

    fn gradient_ready(&mut self, replica: &Replica, _: &mut SpanTrack, id: ParamId) -> Result<()> {
        self.running().reductions.ready(replica, id)
    }

    fn passes_are_local(&self) -> bool {
        false
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.running().reductions.finish(replica, track)
    }

    /// Updates the shards. Then gathers the first units of the next step.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        let prefetch = self.options.prefetch;
        let Running { gathers, uses, next, num_forward, .. } = self.running();
        gathers.evict_all(replica, track)?;
        track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        *next = 0;
        track.mark(span::NEXT_STEP, 0);
        uses[..*num_forward]
            .iter()
            .take(prefetch)
            .try_for_each(|unit| gathers.start(replica, track, *unit))
    }

    fn gather_unit(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<Held> {
        self.running().gathers.open(replica, track, unit)
    }

    fn sync_replicas(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.running().gathers.wait_all(track)?;
        replica.sync_buffers(track)
    }
}
