//! The interface of a strategy.
//!
//! Input: a replica, and announcements of final gradients. Output: gradients that are the mean over the
//! ranks. A strategy knows nothing of layers.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_kernels::loss::LossSums;
use paceline_kernels::norm;
use paceline_memory::{Category, DType};
use paceline_model::{Context, Model, Optimizer, ParamId, Storage};
use paceline_trace::SpanTrack;

use crate::{Exactness, MicroBatch, Replica, Result, step};

/// Names of the spans and marks that a training step records on the main track.
pub mod span {
    /// The forward pass and the loss.
    pub const FORWARD: &str = "forward";
    /// The backward pass, hooks included.
    pub const BACKWARD: &str = "backward";
    /// Time in which the main thread was blocked on communication. May lie within the passes.
    pub const EXPOSED: &str = "exposed";
    /// Time that synchronization adds on the main thread: everything after the last backward pass (which may
    /// include [`EXPOSED`] time), and arithmetic and copies within the passes.
    pub const GRAD_SYNC: &str = "grad_sync";
    /// The optimizer.
    pub const OPTIMIZER: &str = "optimizer_step";
    /// Mark: this rank's gradient of a parameter is final.
    pub const GRADIENT_READY: &str = "gradient_ready";
    /// Mark: the next submitted operation sums the loss. It is not part of the strategy.
    pub const LOSS_SENT: &str = "loss_sent";
    /// Mark: the next submitted operation sends a bucket.
    pub const BUCKET_SENT: &str = "bucket_sent";
}

/// The loss of a training step over the whole batch. The same on every rank, except where noted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Mean loss over the samples of all ranks.
    pub loss: f64,
    /// Samples classified correctly, on all ranks together.
    pub correct: f64,
    /// Samples of all ranks together.
    pub count: usize,
    /// Whether loss, correct and count are those of all ranks. If not, they are only this rank's.
    pub is_shared: bool,
    /// Sum of the losses of this rank's samples.
    pub local_sum: f64,
    /// Whether any rank has asked to stop after this step; see [`Replica::asks_to_stop`]. If the loss is not shared, only
    /// whether this rank has.
    pub stops: bool,
}

/// A way to keep replicas equal.
pub trait Strategy: Send {
    /// The strategy's name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// What the strategy guarantees about the weights of the replicas.
    fn exactness(&self) -> Exactness;

    /// Allocates the memory of parameters and gradients, before a replica exists. By default every rank holds
    /// all parameters and all gradients, and gradients lie where peers can reduce them in place.
    fn backing(&mut self, model: &Model, compute: &Compute, group: &Group) -> Result<Storage> {
        let layout = &model.layout;
        let (values, grads) = (layout.num_bytes(DType::F32), layout.trained_bytes(DType::F32));
        let values = compute.allocator.host(values, Category::Parameters)?;
        let grads = group.allocate(&compute.allocator, grads, Category::Gradients)?;
        Ok(Storage::new(layout.clone(), DType::F32, values, grads, &compute.allocator)?)
    }

    /// Prepares for training `replica`, for example by planning buckets and allocating memory. Called once,
    /// before the first step.
    fn prepare(&mut self, _replica: &Replica) -> Result<()> {
        Ok(())
    }

    /// Whether the loss of the next step is summed over the ranks. If not, each rank knows only its own loss,
    /// and neither running statistics nor batch statistics are shared in that step, whatever the options of
    /// the replica.
    fn shares_loss(&self) -> bool {
        true
    }

    /// Called when this rank's gradient of `id` is final: during the last backward pass of a step, or right
    /// after it for parameters that the step left out. Called once per step for each trained parameter.
    fn gradient_ready(&mut self, _: &Replica, _: &mut SpanTrack, _id: ParamId) -> Result<()> {
        Ok(())
    }

    /// Called after the last backward pass of a step. When it returns, all gradients are the mean over the
    /// ranks. Must record the time for which it blocks as [`span::EXPOSED`].
    fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()>;

    /// The norm of all gradients of the last step together, the same on every rank. The default assumes that
    /// every rank holds all gradients, equal to those of the others.
    fn grad_norm(&mut self, replica: &Replica) -> Result<f64> {
        let rows = norm::Rows::new(replica.model.layout.trained().map(|(_, param)| param.range()));
        let all = 0..rows.count();
        let tree = norm::squares(&replica.compute, replica.storage.grads(), &rows, all)?;
        Ok(tree.total().sqrt())
    }

    /// Updates the parameters from the gradients of the last step. By default every rank updates all
    /// parameters.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        Ok(track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?)
    }

    /// Makes the replicas equal if the strategy does not keep them equal after every step. Called before a
    /// checkpoint, an evaluation and the end of training. By default all ranks take the same running
    /// statistics.
    fn settle(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        replica.settle_buffers(track)
    }

    /// The sums of loss and correct samples over this rank's share of a batch. Computes no gradients.
    fn evaluate(&mut self, replica: &Replica, batch: &MicroBatch) -> Result<LossSums> {
        let Replica { model, compute, storage, .. } = replica;
        let mut cx = Context::evaluation(compute, storage);
        let (output, _) = model.network.forward(&mut cx, batch.inputs.clone())?;
        Ok(model.loss.evaluate(&output, &batch.targets)?)
    }

    /// Computes the gradients of a batch, given as this rank's shares of its micro-batches, and synchronizes
    /// them after the last micro-batch. The earlier micro-batches correspond to PyTorch's `no_sync`: their
    /// gradients are summed in place.
    ///
    /// Every sample has the same weight, however unevenly the batch is divided: each rank's gradient is
    /// scaled by `world_size / samples of all ranks`, so that the mean over the ranks is the mean over the
    /// samples. The sums of the loss travel while the backward pass runs.
    fn train_step(
        &mut self,
        replica: &mut Replica,
        micro_batches: &[MicroBatch],
        track: &mut SpanTrack,
    ) -> Result<StepLoss> {
        step::train(self, replica, micro_batches, track)
    }
}
