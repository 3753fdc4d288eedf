//! The interface of a strategy.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_kernels::loss::LossSums;
use paceline_kernels::norm;
use paceline_memory::{Category, DType};
use paceline_model::{Context, Model, Optimizer, ParamId, Storage};
use paceline_trace::SpanTrack;

use crate::{Exactness, MicroBatch, Replica, Result, step};

/// Names of what a training step records on the main track.
pub mod span {
    /// The forward pass and the loss.
    pub const FORWARD: &str = "forward";
    /// The backward pass, hooks included.
    pub const BACKWARD: &str = "backward";
    /// The main thread was blocked on communication. May lie within the passes.
    pub const EXPOSED: &str = "exposed";
    /// What synchronisation adds on the main thread: all that follows the last backward pass, in which it
    /// may be blocked ([`EXPOSED`]), and arithmetic and copies within the passes.
    pub const GRAD_SYNC: &str = "grad_sync";
    /// The optimizer.
    pub const OPTIMIZER: &str = "optimizer_step";
    /// Mark: this rank's gradient of a parameter is final.
    pub const GRADIENT_READY: &str = "gradient_ready";
    /// Mark: the sums of the loss are submitted next, an operation that is no part of the strategy.
    pub const LOSS_SENT: &str = "loss_sent";
    /// Mark: a bucket is submitted next.
    pub const BUCKET_SENT: &str = "bucket_sent";
}

/// What a training step came to, over the whole batch; the same on every rank, except where noted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Mean loss over the samples of all ranks.
    pub loss: f64,
    /// Samples classified correctly, on all ranks together.
    pub correct: f64,
    /// Samples of all ranks together.
    pub count: usize,
    /// Whether loss, correct and count are those of all ranks. If not, they are this rank's alone.
    pub is_shared: bool,
    /// Sum of the losses of this rank's samples.
    pub local_sum: f64,
}

/// A way to keep replicas equal.
pub trait Strategy: Send {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// What it promises about the weights of the replicas.
    fn exactness(&self) -> Exactness;

    /// Chooses the memory of parameters and gradients, before a replica exists. As it is, every rank
    /// holds all of both, and gradients lie where peers can reduce them in place.
    fn backing(&mut self, model: &Model, compute: &Compute, group: &Group) -> Result<Storage> {
        let layout = &model.layout;
        let (values, grads) = (layout.num_bytes(DType::F32), layout.trained_bytes(DType::F32));
        let values = compute.allocator.host(values, Category::Parameters)?;
        let grads = group.allocate(&compute.allocator, grads, Category::Gradients)?;
        Ok(Storage::new(layout.clone(), DType::F32, values, grads, &compute.allocator)?)
    }

    /// Prepares for training `replica`: plans buckets, allocates. Called once, before the first step.
    fn prepare(&mut self, _replica: &Replica) -> Result<()> {
        Ok(())
    }

    /// Whether the sums of the loss are added up over the ranks. Without it, each rank knows its own, and
    /// its own running statistics, whatever the options of the replica.
    fn shares_loss(&self) -> bool {
        true
    }

    /// Called during the last backward pass of a step, when this rank's gradient of `id` is final; once
    /// for each parameter that is trained.
    fn gradient_ready(&mut self, _: &Replica, _: &mut SpanTrack, _id: ParamId) -> Result<()> {
        Ok(())
    }

    /// Called after the last backward pass of a step; when it returns, all gradients are the mean
    /// over the ranks. Records the time it blocks as [`span::EXPOSED`].
    fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()>;

    /// The norm of all gradients together that a step left, the same on every rank. As it is, every
    /// rank holds all of them, equal to those of the others.
    fn grad_norm(&mut self, replica: &Replica) -> Result<f64> {
        Ok(norm::sum_of_squares(&replica.compute, replica.storage.grads())?.sqrt())
    }

    /// Updates the parameters from the gradients that a step left. As it is, every rank updates all.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        Ok(track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?)
    }

    /// Makes the replicas equal where they are not after every step: called before a checkpoint, an
    /// evaluation and the end of training. As it is, all take the same running statistics.
    fn settle(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        replica.settle_buffers(track)
    }

    /// Sums of loss and correct samples over this rank's share of a batch, without gradients.
    fn evaluate(&mut self, replica: &Replica, batch: &MicroBatch) -> Result<LossSums> {
        let Replica { model, compute, storage, .. } = replica;
        let mut cx = Context::evaluation(compute, storage);
        let (output, _) = model.network.forward(&mut cx, batch.inputs.clone())?;
        Ok(model.loss.evaluate(&output, &batch.targets)?)
    }

    /// Computes the gradients of a batch, given as this rank's shares of its micro-batches, and
    /// synchronises them after the last one. The others are what PyTorch calls `no_sync`: their
    /// gradients add up where they are.
    ///
    /// Every sample counts the same, however unevenly the batch is shared out: each rank's gradient
    /// is scaled by `world_size / samples of all ranks`, so that the mean over the ranks is the mean
    /// over the samples. The sums of the loss travel while the backward pass runs.
    fn train_step(
        &mut self,
        replica: &mut Replica,
        micro_batches: &[MicroBatch],
        track: &mut SpanTrack,
    ) -> Result<StepLoss> {
        step::train(self, replica, micro_batches, track)
    }
}
