//! Parameters, gradients and optimizer state divided among the ranks by whole parameters, as in a first implementation of
//! ZeRO's stage 3.
//!
//! Every parameter has an owner (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//! 2020). Before the forward pass and before the backward pass of a unit, each of its parameters is sent by its owner to all
//! ranks, and freed afterward. Gradients are reduced as in [`Zero2`](crate::Zero2). [`Sharded3`](crate::Sharded3)
//! divides evenly, and gathers the next unit while one is in use.
//!
//! Operations per step: three per parameter. Bytes: half as many again as an all-reduce of the gradients. Memory:
//! parameters, gradients and optimizer state are divided, but unevenly, and there is memory for the whole parameters and
//! gradients of the largest unit.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Held, Model, Owned, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::footprint::buffer_bytes;
use crate::sharding::ShardOptions;
use crate::sharding::owners::{OwnerReductions, UnitMemory, gather, plan};
use crate::sharding::place::{ShardPlace, num_elems};
use crate::strategy::allocate;
use crate::{Exactness, Footprint, Replica, Result, Strategy};

/// Divides parameters, gradients and the optimizer's state by whole parameters.
#[derive(Debug, Default)]
pub struct Zero3 {
    options: ShardOptions,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    values: UnitMemory,
    reductions: OwnerReductions,
}

impl Zero3 {
    /// With these options. What they say of gathers ahead does not matter here.
    pub fn new(options: ShardOptions) -> Self {
        Self { options, running: None }
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("a replica prepares its strategy before it trains")
    }

    fn open(&mut self, replica: &Replica, track: &mut SpanTrack, unit: UnitId) -> Result<Held> {
        gather(replica, track, &self.running().values, unit)
    }
}

impl Strategy for Zero3 {
    fn name(&self) -> &'static str {
        "zero3"
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.options.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let place = ShardPlace::new(mesh, rank);
        let [values, own] = [false, true].map(|trained| place.params(&model.layout, trained));
        Owned { values, grads: own.clone(), state: own }
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let Owned { values, grads, .. } = self.owned(model, mesh, rank);
        let values = num_elems(&values) * precision.master.size_bytes();
        let grads = num_elems(&self.options.held(&model.layout, grads));
        let gathered = plan(model, false).len() * precision.master.size_bytes();
        Footprint {
            parameters: values + buffer_bytes(&model.layout, precision),
            gradients: grads * precision.grads.size_bytes(),
            unsharded: gathered + OwnerReductions::num_bytes(model, &self.options, precision),
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
        allocate(model, precision, compute, mesh, (held, [false; 2]))
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let values = UnitMemory::new(replica, false, replica.options.precision.master)?;
        let reductions = OwnerReductions::new(replica, &self.options)?;
        self.running = Some(Running { values, reductions });
        Ok(())
    }

    fn pre_forward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<View> {
        Ok(View::new(self.open(replica, track, unit)?, None, true))
    }

    fn post_forward(&mut self, _: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<()> {
        self.running().values.free(unit)
    }

    fn pre_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        let values = self.open(replica, track, unit)?;
        self.running().reductions.open(replica, unit, (values, writes_grads))
    }

    fn post_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        if writes_grads {
            self.running().reductions.close(replica, track, unit)?;
        }
        self.running().values.free(unit)
    }

    fn max_micro_batches(&self) -> Option<usize> {
        Some(self.options.max_micro_batches)
    }

    fn passes_are_local(&self) -> bool {
        false
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.running().reductions.finish(replica, track)
    }

    fn gather_unit(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<Held> {
        self.open(replica, track, unit)
    }
}
