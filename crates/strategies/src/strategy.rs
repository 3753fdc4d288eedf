//! The interface of a strategy, and the training step that most of them share.

use paceline_collectives::{Group, ReduceOp};
use paceline_kernels::Compute;
use paceline_kernels::loss::LossSums;
use paceline_memory::{Category, DType};
use paceline_model::{Context, Model, Optimizer, ParamId, Storage, Which};
use paceline_trace::{Lane, Span, now_ns};

use crate::{MicroBatch, Replica, Result};

/// Names of the spans that a training step records on the main lane.
pub mod span {
    /// The forward pass and the loss.
    pub const FORWARD: &str = "forward";
    /// The backward pass, hooks included.
    pub const BACKWARD: &str = "backward";
    /// The main thread was blocked on communication. May lie within [`BACKWARD`].
    pub const EXPOSED: &str = "exposed";
    /// Arithmetic that synchronisation adds, such as dividing by the number of ranks.
    pub const GRAD_SYNC: &str = "grad_sync";
    /// The optimizer.
    pub const OPTIMIZER: &str = "optimizer_step";
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
    /// Sum of the losses of this rank's samples.
    pub local_sum: f64,
}

/// A way to keep replicas equal.
pub trait Strategy: Send {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Chooses the memory of parameters and gradients, before a replica exists. As it is, every rank
    /// holds all of both, and gradients lie where peers can reduce them in place.
    fn backing(&mut self, model: &Model, compute: &Compute, group: &Group) -> Result<Storage> {
        let bytes = model.layout.num_bytes(DType::F32);
        let values = compute.allocator.host(bytes, Category::Parameters)?;
        let grads = group.allocate(&compute.allocator, bytes, Category::Gradients)?;
        Ok(Storage::new(model.layout.clone(), DType::F32, values, grads)?)
    }

    /// Prepares for training `replica`: plans buckets, allocates. Called once, before the first step.
    fn prepare(&mut self, replica: &Replica) -> Result<()>;

    /// Called during the last backward pass of a step, when this rank's gradient of `id` is final.
    fn gradient_ready(&mut self, replica: &Replica, lane: &mut Lane, id: ParamId) -> Result<()>;

    /// Called after the last backward pass of a step; when it returns, all gradients are the mean
    /// over the ranks. Records the time it blocks as [`span::EXPOSED`].
    fn finish(&mut self, replica: &Replica, lane: &mut Lane) -> Result<()>;

    /// Updates the parameters from the gradients that a step left. As it is, every rank updates all.
    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        lane: &mut Lane,
    ) -> Result<()> {
        let Replica { compute, storage, .. } = replica;
        Ok(lane.record(span::OPTIMIZER, || optimizer.step(compute, storage))?)
    }

    /// Sums of loss and correct samples over this rank's share of a batch, without gradients.
    fn evaluate(&mut self, replica: &Replica, batch: &MicroBatch) -> Result<LossSums> {
        let Replica { model, compute, storage, .. } = replica;
        let mut ignore = |_| Ok(());
        let mut cx = Context::new(compute, storage, false, &mut ignore);
        let (output, _) = model.network.forward(&mut cx, batch.inputs.clone())?;
        Ok(model.loss.evaluate(&output, &batch.targets)?)
    }

    /// Computes the gradients of a batch, given as this rank's shares of its micro-batches, and
    /// synchronises them.
    ///
    /// Every sample counts the same, however unevenly the batch is shared out: each rank's gradient
    /// is scaled by `world_size / samples of all ranks`, so that the mean over the ranks is the mean
    /// over the samples. The sums of the loss travel while the backward pass runs.
    fn train_step(
        &mut self,
        replica: &Replica,
        micro_batches: &[MicroBatch],
        lane: &mut Lane,
    ) -> Result<StepLoss> {
        let Replica { model, storage, compute, group, sums } = replica;
        let count: usize = micro_batches.iter().map(|batch| batch.global_count).sum();
        let scale = group.world_size() as f64 / count as f64;
        let mut local = [0.0; 2];
        let mut pending = None;
        for (at, batch) in micro_batches.iter().enumerate() {
            let is_last = at + 1 == micro_batches.len();
            let begin = now_ns();
            let mut ready = |id: ParamId| {
                if is_last {
                    self.gradient_ready(replica, lane, id)?;
                }
                Ok(())
            };
            let mut cx = Context::new(compute, storage, at > 0, &mut ready);
            let (output, mut saved) = model.network.forward(&mut cx, batch.inputs.clone())?;
            let (loss, d_output) = model.loss.differentiate(&cx, &output, &batch.targets, scale)?;
            drop(output);
            local[0] += loss.loss;
            local[1] += loss.correct as f64;
            if is_last {
                sums.write::<f64>()?.copy_from_slice(&local);
                pending = Some(group.all_reduce_async(sums, ReduceOp::Sum)?);
            }
            let middle = now_ns();
            model.network.backward(&mut cx, &mut saved, d_output, Which::Weight)?;
            let end = now_ns();
            lane.push(span::FORWARD, Span { start_ns: begin, end_ns: middle });
            lane.push(span::BACKWARD, Span { start_ns: middle, end_ns: end });
        }
        self.finish(replica, lane)?;
        if let Some(pending) = pending {
            lane.record(span::EXPOSED, || pending.wait())?;
        }
        let sums = sums.read::<f64>()?;
        Ok(StepLoss { loss: sums[0] / count as f64, correct: sums[1], count, local_sum: local[0] })
    }
}
