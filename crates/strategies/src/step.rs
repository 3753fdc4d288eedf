//! The training step that all strategies share: it runs passes over blocks, and calls the strategy at the right moments.
//!
//! Input: a strategy, a replica and micro-batches. Output: the loss, and gradients that the strategy has
//! synchronized. A plan has the order of the passes. This file knows nothing of how gradients are communicated.

use std::ops::Range;

use paceline_collectives::{OpTimes, Purpose, ReduceOp, Work};
use paceline_memory::{GraphedWork, Tensor};
use paceline_model::{Context, Half, Layer, OpenUnits, ParamId, Saved, UnitId};
use paceline_schedule::Plan;
use paceline_trace::{SpanTrack, now_ns};

use crate::accumulation::{AccumulationOrder, PartialSums};
use crate::executor::{self, Executed};
use crate::graphs::StepPasses;
use crate::hooks::Hooks;
use crate::replica::LeftOut;
use crate::strategy::span;
use crate::{MicroBatch, Replica, Result, Strategy, StrategyError};

/// The loss of a training step over the whole batch. The same on every rank, except where noted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Mean loss over the samples or tokens of all ranks.
    pub loss: f64,
    /// Samples or tokens that were predicted correctly, on all ranks together.
    pub correct: f64,
    /// The number that the mean is taken over, on all ranks together: that of samples or of tokens, as the objective says.
    pub count: usize,
    /// Samples of all ranks together.
    pub samples: usize,
    /// Tokens of this rank's samples; zero if the inputs are no tokens. All stages of a pipeline have the same samples, and only
    /// the last stage counts them, so that the sum over all ranks has each token once.
    pub own_tokens: usize,
    /// Whether loss, correct, count and samples are those of all ranks. If not, they are only this rank's.
    pub is_shared: bool,
    /// Sum of the losses of this rank's samples.
    pub local_sum: f64,
    /// Whether any rank has asked to stop after this step; see [`Replica::asks_to_stop`]. If the loss is not shared, this
    /// is only about this rank.
    pub stops: bool,
}

/// Computes the gradients of a batch, given as this rank's shares of its micro-batches, and synchronizes
/// them after the last micro-batch. The earlier micro-batches correspond to PyTorch's `no_sync`: their
/// gradients are added up on this rank, in the order of [`ReplicaOptions`](crate::ReplicaOptions). Without that option the
/// gradients of each micro-batch are synchronized, and added up afterwards.
///
/// Every sample or token has the same weight, however unevenly the batch is divided: each rank's gradient is
/// scaled by `world_size / count of all ranks`, so that the mean over the ranks is the mean over the
/// samples or tokens. The sums of the loss travel while the backward pass runs.
///
/// If the objective does not know the count of all ranks before ([`Objective::count_of_all`](
/// paceline_model::Objective::count_of_all)), the ranks add up their own: one more all-reduce, of 8 bytes, which travels
/// while the forward pass runs. In a step whose loss is not shared, a rank then divides by its own count.
///
/// With [`ReplicaOptions::as_graph`](crate::ReplicaOptions::as_graph) the passes are one piece of work of a card from the third step
/// on with micro-batches of the same shapes and the same factor of the loss. What communicates comes behind it.
pub fn train_step(
    strategy: &mut dyn Strategy,
    replica: &mut Replica,
    micro_batches: &[MicroBatch],
    track: &mut SpanTrack,
) -> Result<StepLoss> {
    let mut graphs = replica.graphs.take();
    let graph = match &mut graphs {
        Some(graphs) => graphs.of_step(replica, strategy.shares_loss(), micro_batches),
        None => Ok(None),
    };
    let outcome = graph.and_then(|graph| make(strategy, replica, micro_batches, graph, track));
    replica.graphs = graphs;
    outcome
}

