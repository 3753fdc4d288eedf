//! The training step that strategies share: forward and backward passes, and who is told what when.

use paceline_collectives::{ReduceOp, Work};
use paceline_memory::Tensor;
use paceline_model::{Context, GradientBooks, ParamId, PassHooks, Which};
use paceline_trace::{Lane, Span, now_ns};

use crate::strategy::span;
use crate::{MicroBatch, Replica, Result, StepLoss, Strategy, StrategyError};

/// See [`Strategy::train_step`].
pub(crate) fn train<S: Strategy + ?Sized>(
    strategy: &mut S,
    replica: &mut Replica,
    micro_batches: &[MicroBatch],
    lane: &mut Lane,
) -> Result<StepLoss> {
    // The books are kept by the passes, which see the rest of the replica at the same time.
    let mut books = std::mem::take(&mut replica.books);
    books.begin_step();
    let outcome = step(strategy, replica, &mut books, micro_batches, lane);
    replica.books = books;
    let (loss, never_used) = outcome?;
    if replica.options.static_graph {
        replica.never_used.get_or_insert(never_used);
    }
    Ok(loss)
}

/// The loss, and the parameters that were not used at all.
fn step<S: Strategy + ?Sized>(
    strategy: &mut S,
    replica: &Replica,
    books: &mut GradientBooks,
    micro_batches: &[MicroBatch],
    lane: &mut Lane,
) -> Result<(StepLoss, Vec<ParamId>)> {
    let count: usize = micro_batches.iter().map(|batch| batch.global_count).sum();
    let scale = replica.group.world_size() as f64 / count as f64;
    let mut local = [0.0; 2];
    let mut pending = None;
    if replica.options.broadcast_buffers && strategy.shares_loss() {
        replica.broadcast_buffers(lane)?;
    }
    let mut hooks = Hooks { strategy, replica, lane, is_last: false, leaves_out: true };
    for (at, batch) in micro_batches.iter().enumerate() {
        hooks.is_last = at + 1 == micro_batches.len();
        let sums = pass(&mut hooks, books, batch, scale, &mut local)?;
        pending = sums.or(pending);
    }
    let never_used = hooks.finish_unused(books)?;
    strategy.finish(replica, lane)?;
    if let Some(pending) = pending {
        lane.record(span::EXPOSED, || pending.wait())?;
    }
    let sums = replica.sums.read::<f64>()?;
    let count = match strategy.shares_loss() {
        true => count,
        false => micro_batches.iter().map(|batch| batch.targets.dims()[0]).sum(),
    };
    // A rank that keeps its loss for itself may have had no sample.
    let loss = sums[0] / count.max(1) as f64;
    Ok((StepLoss { loss, correct: sums[1], count, local_sum: local[0] }, never_used))
}

/// The two passes of a micro-batch. Adds to the sums of this rank; after the last forward pass they
/// travel.
fn pass<S: Strategy + ?Sized>(
    hooks: &mut Hooks<S>,
    books: &mut GradientBooks,
    batch: &MicroBatch,
    scale: f64,
    local: &mut [f64; 2],
) -> Result<Option<Work>> {
    let Replica { model, storage, compute, group, sums, .. } = hooks.replica;
    let (is_last, shares_loss) = (hooks.is_last, hooks.strategy.shares_loss());
    let begin = now_ns();
    let mut cx = Context::training(compute, storage, books, hooks);
    let (output, mut saved) = model.network.forward(&mut cx, batch.inputs.clone())?;
    let (loss, d_output) = model.loss.differentiate(&cx, &output, &batch.targets, scale)?;
    drop(output);
    local[0] += loss.loss;
    local[1] += loss.correct as f64;
    let mut pending = None;
    if is_last {
        sums.write::<f64>()?.copy_from_slice(local);
        if shares_loss {
            pending = Some(group.all_reduce_async(sums, ReduceOp::Sum)?);
        }
    }
    let middle = now_ns();
    model.network.backward(&mut cx, &mut saved, d_output, Which::Weight)?;
    let end = now_ns();
    hooks.lane.push(span::FORWARD, Span { start_ns: begin, end_ns: middle });
    hooks.lane.push(span::BACKWARD, Span { start_ns: middle, end_ns: end });
    Ok(pending)
}

/// Passes on what happens within a pass.
struct Hooks<'a, S: ?Sized> {
    strategy: &'a mut S,
    replica: &'a Replica,
    lane: &'a mut Lane,
    /// Whether gradients of this pass are final for the step.
    is_last: bool,
    /// Whether the parameters that no step uses have yet to be announced.
    leaves_out: bool,
}

impl<S: Strategy + ?Sized> Hooks<'_, S> {
    fn announce(&mut self, id: ParamId) -> Result<()> {
        self.lane.mark(span::GRADIENT_READY, id.0);
        self.strategy.gradient_ready(self.replica, self.lane, id)
    }

    /// Announces zeros for what no step uses, once per step. After the forward pass, because what is
    /// sent before may depend on the rank, and all ranks send the sums of the loss first.
    fn announce_never_used(&mut self) -> Result<()> {
        if std::mem::take(&mut self.leaves_out) {
            for &id in self.replica.never_used.iter().flatten() {
                fill_zero(&self.replica.storage.grad(id)?)?;
                self.announce(id)?;
            }
        }
        Ok(())
    }

    /// Announces what the step has not used; the parameters of which it wrote nothing at all.
    fn finish_unused(&mut self, books: &GradientBooks) -> Result<Vec<ParamId>> {
        let Replica { model, storage, options, never_used, .. } = self.replica;
        self.announce_never_used()?;
        let is_known = |id: &ParamId| never_used.iter().flatten().any(|known| known == id);
        let unused: Vec<ParamId> = books.unfinished().filter(|id| !is_known(id)).collect();
        if !unused.is_empty() && (!options.find_unused_parameters || never_used.is_some()) {
            let names = unused.iter().map(|id| model.layout.param(*id).name.clone()).collect();
            let is_new = options.find_unused_parameters;
            return Err(StrategyError::Unused { names, is_new });
        }
        for &id in &unused {
            if !books.is_written(id) {
                fill_zero(&storage.grad(id)?)?;
            }
            self.announce(id)?;
        }
        Ok(unused.into_iter().filter(|id| !books.is_written(*id)).collect())
    }
}

fn fill_zero(tensor: &Tensor) -> Result<()> {
    tensor.as_bytes().write::<u8>()?.fill(0);
    Ok(())
}

impl<S: Strategy + ?Sized> PassHooks for Hooks<'_, S> {
    fn gradient_ready(&mut self, id: ParamId) -> paceline_model::Result<()> {
        if self.replica.never_used.iter().flatten().any(|unused| *unused == id) {
            let name = self.replica.model.layout.param(id).name.clone();
            return Err(StrategyError::UsedAfterAll { name }.into());
        }
        if self.is_last {
            self.announce_never_used()?;
            self.announce(id)?;
        }
        Ok(())
    }

    fn syncs_statistics(&self) -> bool {
        self.replica.options.sync_batch_norm && self.strategy.shares_loss()
    }

    fn sum_over_ranks(&mut self, sums: &Tensor) -> paceline_model::Result<()> {
        let reduce = || self.replica.group.all_reduce(sums, ReduceOp::Sum);
        self.lane.record(span::EXPOSED, reduce).map_err(StrategyError::from)?;
        Ok(())
    }
}
