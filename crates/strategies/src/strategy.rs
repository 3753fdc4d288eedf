//! The interface of a strategy: two choices, each with a default.
//!
//! *Placement*: which blocks a rank computes, and which ranges of values, gradients and optimizer state it owns.
//! *Synchronization*: when and how gradients are combined. Every strategy works with every schedule, which has the order of the passes.
//! The defaults are those of a replica: every rank owns everything, and the micro-batches follow each other.
//!
//! Input: a context with the replica, units that are opened and closed, and announcements of final gradients. Output: gradients that are
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
use crate::{Exactness, Footprint, Replica, Result, StepContext, grad_norm, span};

/// A way to train one model on several ranks.
///
/// After [`Strategy::finish_gradients`] all gradients are the mean over the ranks. The other methods have defaults:
///
/// ```
/// use paceline_collectives::{Group, MeshShape, ReduceOp};
/// use paceline_kernels::optimizer::AdamW;
/// use paceline_model::MlpConfig;
/// use paceline_strategies::{Exactness, Result, StepContext, Strategy, Trainer};
///
/// struct OneReduce;
///
/// impl Strategy for OneReduce {
///     fn name(&self) -> &'static str {
///         "one_reduce"
///     }
///
///     fn exactness(&self, _: &MeshShape) -> Exactness {
///         Exactness::Exact
///     }
///
///     fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
///         cx.replica.group.all_reduce(cx.replica.storage.grads().tensor(), ReduceOp::Mean)?;
///         Ok(())
///     }
/// }
///
/// let sizes = MlpConfig { input_dim: 4, hidden_dim: 8, output_dim: 2, num_layers: 2, tie_layers: false };
/// let group = Group::threads(1).remove(0);
/// let mut trainer = Trainer::new(sizes.build(1)?, OneReduce, group, AdamW::default())?;
/// assert_eq!(trainer.digest()?.len(), 64);
/// # Ok::<(), paceline_strategies::StrategyError>(())
/// ```
pub trait Strategy: Send {
    /// The strategy's name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// The strategy's guarantee about the weights of the replicas, for ranks in such a mesh: the order of a sum can depend on
    /// its axes.
    fn exactness(&self, mesh: &MeshShape) -> Exactness;

    // Placement.