fn make(
    strategy: &mut dyn Strategy,
    replica: &mut Replica,
    micro_batches: &[MicroBatch],
    graph: Option<&mut StepPasses>,
    track: &mut SpanTrack,
) -> Result<StepLoss> {
    // The passes change these fields while they borrow the rest of the replica, so the fields are taken out.
    let mut units = std::mem::take(&mut replica.units);
    let mut partial_sums = std::mem::take(&mut replica.partial_sums);
    let mut executed = std::mem::take(&mut replica.executed);
    let is_known = |plan: &Plan| plan.shape().micro_batches == micro_batches.len();
    let plan = match replica.plan.take().filter(is_known) {
        Some(plan) => plan,
        None => replica.pipeline.plan(micro_batches.len())?,
    };
    let (passed, segment) = match graph {
        Some(StepPasses { batches, segment, .. }) => (&batches[..], Some(segment)),
        None => (micro_batches, None),
    };
    let micro_batches = (micro_batches, passed);
    let outcome =
        Step::begin(strategy, replica, micro_batches, &mut units, &mut partial_sums, track)
            .and_then(|mut step| {
                let passed = match segment {
                    Some(segment) => step.pass_as_graph(segment, &plan, &mut executed)?,
                    None => step.pass_all(&plan, &mut executed)?,
                };
                step.finish(passed)
            });
    replica.units = units;
    replica.executed = executed;
    replica.partial_sums = partial_sums;
    replica.plan = Some(plan);
    let (loss, left_out, num_samples) = outcome?;
    replica.num_samples += num_samples as u64;
    if replica.options.static_graph {
        replica.left_out.get_or_insert(left_out);
    }
    Ok(loss)
}

/// What the passes of a step leave.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    /// The parameters that the passes have not used.
    left_out: LeftOut,
    /// The gradients of which the strategy was not told yet, in the order in which they became final.
    later: Vec<ParamId>,
}

/// A training step in progress.
pub(crate) struct Step<'a> {
    /// The hooks of all passes, with the strategy.
    hooks: Hooks<'a>,
    pub(crate) replica: &'a Replica,
    micro_batches: &'a [MicroBatch],
    /// The same samples where the passes take them from: at places that stay, if the passes are a graph.
    pub(crate) passed: &'a [MicroBatch],
    units: &'a mut OpenUnits,
    /// The number of samples or tokens of all ranks.
    count: Count,
    /// The number of micro-batches whose loss is computed.
    num_losses: usize,
    /// The micro-batch of the last backward pass, and the number of micro-batches whose backward pass has begun.
    backward: (Option<usize>, usize),
    /// The all-reduce of the sums of the loss, once it has started.
    pending: Option<Option<Work>>,
}

impl<'a> Step<'a> {
    fn begin(
        strategy: &'a mut dyn Strategy,
        replica: &'a Replica,
        (micro_batches, passed): (&'a [MicroBatch], &'a [MicroBatch]),
        units: &'a mut OpenUnits,
        partial_sums: &'a mut PartialSums,
        track: &'a mut SpanTrack,
    ) -> Result<Self> {
        let Replica { options, .. } = replica;
        if let Some(most) = strategy.max_micro_batches().filter(|most| micro_batches.len() > *most)
        {
            return Err(StrategyError::Setting(format!(
                "{} was made for steps of at most {most} micro-batches, not {}: see ShardOptions::max_micro_batches",
                strategy.name(),
                micro_batches.len()
            )));
        }
        let is_shared = strategy.shares_loss();
        if options.broadcast_buffers && is_shared {
            replica.broadcast_buffers(0, track)?;
        }
        let count = Count::begin(replica, micro_batches, is_shared)?;
        let hooks = Hooks {
            strategy,
            replica,
            partial_sums,
            track,
            is_shared,
            is_last: false,
            leaves_out: true,
            later: None,
        };
        let (num_losses, backward, pending) = (0, (None, 0), None);
        Ok(Self {
            hooks,
            replica,
            micro_batches,
            passed,
            units,
            count,
            num_losses,
            backward,
            pending,
        })
    }

    /// All passes of the step.
    fn pass_all(&mut self, plan: &Plan, executed: &mut Executed) -> Result<Passed> {
        let Replica { options, own_sums, pipeline, .. } = self.replica;
        let num_passes = self.micro_batches.len();
        own_sums.fill_zero()?;
        self.hooks.partial_sums.begin_step(num_passes);
        let reduces_each = self.hooks.strategy.reduces_every_pass() || !options.no_sync;
        self.units.begin_step(num_passes, reduces_each);
        self.pass(None, |cx| cx.open_roots())?;
        if !pipeline.has_last_stage() {
            // It takes part in the sum with zeros. If it did so at the end, all ranks would wait for it there.
            self.send_sums()?;
        }
        executor::run(self, plan, executed)?;
        // A step may be without micro-batches.
        if self.pending.is_none() && self.hooks.later.is_none() {
            self.send_sums()?;
        }
        let left_out = self.end_backward(true)?;
        self.pass(None, |cx| cx.close_roots())?;
        Ok(Passed { left_out, later: self.hooks.later.take().unwrap_or_default() })
    }

