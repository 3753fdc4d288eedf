//! The training step that strategies share: forward and backward passes, and when the strategy is told of
//! gradients.
//!
//! Input: a strategy, a replica and micro-batches. Output: the loss, and gradients that the strategy has
//! synchronized. This module knows nothing of how gradients are communicated.

use paceline_collectives::{ReduceOp, Work};
use paceline_memory::Tensor;
use paceline_model::{Context, GradientBooks, ParamId, PassHooks};
use paceline_trace::{Span, SpanTrack, now_ns};

use crate::replica::LeftOut;
use crate::strategy::span;
use crate::{MicroBatch, Replica, Result, StepLoss, Strategy, StrategyError};

/// See [`Strategy::train_step`].
pub(crate) fn train<S: Strategy + ?Sized>(
    strategy: &mut S,
    replica: &mut Replica,
    micro_batches: &[MicroBatch],
    track: &mut SpanTrack,
) -> Result<StepLoss> {
    // The passes write to the books while they borrow the rest of the replica, so the books are taken out.
    let mut books = std::mem::take(&mut replica.books);
    books.begin_step();
    let outcome = step(strategy, replica, &mut books, micro_batches, track);
    replica.books = books;
    replica.num_samples += own_samples(micro_batches) as u64;
    let (loss, left_out) = outcome?;
    if replica.options.static_graph {
        replica.left_out.get_or_insert(left_out);
    }
    Ok(loss)
}

/// Runs all passes of a step. Returns the loss, and the parameters that were left out.
fn step<S: Strategy + ?Sized>(
    strategy: &mut S,
    replica: &Replica,
    books: &mut GradientBooks,
    micro_batches: &[MicroBatch],
    track: &mut SpanTrack,
) -> Result<(StepLoss, LeftOut)> {
    let count: usize = micro_batches.iter().map(|batch| batch.global_count).sum();
    let scale = replica.group.world_size() as f64 / count as f64;
    let mut local = [0.0, 0.0, f64::from(u8::from(replica.asks_to_stop))];
    let mut pending = None;
    let is_shared = strategy.shares_loss();
    if replica.options.broadcast_buffers && is_shared {
        replica.broadcast_buffers(0, track)?;
    }
    let mut hooks = Hooks { strategy, replica, track, is_shared, is_last: false, leaves_out: true };
    for (at, batch) in micro_batches.iter().enumerate() {
        hooks.is_last = at + 1 == micro_batches.len();
        let sums = pass(&mut hooks, books, batch, scale, &mut local)?;
        pending = sums.or(pending);
    }
    let left_out = hooks.finish_left_out(books)?;
    let begin = now_ns();
    strategy.finish(replica, track)?;
    track.push(span::GRAD_SYNC, Span { start_ns: begin, end_ns: now_ns() });
    if let Some(pending) = pending {
        track.record(span::EXPOSED, || pending.wait())?;
    }
    let sums = replica.sums.read::<f64>()?;
    let count = if is_shared { count } else { own_samples(micro_batches) };
    // If the loss is not shared, this rank may have had no sample.
    let loss = sums[0] / count.max(1) as f64;
    let (correct, stops) = (sums[1], sums[2] > 0.0);
    Ok((StepLoss { loss, correct, count, is_shared, local_sum: local[0], stops }, left_out))
}

/// The number of samples of this rank.
fn own_samples(micro_batches: &[MicroBatch]) -> usize {
    micro_batches.iter().map(|batch| batch.targets.dims()[0]).sum()
}

/// Runs the two passes of a micro-batch and adds to the sums of this rank. After the forward pass of the last
/// micro-batch, starts the all-reduce of the sums and returns it.
fn pass<S: Strategy + ?Sized>(
    hooks: &mut Hooks<S>,
    books: &mut GradientBooks,
    batch: &MicroBatch,
    scale: f64,
    local: &mut [f64; 3],
) -> Result<Option<Work>> {
    let Replica { model, storage, compute, group, sums, .. } = hooks.replica;
    let (is_last, is_shared) = (hooks.is_last, hooks.is_shared);
    let begin = now_ns();
    let mut cx = Context::training(compute, storage, books, hooks);
    let (output, saved) = model.network.forward(&mut cx, batch.inputs.clone())?;
    let (loss, d_output) = model.loss.differentiate(&cx, &output, &batch.targets, scale)?;
    drop(output);
    local[0] += loss.loss;
    local[1] += loss.correct as f64;
    let (mut pending, mut sent_ns) = (None, None);
    if is_last {
        sums.write::<f64>()?.copy_from_slice(local);
        if is_shared {
            sent_ns = Some(now_ns());
            pending = Some(group.all_reduce_async(sums, ReduceOp::Sum)?);
        }
    }
    let middle = now_ns();
    model.network.backward(&mut cx, saved, d_output, false)?;
    let end = now_ns();
    hooks.track.push(span::FORWARD, Span { start_ns: begin, end_ns: middle });
    hooks.track.push(span::BACKWARD, Span { start_ns: middle, end_ns: end });
    sent_ns.into_iter().for_each(|at_ns| hooks.track.mark_at(span::LOSS_SENT, 0, at_ns));
    Ok(pending)
}

