//! Every rank holds all parameters, and keeps an even shard of each unit's gradients and optimizer state.
//!
//! Stage 2 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020), on
//! flat storage. It works like [`Sharded1`](crate::Sharded1), but the backward pass writes the gradients of a unit to
//! memory that units share: the gradients leave it when they are reduced to the shards of their owners.
//!
//! Operations per step: two per unit. Bytes: those of `ddp`. Memory: gradients and optimizer state are divided by the
//! number of ranks, and there is memory for the whole gradients of two units that follow each other. With several
//! micro-batches per step see [`ShardAccumulation`](crate::ShardAccumulation).

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::sharding::gathers::{GatherTarget, Gathers};
use crate::sharding::place::{ShardPlace, num_elems};
use crate::sharding::reductions::{GradArena, Reductions};
use crate::sharding::{ShardOptions, groups};
use crate::strategy::{allocate, span};
use crate::{Exactness, Footprint, Replica, Result, Strategy};

/// Shards gradients and the optimizer's state.
#[derive(Debug, Default)]
pub struct Sharded2 {
    options: ShardOptions,
    running: Option<Running>,
}

/// The work of a rank that holds all values and owns a shard of each unit.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) gathers: Gathers,
    pub(crate) reductions: Reductions,
}

impl Running {
    /// All units are open. Without an arena, gradients lie in the storage of the replica.
    pub(crate) fn new(replica: &Replica, arena: Option<GradArena>) -> Self {
        let place = ShardPlace::new(replica.mesh.shape(), replica.group.rank());
        let groups = groups(&replica.mesh);
        let mut gathers =
            Gathers::new(groups.0.clone(), place, GatherTarget::Storage, &replica.model.layout);
        gathers.open_all();
        Self { gathers, reductions: Reductions::new(replica, groups, place, arena) }
    }

    /// Updates the shards. Then starts to gather what the owners have updated.
    pub(crate) fn update(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        self.gathers.wait_all(track)?;
        track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        track.mark(span::NEXT_STEP, 0);
        self.gathers.send_updated(replica, track)
    }
}

impl Sharded2 {
    /// With these options. What they say of gathers does not matter here.
    pub fn new(options: ShardOptions) -> Self {
        Self { options, running: None }
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("a replica prepares its strategy before it trains")
    }
}

impl Strategy for Sharded2 {
    fn name(&self) -> &'static str {
        "sharded2"
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.options.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let shards = ShardPlace::new(mesh, rank).shards(&model.layout, true);
        Owned { grads: shards.clone(), state: shards, ..Owned::everything(model) }
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let place = ShardPlace::new(mesh, rank);
        let held = self.options.held(&model.layout, self.owned(model, mesh, rank).grads);
        Footprint {
            gradients: num_elems(&held) * precision.grads.size_bytes(),
            unsharded: self.options.grad_arena_bytes(model, precision, place),
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
        allocate(model, precision, compute, mesh, (held, [true, true]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.running = Some(Running::new(replica, self.options.grad_arena(replica)?));
        Ok(())
    }

    fn pre_forward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<View> {
        self.running().gathers.open(replica, track, unit)?;
        Ok(View::whole(&replica.storage))
    }

    fn pre_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let Running { gathers, reductions } = self.running();
        let values = gathers.open(replica, track, unit)?;
        reductions.open(replica, track, unit, (values, writes_grads))
    }

    fn post_backward(
        &mut self,
        replica: &Replica,
        _: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        if writes_grads { self.running().reductions.close(replica, unit) } else { Ok(()) }
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

    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        self.running().update(replica, optimizer, track)
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
