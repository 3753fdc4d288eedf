//! Optimizer state divided among the ranks by whole parameters, as in a first implementation of ZeRO's stage 1.
//!
//! Every parameter has an owner (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//! 2020). After backward, one blocking all-reduce per parameter gives all ranks all gradients. Each rank updates the
//! parameters that it owns, and then sends them to all others. [`Sharded1`](crate::Sharded1) divides evenly, reduces each
//! gradient to its owner only, and does both while the ranks compute.
//!
//! Operations per step: two per parameter. Bytes: half as many again as an all-reduce of the gradients. Memory: the
//! optimizer's state is divided, but unevenly: a rank with a large parameter has more of it. It is never the fastest. It
//! shows what the idea is.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_model::{Model, Optimizer, Owned, Precision, Storage};
use paceline_trace::SpanTrack;

use crate::sharding::gathers::exposed;
use crate::sharding::place::ShardPlace;
use crate::strategy::{allocate, span};
use crate::{Exactness, Replica, Result, SimpleDdp, Strategy};

/// Divides the optimizer's state by whole parameters.
#[derive(Debug, Default)]
pub struct Zero1;

impl Strategy for Zero1 {
    fn name(&self) -> &'static str {
        "zero1"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        let state = ShardPlace::new(mesh, rank).params(&model.layout, true);
        Owned { state, ..Owned::everything(model) }
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

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        SimpleDdp.finish_gradients(replica, track)
    }

    /// Updates the parameters that this rank owns. Then every owner sends what it has updated to all ranks.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { model, compute, storage, group, .. } = replica;
        track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        let place = ShardPlace::new(replica.mesh.shape(), group.rank());
        for (id, _) in model.layout.trained() {
            let value = storage.value(id)?;
            let owner = place.owner(&model.layout, id);
            exposed(track, span::PARAM_BROADCAST, || group.broadcast(&value, owner))?;
        }
        Ok(())
    }
}