    /// The same as a graph, or told for one. Its parts have no times of their own.
    fn pass_as_graph(
        &mut self,
        segment: &mut GraphedWork<Passed>,
        plan: &Plan,
        executed: &mut Executed,
    ) -> Result<Passed> {
        let start_ns = self.hooks.track.begin(span::BACKWARD);
        let passed = segment.run(|| {
            self.hooks.later = Some(Vec::new());
            self.pass_all(plan, executed)
        })?;
        self.hooks.track.end(span::BACKWARD, start_ns);
        self.replica.compute.allocator.end_phase(span::BACKWARD);
        Ok(passed)
    }

    /// The forward pass of micro-batch number `at` through `blocks`. `input` is the input of the first of these blocks.
    /// Returns the output of the last block, and what the backward pass needs.
    pub(crate) fn forward(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        input: Tensor,
    ) -> Result<(Tensor, Saved)> {
        let stage = self.replica.model.stage(blocks);
        self.timed(span::FORWARD, |step| step.pass(Some(at), |cx| stage.forward(cx, input)))
    }

    /// The loss of micro-batch number `at`, from the output of the model's last block. Returns the gradient of the
    /// output. After the loss of the last micro-batch, the all-reduce of the losses starts.
    ///
    /// If the objective has parameters, their gradients are written here. With `saved` they are put off: [`Step::backward_weight`]
    /// takes it.
    pub(crate) fn loss(
        &mut self,
        at: usize,
        output: Tensor,
        saved: Option<&mut Saved>,
    ) -> Result<Tensor> {
        if self.replica.model.objective.has_parameters() && saved.is_none() {
            let units = self.replica.pipeline.units_of_objective(&self.replica.model);
            self.begin_backward(at, &units)?;
        }
        self.timed(span::FORWARD, |step| {
            let Replica { model, own_sums, group, loss_scale, .. } = step.replica;
            // The gradients of this rank's samples are scaled. A loss scale that is a power of two changes no digit.
            let scale = loss_scale * (group.world_size() as f64 / step.count_of_all()? as f64);
            let d_output =
                step.pass(Some(at), |cx| model.differentiate(cx, &output, scale, own_sums, saved))?;
            drop(output);
            step.num_losses += 1;
            if step.num_losses == step.micro_batches.len() && step.hooks.later.is_none() {
                step.send_sums()?;
            }
            Ok(d_output)
        })
    }

    /// The backward pass of micro-batch number `at` through `blocks`, from the gradient of their output and what their
    /// forward pass saved. Returns the gradient of their input, unless they begin with the model's first block.
    pub(crate) fn backward(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        mut saved: Saved,
        d_output: Tensor,
    ) -> Result<Option<Tensor>> {
        self.begin_backward(at, &self.units_of(&blocks))?;
        let half = Half::Whole { wants_input: blocks.start > 0 };
        let stage = self.replica.model.stage(blocks);
        self.timed(span::BACKWARD, |step| {
            step.pass(Some(at), |cx| stage.backward(cx, &mut saved, d_output, half))
        })
    }