    /// The ranges that rank `rank` of a mesh owns.
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
    /// all of both, and gradients lie where peers can reduce them in place.
    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        allocate(model, precision, compute, mesh, (Owned::everything(model), [false, true]))
    }

    /// Prepares for training `replica`, for example by planning buckets and allocating memory. Called once.
    fn prepare(&mut self, _replica: &Replica) -> Result<()> {
        Ok(())
    }

    /// Opens a unit before its forward pass, in training and in evaluation: returns where its values are. Root units are opened
    /// once per step, by [`Strategy::pre_backward`].
    fn pre_forward(&mut self, cx: &mut StepContext, _: UnitId) -> Result<View> {
        Ok(View::whole(&cx.replica.storage))
    }

    /// Closes a unit after its forward pass. Its view is no longer used.
    fn post_forward(&mut self, _: &mut StepContext, _: UnitId) -> Result<()> {
        Ok(())
    }

    /// Opens a unit before its backward pass: returns where its values are and where its gradients go. `writes_grads` is false
    /// for the input half of a backward pass, which writes no gradients of parameters.
    fn pre_backward(
        &mut self,
        cx: &mut StepContext,
        _: UnitId,
        _writes_grads: bool,
    ) -> Result<View> {
        Ok(View::whole(&cx.replica.storage))
    }

    /// Closes a unit after its backward pass or its input half, or, if it is a root unit, at the end of the step's
    /// passes. Its view is no longer used.
    fn post_backward(&mut self, _: &mut StepContext, _: UnitId, _writes_grads: bool) -> Result<()> {
        Ok(())
    }

    /// The norm of all gradients of the last step, the same on every rank. By default over the axis `shard`, or over all
    /// ranks if there is no such axis; a strategy that divides gradients otherwise overrides this.
    fn grad_norm(&mut self, cx: &mut StepContext) -> Result<f64> {
        let Replica { mesh, group, .. } = cx.replica;
        grad_norm::over(mesh.group(Axis::Shard).unwrap_or(group), cx.replica)
    }

    /// Updates the parameters that this rank owns from the gradients of the last step.
    fn optimizer_step(&mut self, cx: &mut StepContext, optimizer: &mut Optimizer) -> Result<()> {
        let Replica { compute, storage, .. } = cx.replica;
        Ok(cx.track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?)
    }

    /// Brings the values of a unit together, outside of any pass, until the next call. Every rank calls this.
    fn gather_unit(&mut self, cx: &mut StepContext, _: UnitId) -> Result<Held> {
        Ok(cx.replica.storage.values().clone())
    }

    /// The digest of all parameters ([`Storage::digest`]), the same on every rank if the strategy keeps them equal. The
    /// replicas have been synchronized. Every rank calls this.
    fn digest(&mut self, cx: &mut StepContext) -> Result<String> {
        let Replica { model, .. } = cx.replica;
        let mut digest = WeightsDigest::default();
        // The time belongs to no step.
        let mut track = SpanTrack::with_capacity(0);
        let cx = &mut StepContext { track: &mut track, ..cx.reborrow() };
        for unit in (0..model.layout.units().len()).map(UnitId) {
            let values = if model.layout.unit(unit).is_elsewhere {
                None
            } else {
                Some(self.gather_unit(cx, unit)?)
            };
            let params = model.layout.params().iter();
            for param in params.filter(|param| param.unit == unit && param.is_first()) {
                digest.add(&cx.replica.whole_param(param, values.as_ref())?)?;
            }
        }
        Ok(digest.finish())
    }

    /// Tensors that the strategy itself keeps from step to step on this rank, by name.
    fn state(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    // Synchronization.

    /// Whether the loss of the next step is summed over the ranks. If not, each rank knows only its own loss,
    /// and shares neither running statistics nor batch statistics in that step, whatever the replica's options.
    fn shares_loss(&self) -> bool {
        true
    }

    /// Whether gradients are reduced in every backward pass of a step, and not only in the last one. Then the gradients of a
    /// unit start again in each pass ([`View::new`]), and the strategy adds up what it has reduced. Gradients of root
    /// units are still reduced once.
    fn reduces_every_pass(&self) -> bool {
        false
    }

    /// Whether opening and closing units neither communicates nor waits, so that the passes of a step can be launched as a graph
    /// ([`ReplicaOptions::as_graph`](crate::ReplicaOptions::as_graph)). Then this rank's gradients are announced after the passes,
    /// and the strategy's own work before a pass of a unit is not repeated.
    fn passes_are_local(&self) -> bool {
        !self.reduces_every_pass()
    }

    /// Whether a graph can also have the communication of the gradients, if NCCL carries it out: all-reduces of which the host
    /// reads nothing. Then gradients are announced within the passes, in the order of each step, and travel while the backward
    /// pass goes on. In steps that are replayed, only [`Strategy::begin_gradients`] and [`Strategy::optimizer_step`] are called.
    fn is_capturable(&self) -> bool {
        false
    }

    /// The most micro-batches of a step, if there is a limit.
    fn max_micro_batches(&self) -> Option<usize> {
        None
    }

    /// Called at the beginning of a step, before the first gradient is announced; again between two micro-batches, if each is
    /// reduced. Forgets all that an earlier step has left, which may have failed.
    fn begin_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        Ok(())
    }

    /// Called when this rank's gradient of `id` is final: during the last backward pass of a step, or right
    /// after it for parameters that the step left out. Called once per step for each trained parameter of the rank's blocks;
    /// with [`Strategy::reduces_every_pass`], once per backward pass.
    fn gradient_ready(&mut self, _: &mut StepContext, _id: ParamId) -> Result<()> {
        Ok(())
    }

    /// Called after the last backward pass of a step. When it returns, the gradients that this rank owns are the mean
    /// over the ranks; with [`ReplicaOptions::steps_by_bucket`](crate::ReplicaOptions::steps_by_bucket) they may still be on
    /// their way to [`Strategy::optimizer_step`]. Must record the time for which it blocks as [`span::EXPOSED`].
    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()>;

    /// Makes the replicas equal if the strategy does not keep them equal after every step, before a
    /// checkpoint, an evaluation and the end of training. By default all ranks take the same running
    /// statistics.
    fn sync_replicas(&mut self, cx: &mut StepContext) -> Result<()> {
        cx.sync_buffers()
    }
}

/// The memory of the values and gradients in `held`. For each, `in_place` says whether peers can read and write there. Ranks that
/// hold parts of different sizes cannot share them.
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
