//! Every rank holds all parameters and gradients, and updates an even shard of each unit.
//!
//! Stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020), on
//! flat storage. Gradients of a unit are reduce-scattered when they are final, while the backward pass goes on. Each rank
//! then updates its shards of the parameters, for which alone it has optimizer state. Each unit's parameters are
//! all-gathered after the optimizer, and the next forward pass waits for each unit when it needs it.
//!
//! Operations per step: two per unit. Bytes: those of `ddp`, whose all-reduce does the same work in one operation.
//! Memory: the optimizer's state is divided by the number of ranks. It is faster than `ddp` where the optimizer takes a
//! large part of the step, since each rank updates a part only.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::sharded2::Running;
use crate::sharding::ShardOptions;
use crate::sharding::place::ShardPlace;
use crate::strategy::allocate;
use crate::{Exactness, Replica, Result, Strategy};

/// Shards the optimizer's state.
#[derive(Debug, Default)]
pub struct Sharded1 {
    running: Option<Running>,
}

impl Sharded1 {
    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("a replica prepares its strategy before it trains")
    }
}

impl Strategy for Sharded1 {
    fn name(&self) -> &'static str {
        "sharded1"
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        ShardOptions::default().exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let shards = ShardPlace::new(mesh, rank).shards(&model.layout, true);
        Owned { grads: shards.clone(), state: shards, ..Owned::everything(model) }
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        allocate(model, precision, compute, mesh, (Owned::everything(model), [true, true]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.running = Some(Running::new(replica, None));
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
        _: bool,
    ) -> Result<View> {
        self.pre_forward(replica, track, unit)
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