    /// The input half of [`Step::backward`]. What the weight half needs stays in `saved`.
    pub(crate) fn backward_input(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Option<Tensor>> {
        let half = Half::Input { wants_input: blocks.start > 0 };
        let stage = self.replica.model.stage(blocks);
        self.timed(span::BACKWARD, |step| {
            step.pass(Some(at), |cx| stage.backward(cx, saved, d_output.clone(), half))
        })
    }

    /// The weight half of [`Step::backward`], and of the loss if that was put off.
    pub(crate) fn backward_weight(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        mut saved: Saved,
        d_output: &Tensor,
        of_loss: Option<Saved>,
    ) -> Result<()> {
        let (model, pipeline) = (&self.replica.model, &self.replica.pipeline);
        let mut units = self.units_of(&blocks);
        if of_loss.is_some() {
            units.extend(pipeline.units_of_objective(model));
        }
        self.begin_backward(at, &units)?;
        let stage = model.stage(blocks);
        self.timed(span::BACKWARD, |step| {
            step.pass(Some(at), |cx| {
                if let Some(of_loss) = of_loss {
                    model.backward_weight_of_objective(cx, &of_loss)?;
                }
                stage.backward(cx, &mut saved, d_output.clone(), Half::Weight).map(|_| ())
            })
        })
    }

    /// Waits for a message.
    pub(crate) fn wait(&mut self, work: Work) -> Result<OpTimes> {
        Ok(self.hooks.track.record(span::EXPOSED, || work.wait())?)
    }

    /// Begins the part of a micro-batch's backward pass that writes the gradients of these units. If it is another micro-batch
    /// than before, ends the pass of that one, or puts its gradients aside if they are added up as a tree.
    fn begin_backward(&mut self, at: usize, units: &[UnitId]) -> Result<()> {
        let Replica { storage, compute, options, pipeline, .. } = self.replica;
        let is_new = self.backward.0 != Some(at);
        if is_new {
            if self.backward.0.is_some() {
                if self.hooks.strategy.reduces_every_pass() || !options.no_sync {
                    self.end_backward(false)?;
                }
                if !options.no_sync {
                    self.finish_gradients()?;
                }
            }
            self.backward = (Some(at), self.backward.1 + 1);
        }
        let readiness = &mut self.units.readiness;
        if !pipeline.is_alone {
            readiness.begin_pass(|unit| units.contains(&unit));
        } else if is_new {
            // Also the units that this pass leaves out.
            readiness.begin_pass(|_| true);
        }
        if options.no_sync && options.accumulation == AccumulationOrder::Sequential {
            return Ok(());
        }
        self.hooks.partial_sums.visit(compute, storage, readiness, at, units)
    }

    /// Lets the strategy end the synchronization of the gradients in place.
    fn finish_gradients(&mut self) -> Result<()> {
        let start_ns = self.hooks.track.begin(span::GRAD_SYNC);
        self.hooks.strategy.finish_gradients(self.replica, self.hooks.track)?;
        self.replica.pipeline.sum_tied(self.replica, self.hooks.track)?;
        self.hooks.track.end(span::GRAD_SYNC, start_ns);
        Ok(())
    }

    /// The units of some blocks.
    fn units_of(&self, blocks: &Range<usize>) -> Vec<UnitId> {
        self.replica.model.blocks[blocks.clone()].iter().map(|block| block.unit).collect()
    }

    /// Ends a backward pass whose gradients are reduced: announces the parameters that it has not used. Returns them.
    fn end_backward(&mut self, is_last: bool) -> Result<LeftOut> {
        self.hooks.is_last = is_last;
        let left_out = self.hooks.finish_left_out(&self.units.readiness)?;
        self.hooks.leaves_out = true;
        Ok(left_out)
    }

    /// Runs a part of a pass, with the hooks of the strategy.
    fn pass<T>(
        &mut self,
        at: Option<usize>,
        run: impl FnOnce(&mut Context) -> paceline_model::Result<T>,
    ) -> Result<T> {
        let Replica { compute, storage, .. } = self.replica;
        self.hooks.is_last = self.backward.1 == self.micro_batches.len();
        let mut cx = Context::resumed(compute, storage, &mut *self.units, &mut self.hooks);
        if let Some(at) = at {
            cx = cx.with_batch(&self.passed[at].batch);
        }
        Ok(run(&mut cx)?)
    }

    /// Records a span of the main track, and ends the phase of memory of the same name.
    fn timed<T>(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if self.hooks.later.is_some() {
            return run(self);
        }
        let start_ns = self.hooks.track.begin(name);
        let outcome = run(self)?;
        self.hooks.track.end(name, start_ns);
        self.replica.compute.allocator.end_phase(name);
        Ok(outcome)
    }

    /// The number that the mean loss divides by: the samples or tokens of all ranks in this step.
    fn count_of_all(&mut self) -> Result<usize> {
        let count = match std::mem::replace(&mut self.count, Count::Known(0)) {
            Count::Known(count) => count,
            Count::Travels(work) => {
                self.hooks.track.record(span::EXPOSED, || work.wait())?;
                // Targets may be left out by all ranks.
                (self.replica.sums.read::<f64>()?[0] as usize).max(1)
            }
        };
        self.count = Count::Known(count);
        Ok(count)
    }

    /// Starts the all-reduce of the sums of the loss, if the loss is shared.
    fn send_sums(&mut self) -> Result<()> {
        // The count travels in the same memory.
        self.count_of_all()?;
        let Replica { world, own_sums, loss_sums, asks_to_stop, .. } = self.replica;
        let stop = f64::from(u8::from(*asks_to_stop));
        loss_sums.slice(0..2)?.copy_from(&own_sums.slice(0..2)?)?;
        loss_sums.slice(2..3)?.overwrite::<f64, _>(|last| last[0] = stop)?;
        let mut work = None;
        if self.hooks.is_shared {
            let world = world.for_purpose(Purpose::Loss);
            work = Some(world.all_reduce_async(loss_sums, ReduceOp::Sum)?);
        }
        self.pending = Some(work);
        Ok(())
    }

    /// Ends the step. Returns the loss, the parameters that were left out, and the number of this rank's samples.
    fn finish(mut self, Passed { left_out, later }: Passed) -> Result<(StepLoss, LeftOut, usize)> {
        if self.pending.is_none() {
            self.send_sums()?;
        }
        let count = self.count_of_all()?;
        for id in later {
            self.hooks.track.mark(span::GRADIENT_READY, id.0);
            self.hooks.strategy.gradient_ready(self.replica, self.hooks.track, id)?;
        }
        let (replica, is_shared) = (self.replica, self.hooks.is_shared);
        self.finish_gradients()?;
        if !replica.options.no_sync {
            let grads = replica.storage.grads().tensor();
            let add = || self.hooks.partial_sums.add_to(&replica.compute, grads, 0);
            self.hooks.track.record(span::GRAD_SYNC, add)?;
        }
        if let Some(work) = self.pending.take().flatten() {
            let start_ns = now_ns();
            self.hooks.track.record(span::EXPOSED, || work.wait())?;
            replica.ends_barrier(start_ns, self.hooks.track);
        }
        let (mut num_samples, mut own_count, mut own_tokens) = (0, 0, 0);
        for MicroBatch { batch, .. } in self.micro_batches {
            num_samples += batch.num_samples();
            own_count += replica.model.objective.count(batch)?;
            own_tokens += batch.num_tokens()?;
        }
        // All stages of a pipeline have these samples, and the one with their loss counts them.
        let counted = usize::from(replica.pipeline.has_last_stage());
        let sums = replica.loss_sums.to_host()?;
        let sums = sums.read::<f64>()?;
        let all = |batch: &MicroBatch| batch.global_count;
        let (count, samples) = if is_shared {
            (count, self.micro_batches.iter().map(all).sum())
        } else {
            (own_count * counted, num_samples * counted)
        };
        let loss = StepLoss {
            // If the loss is not shared, this rank may have had no sample.
            loss: sums[0] / count.max(1) as f64,
            correct: sums[1],
            count,
            samples,
            own_tokens: own_tokens * counted,
            is_shared,
            local_sum: replica.own_sums.to_host()?.read::<f64>()?[0],
            stops: sums[2] > 0.0,
        };
        Ok((loss, left_out, num_samples))
    }
}

/// The number that the mean loss divides by: the samples or tokens of all ranks in the micro-batches of a step.
enum Count {
    Known(usize),
    /// The ranks add up their own, in the first of the sums that they share.
    Travels(Work),
}

impl Count {
    fn begin(replica: &Replica, micro_batches: &[MicroBatch], is_shared: bool) -> Result<Self> {
        let Replica { model, group, sums, .. } = replica;
        let objective = &model.objective;
        let of_all = |own: &MicroBatch| objective.count_of_all(&own.batch, own.global_count);
        if let Some(count) = micro_batches.iter().map(of_all).sum() {
            return Ok(Self::Known(count));
        }
        let mut own = 0;
        for micro_batch in micro_batches {
            own += objective.count(&micro_batch.batch)?;
        }
        if !is_shared {
            // As if all ranks had as many.
            return Ok(Self::Known(own.max(1) * group.world_size()));
        }
        let count = sums.slice(0..1)?;
        count.write::<f64>()?[0] = own as f64;
        Ok(Self::Travels(group.all_reduce_async(&count, ReduceOp::Sum)?))
    }
}