/// Passes the model's announcements on to the strategy.
struct Hooks<'a, S: ?Sized> {
    strategy: &'a mut S,
    replica: &'a Replica,
    track: &'a mut SpanTrack,
    /// Whether the loss is summed over the ranks.
    is_shared: bool,
    /// Whether this is the last pass, whose gradients are final for the step.
    is_last: bool,
    /// Whether the parameters that no step uses still have to be announced.
    leaves_out: bool,
}

impl<'a, S: Strategy + ?Sized> Hooks<'a, S> {
    fn announce(&mut self, id: ParamId) -> Result<()> {
        self.track.mark(span::GRADIENT_READY, id.0);
        self.strategy.gradient_ready(self.replica, self.track, id)
    }

    /// The parameters that no step uses.
    fn never_used(&self) -> &'a [ParamId] {
        self.replica.left_out.as_ref().map_or(&[], |left_out| &left_out.unused)
    }

    fn used_after_all(&self, id: ParamId) -> StrategyError {
        let name = self.replica.model.layout.param(id).name.clone();
        StrategyError::UsedAfterAll { name }
    }

    /// Announces zero gradients for the parameters that no step uses, once per step. This must come after the
    /// forward pass: which parameters these are may depend on the rank, so what the strategy sends here may
    /// too, and all ranks must send the sums of the loss first.
    fn announce_never_used(&mut self) -> Result<()> {
        if std::mem::take(&mut self.leaves_out) {
            for &id in self.never_used() {
                self.replica.storage.grad(id)?.fill_zero()?;
                self.announce(id)?;
            }
        }
        Ok(())
    }

    /// Announces the parameters that the step has not used, or used only in part, and returns them. Errors
    /// if there are any that [`ReplicaOptions`](crate::ReplicaOptions) does not allow, or, with a static
    /// graph, any that the first step did not leave out.
    fn finish_left_out(&mut self, books: &GradientBooks) -> Result<LeftOut> {
        let Replica { model, storage, options, left_out: known, .. } = self.replica;
        self.announce_never_used()?;
        if let Some(&id) = self.never_used().iter().find(|id| books.is_written(**id)) {
            return Err(self.used_after_all(id));
        }
        let is_announced = |id: &ParamId| self.never_used().contains(id);
        let left_out: Vec<ParamId> = books.unfinished().filter(|id| !is_announced(id)).collect();
        let is_known = |id: &ParamId| known.as_ref().is_some_and(|k| k.unfinished.contains(id));
        let new: Vec<&ParamId> = left_out.iter().filter(|id| !is_known(id)).collect();
        if !new.is_empty() && (!options.find_unused_parameters || known.is_some()) {
            let names = new.iter().map(|id| model.layout.param(**id).name.clone()).collect();
            let is_new = options.find_unused_parameters;
            return Err(StrategyError::Unused { names, is_new });
        }
        for &id in &left_out {
            if !books.is_written(id) {
                storage.grad(id)?.fill_zero()?;
            }
            self.announce(id)?;
        }
        let (unfinished, unused) = left_out.into_iter().partition(|id| books.is_written(*id));
        Ok(LeftOut { unused, unfinished })
    }
}

impl<S: Strategy + ?Sized> PassHooks for Hooks<'_, S> {
    fn gradient_ready(&mut self, id: ParamId) -> paceline_model::Result<()> {
        if self.never_used().contains(&id) {
            return Err(self.used_after_all(id).into());
        }
        if self.is_last {
            self.announce_never_used()?;
            self.announce(id)?;
        }
        Ok(())
    }

    fn syncs_statistics(&self) -> bool {
        self.replica.options.sync_batch_norm && self.is_shared
    }

    fn sum_over_ranks(&mut self, sums: &Tensor) -> paceline_model::Result<()> {
        let reduce = || self.replica.group.all_reduce(sums, ReduceOp::Sum);
        self.track.record(span::EXPOSED, reduce).map_err(StrategyError::from)?;
        Ok(())
    }
}
