//! The interface of a strategy: two choices, each with a default.
//!
//! *Placement*: which blocks a rank computes, and which ranges of values, gradients and optimizer state it owns.
//! *Synchronization*: when and how gradients are combined. The order of the passes is that of a schedule, with which every strategy goes.
//! The defaults are those of a replica: every rank owns everything, and the micro-batches follow each other.
//!
//! Input: a replica, units that are opened and closed, and announcements of final gradients. Output: gradients that are
//! the mean over the ranks. A strategy knows nothing of layers.

use std::ops::Range;

use paceline_collectives::{Axis, Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::{Buffer, Category, DType, Tensor};
use paceline_model::{
    Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View, WeightsDigest,
};
use paceline_trace::SpanTrack;

use crate::sharding::place::num_elems;
use crate::{Exactness, Footprint, Replica, Result, grad_norm};

/// Names of the spans and marks that a training step records on the main track.
pub mod span {
    /// The batch is brought to the device, and the device waits for it.
    pub const TO_DEVICE: &str = "to_device";
    /// The forward pass and the loss.
    pub const FORWARD: &str = "forward";
    /// The backward pass, hooks included.
    pub const BACKWARD: &str = "backward";
    /// Time in which the main thread was blocked on communication. May lie within the passes.
    pub const EXPOSED: &str = "exposed";
    /// Time that synchronization adds on the main thread: everything after the last backward pass (which may
    /// include [`EXPOSED`] time), and arithmetic and copies within the passes.
    pub const GRAD_SYNC: &str = "grad_sync";
    /// Owners send the parameters that they have updated.
    pub const PARAM_BROADCAST: &str = "param broadcast";
    /// Gradients are reduced to their owners.
    pub const REDUCE_SCATTER: &str = "reduce-scatter";
    /// The parameters of a unit are gathered from their owners.
    pub const GATHER: &str = "gather";
    /// All ranks of a pipeline wait for each other: for the sums of the loss, or for the norm of the gradients, with which each
    /// computes its own part.
    pub const BARRIER: &str = "barrier";
    /// The optimizer.
    pub const OPTIMIZER: &str = "optimizer_step";
    /// Mark: this rank's gradient of a parameter is final.
    pub const GRADIENT_READY: &str = "gradient_ready";
    /// Mark: the operations that are submitted from now on are for the next step.
    pub const NEXT_STEP: &str = "next_step";
    /// Mark: a pass needs the parameters of a unit that are gathered.
    pub const GATHER_NEEDED: &str = "gather_needed";
    /// Mark: the parameters that a pass needed are there.
    pub const GATHER_THERE: &str = "gather_there";
}

/// A way to train one model on several ranks.
pub trait Strategy: Send {
    /// The strategy's name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// What the strategy guarantees about the weights of the replicas, with ranks that form such a mesh: the order of a sum
    /// over the ranks can depend on its axes.
    fn exactness(&self, mesh: &MeshShape) -> Exactness;

    // Placement.

    /// What rank `rank` of a mesh owns. By default each rank owns everything.
    fn owned(&self, model: &Model, _mesh: &MeshShape, _rank: usize) -> Owned {
        Owned::everything(model)
    }

    /// The memory that the strategy takes on a rank, by formula. By default, that of a replica with gradients in place.
    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        _mesh: &MeshShape,
        _rank: usize,
    ) -> Footprint {
        Footprint::of_replica(&model.layout, precision)
    }

    /// Allocates the memory of parameters and gradients, before a replica exists. By default every rank holds
    /// all parameters and all gradients, and gradients lie where peers can reduce them in place.
    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        allocate(model, precision, compute, mesh, (Owned::everything(model), [false, true]))
    }

    /// Prepares for training `replica`, for example by planning buckets and allocating memory. Called once,
    /// before the first step.
    fn prepare(&mut self, _replica: &Replica) -> Result<()> {
        Ok(())
    }

    /// Opens a unit before its forward pass, in training and in evaluation: returns where its values are. By default the
    /// values are in the replica's storage. A root unit is opened once per step, by [`Strategy::pre_backward`].
    fn pre_forward(&mut self, replica: &Replica, _: &mut SpanTrack, _: UnitId) -> Result<View> {
        Ok(View::whole(&replica.storage))
    }

    /// Closes a unit after its forward pass. Its view is no longer used.
    fn post_forward(&mut self, _: &Replica, _: &mut SpanTrack, _: UnitId) -> Result<()> {
        Ok(())
    }

    /// Opens a unit before its backward pass: returns where its values are and where its gradients go. The input half of a
    /// backward pass writes no gradients of parameters: then `writes_grads` is false. By default both are in the replica's
    /// storage.
    fn pre_backward(
        &mut self,
        replica: &Replica,
        _: &mut SpanTrack,
        _: UnitId,
        _writes_grads: bool,
    ) -> Result<View> {
        Ok(View::whole(&replica.storage))
    }

    /// Closes a unit after its backward pass, or after the input half, or, if it is a root unit, at the end of the step's
    /// passes. Its view is no longer used.
    fn post_backward(
        &mut self,
        _: &Replica,
        _: &mut SpanTrack,
        _: UnitId,
        _writes_grads: bool,
    ) -> Result<()> {
        Ok(())
    }

    /// The norm of all gradients of the last step together, the same on every rank. By default over the axis `shard`, or over all
    /// ranks if the mesh has none; a strategy that divides gradients otherwise overrides this.
    fn grad_norm(&mut self, replica: &Replica) -> Result<f64> {
        let group = replica.mesh.group(Axis::Shard).unwrap_or(&replica.group);
        grad_norm::over(group, replica)
    }

    /// Updates the parameters that this rank owns from the gradients of the last step.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        Ok(track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?)
    }

    /// Brings the values of a unit together, outside of any pass. They are no longer needed at the next call. Every rank
    /// calls this. By default they are in the replica's storage.
    fn gather_unit(&mut self, replica: &Replica, _: &mut SpanTrack, _: UnitId) -> Result<Held> {
        Ok(replica.storage.values().clone())
    }

    /// The digest of all parameters, the same on every rank if the strategy keeps them equal. See
    /// [`Storage::digest`]. The replicas have been synchronized. Every rank calls this.
    fn digest(&mut self, replica: &Replica) -> Result<String> {
        let layout = &replica.model.layout;
        let mut digest = WeightsDigest::default();
        // The time belongs to no step.
        let mut track = SpanTrack::with_capacity(0);
        for unit in (0..layout.units().len()).map(UnitId) {
            let values = if layout.unit(unit).is_elsewhere {
                None
            } else {
                Some(self.gather_unit(replica, &mut track, unit)?)
            };
            for param in layout.params().iter().filter(|param| param.unit == unit) {
                let own = values.as_ref().map(|values| values.slice(param.range())).transpose()?;
                digest.add(&replica.pipeline.shared(replica, param, own)?)?;
            }
        }
        Ok(digest.finish())
    }

    /// Tensors that the strategy itself keeps from step to step on this rank, by name, besides parameters and optimizer
    /// state. There are none by default.
    fn state(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    // Synchronization.

    /// Whether the loss of the next step is summed over the ranks. If not, each rank knows only its own loss,
    /// and neither running statistics nor batch statistics are shared in that step, whatever the options of
    /// the replica.
    fn shares_loss(&self) -> bool {
        true
    }

    /// Whether gradients are reduced in every backward pass of a step, and not only in the last one. Then the gradients of a
    /// unit start again in each pass ([`View::new`]), and the strategy adds up what it has reduced. Gradients of root
    /// units, which stay open for the whole step, are still reduced once.
    fn reduces_every_pass(&self) -> bool {
        false
    }

    /// Whether opening and closing units neither communicates nor waits, so that the passes of a step can be launched as a graph
    /// ([`ReplicaOptions::as_graph`](crate::ReplicaOptions::as_graph)). Then this rank's gradients are announced behind the passes,
    /// and not while they run, and what a strategy does before a pass of a unit is not repeated. By default so, unless gradients
    /// are reduced in every pass.
    fn passes_are_local(&self) -> bool {
        !self.reduces_every_pass()
    }

    /// The most micro-batches that a step may have, if there is a limit.
    fn max_micro_batches(&self) -> Option<usize> {
        None
    }

    /// Called when this rank's gradient of `id` is final: during the last backward pass of a step, or right
    /// after it for parameters that the step left out. Called once per step for each trained parameter of the blocks
    /// that the rank computes; with [`Strategy::reduces_every_pass`], once per backward pass.
    fn gradient_ready(&mut self, _: &Replica, _: &mut SpanTrack, _id: ParamId) -> Result<()> {
        Ok(())
    }

    /// Called after the last backward pass of a step. When it returns, the gradients that this rank owns are the mean
    /// over the ranks; with [`ReplicaOptions::steps_by_bucket`](crate::ReplicaOptions::steps_by_bucket) they may still be on
    /// their way to [`Strategy::optimizer_step`]. Must record the time for which it blocks as [`span::EXPOSED`].
    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()>;

    /// Makes the replicas equal if the strategy does not keep them equal after every step. Called before a
    /// checkpoint, an evaluation and the end of training. By default all ranks take the same running
    /// statistics.
    fn sync_replicas(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        replica.sync_buffers(track)
    }
}

/// The memory of the values and gradients in `held`. Of each, `in_place` says whether peers can read and write there. Ranks that
/// hold parts of different sizes cannot share them: memory that ranks share has one size.
pub(crate) fn allocate(
    model: &Model,
    precision: Precision,
    compute: &Compute,
    mesh: &Mesh,
    (held, in_place): (Owned, [bool; 2]),
) -> Result<Storage> {
    let allocator = &compute.allocator;
    let memory = |ranges: &[Range<usize>], dtype: DType, in_place, category| -> Result<Buffer> {
        let bytes = num_elems(ranges) * dtype.size_bytes();
        Ok(if in_place {
            mesh.allocate(allocator, bytes, category)?
        } else {
            allocator.allocate(bytes, category)?
        })
    };
    let values = memory(&held.values, precision.master, in_place[0], Category::Parameters)?;
    let grads = memory(&held.grads, precision.grads, in_place[1], Category::Gradients)?;
    let (values, grads) = ((values, held.values), (grads, held.grads));
    Ok(Storage::of_ranges(model.layout.clone(), precision, values, grads, allocator)?)
}
