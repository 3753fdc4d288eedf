//! The training step that all strategies share: it runs passes over blocks, and calls the strategy at the right moments.
//!
//! Input: a strategy, a replica with its state, and micro-batches. Output: the loss, and gradients that the strategy has
//! synchronized. A plan has the order of the passes. This file does not know how gradients are communicated.

mod passes;

use paceline_collectives::{Purpose, ReduceOp, Work};
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::GraphedWork;
use paceline_model::{OpenUnits, ParamId};
use paceline_schedule::Plan;
use paceline_trace::now_ns;
use serde::{Deserialize, Serialize};

use crate::accumulation::add_rows;
use crate::graphs::{GraphObstacle, Passed, StepPasses};
use crate::hooks::{PassLaunch, StepHooks};
use crate::{
    MicroBatch, Replica, Result, StepContext, StepState, Strategy, StrategyError, executor, span,
};

/// The loss of a training step over the whole batch. The same on every rank, except where noted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLoss {
    /// Mean loss over the samples or tokens of all ranks.
    pub loss: f64,
    /// Samples or tokens that were predicted correctly, on all ranks together.
    pub correct: f64,
    /// The samples or tokens of all ranks, by the objective, over which the mean is taken.
    pub count: usize,
    /// Samples of all ranks together.
    pub samples: usize,
    /// Tokens of this rank's samples; zero if the inputs are no tokens. Only the last stage of a pipeline counts them, so that
    /// the sum over all ranks has each token once.
    pub own_tokens: usize,
    /// Whether loss, correct, count and samples are those of all ranks, not only this rank's.
    pub is_shared: bool,
    /// Sum of the losses of this rank's samples.
    pub local_sum: f64,
    /// Whether any rank, or only this one if the loss is not shared, has asked to stop after this step; see
    /// [`Asks::to_stop`](crate::Asks::to_stop).
    pub stops: bool,
    /// The same for [`Asks::to_regroup`](crate::Asks::to_regroup).
    pub regroups: bool,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stepped {
    /// The loss before the update.
    pub loss: StepLoss,
    /// The norm of the gradients before they were scaled down, if [`Trainer::max_norm`](crate::Trainer::max_norm) is set or the loss is scaled.
    pub grad_norm: Option<f64>,
    /// Whether the parameters were updated: not if the loss or the norm is not finite.
    pub is_updated: bool,
}

/// Computes the gradients of a batch, given as this rank's shares of its micro-batches, and synchronizes
/// them after the last micro-batch. As in PyTorch's `no_sync`, the gradients of the others are added up on this rank, in
/// the order of [`ReplicaOptions`](crate::ReplicaOptions). Without that option the
/// gradients of each micro-batch are synchronized, and added up afterwards.
///
/// Every sample or token has the same weight, however unevenly the batch is divided: each rank's gradient is
/// scaled by `world_size / count of all ranks`. The sums of the loss travel while the backward pass runs.
///
/// If the objective does not know the count of all ranks before ([`Objective::count_of_all`](
/// paceline_model::Objective::count_of_all)), the ranks add up their own: one more all-reduce, of 8 bytes, during the
/// forward pass. In a step whose loss is not shared, a rank then divides by its own count.
///
/// With [`ReplicaOptions::as_graph`](crate::ReplicaOptions::as_graph) the passes are one piece of work of a card from the third step
/// with micro-batches of the same shapes and the same factor of the loss. Gradients are communicated after it, or as a part of it
/// ([`Strategy::is_capturable`]).
///
/// [`Strategy::optimizer_step`] follows. After a step that has failed, the next one starts with clean
/// gradients and no communication in flight; running statistics, and what a lossy strategy keeps from step to step, are not taken back.
pub fn train_step(
    strategy: &mut dyn Strategy,
    cx: &mut StepContext,
    micro_batches: &[MicroBatch],
) -> Result<StepLoss> {
    let plan = cx.plan(micro_batches.len())?;
    let mut graph = graph_of_step(strategy, cx, micro_batches)?;
    let (samples, graphed) = match &mut graph {
        Some(StepPasses { batches, work, number, num_runs, .. }) => {
            (&batches[..], Some((work, [*number, *num_runs])))
        }
        None => (micro_batches, None),
    };
    let mut step = TrainStep::open(strategy, cx.reborrow(), micro_batches, samples)?;
    let passed = match graphed {
        Some((work, launch)) => step.forward_and_backward_as_graph(&plan, work, launch)?,
        None => step.forward_and_backward(&plan)?,
    };
    if !matches!(step.loss, LossOfAll::InGraph) {
        step.combine_gradients(&passed.deferred)?;
    }
    let loss = step.receive_loss()?;
    let num_samples = micro_batches.iter().map(|own| own.batch.num_samples()).sum();
    let left_out = cx.replica.options.static_graph.then_some(passed.left_out);
    cx.state.end_step(num_samples, left_out, graph);
    Ok(loss)
}

/// The graph of the passes, if they are launched as one.
fn graph_of_step(
    strategy: &dyn Strategy,
    cx: &mut StepContext,
    micro_batches: &[MicroBatch],
) -> Result<Option<StepPasses>> {
    let StepState { graphs, loss_scale, synchronizes, .. } = &mut *cx.state;
    let Some(graphs) = graphs else { return Ok(None) };
    GraphObstacle::check(strategy, &cx.replica.options, false, micro_batches.len())?;
    let is_shared = *synchronizes && strategy.shares_loss();
    graphs.of_step(cx.replica, micro_batches, *loss_scale, is_shared)
}

pub(crate) struct TrainStep<'a> {
    /// The hooks of all passes, with the strategy.
    hooks: StepHooks<'a>,
    micro_batches: &'a [MicroBatch],
    /// The same samples where the passes take them from: at fixed addresses, if the passes are a graph.
    pub(crate) samples: &'a [MicroBatch],
    units: OpenUnits,
    /// The number of samples or tokens of all ranks.
    count: SampleCount,
    /// The number of micro-batches whose loss is computed.
    num_losses: usize,
    /// The micro-batch whose backward pass has begun last.
    current: Option<usize>,
    /// How many times a backward pass has begun after that of another micro-batch.
    num_backward: usize,
    loss: LossOfAll,
}

/// The sums of the loss over all ranks.
enum LossOfAll {
    /// This rank has not added its own yet.
    Open,
    /// Each rank knows only its own.
    Own,
    Travels(Work),
    /// The graph of the passes adds them up.
    InGraph,
}

impl<'a> TrainStep<'a> {
    /// Begins a step, which counts as one of the strategy's.
    fn open(
        strategy: &'a mut dyn Strategy,
        mut cx: StepContext<'a>,
        micro_batches: &'a [MicroBatch],
        samples: &'a [MicroBatch],
    ) -> Result<Self> {
        if let Some(most) = strategy.max_micro_batches().filter(|most| micro_batches.len() > *most)
        {
            return Err(StrategyError::Setting(format!(
                "{} was made for steps of at most {most} micro-batches, not {}: see ShardOptions::max_micro_batches",
                strategy.name(),
                micro_batches.len()
            )));
        }
        if cx.state.synchronizes {
            strategy.begin_gradients(&mut cx)?;
        }
        let mut hooks = StepHooks::new(strategy, cx);
        let is_shared = hooks.is_shared;
        let StepContext { replica, state, track } = &mut hooks.cx;
        if replica.options.broadcast_buffers && is_shared {
            replica.broadcast_buffers(0, track)?;
        }
        let count = SampleCount::begin(replica, state, micro_batches, is_shared)?;
        let units = OpenUnits::new(&replica.model.layout);
        Ok(Self {
            hooks,
            micro_batches,
            samples,
            units,
            count,
            num_losses: 0,
            current: None,
            num_backward: 0,
            loss: LossOfAll::Open,
        })
    }

    fn forward_and_backward(&mut self, plan: &Plan) -> Result<Passed> {
        let replica = self.replica();
        let num_passes = self.micro_batches.len();
        let reduces_each = self.reduces_each();
        let state = &mut *self.hooks.cx.state;
        let mut first = 0;
        if replica.options.is_one_tree() {
            state.sums.hold_rows(&replica.compute, num_passes)?;
            let has_samples = |of: &MicroBatch| of.batch.num_samples() > 0;
            first = self.micro_batches.iter().position(has_samples).unwrap_or(0);
        }
        state.sums.own.fill_zero()?;
        state.partial_sums.begin_step(first..num_passes);
        self.units.begin_step(num_passes, reduces_each);
        self.pass(None, |cx| cx.open_roots())?;
        if !replica.pipeline.has_last_stage() {
            // It takes part in the sum with zeros. At the end, all ranks would wait for it.
            self.send_loss()?;
        }
        executor::run(self, plan)?;
        // A step may be without micro-batches.
        if !self.defers() {
            self.send_loss()?;
        }
        self.hooks.is_last = true;
        let left_out = self.hooks.end_backward(&self.units.readiness)?;
        self.pass(None, |cx| cx.close_roots())?;
        let deferred = match &self.hooks.launch {
            PassLaunch::Graph(deferred) => deferred.clone(),
            PassLaunch::ByWork | PassLaunch::GraphThatSends => Vec::new(),
        };
        Ok(Passed { left_out, deferred })
    }

    /// The same as a graph, or captured for one. Its parts have no times of their own. `launch` has the numbers of the graph and of
    /// the launch.
    fn forward_and_backward_as_graph(
        &mut self,
        plan: &Plan,
        work: &mut GraphedWork<Passed>,
        launch: [u32; 2],
    ) -> Result<Passed> {
        let replica = self.replica();
        let StepHooks { strategy, is_shared, .. } = &self.hooks;
        let sends = *is_shared && strategy.is_capturable() && replica.sends_in_graph();
        if sends && launch[1] > 0 {
            let agree = || replica.world.agree_on_graph(launch[0], launch[1]);
            self.hooks.cx.track.record(span::EXPOSED, agree)?;
        }
        let start_ns = self.hooks.cx.track.begin(span::BACKWARD);
        if sends {
            // The graph has no copy from the host.
            self.write_asks()?;
            self.hooks.launch = PassLaunch::GraphThatSends;
        } else {
            self.hooks.launch = PassLaunch::Graph(Vec::new());
        }
        let passed = work.run(|| {
            let passed = self.forward_and_backward(plan)?;
            if sends {
                self.combine_gradients(&[])?;
                if let LossOfAll::Travels(work) = &self.loss {
                    self.hooks.cx.wait(work)?;
                }
            }
            Ok::<_, StrategyError>(passed)
        })?;
        self.hooks.launch = PassLaunch::ByWork;
        if sends {
            self.loss = LossOfAll::InGraph;
        }
        self.hooks.cx.track.end(span::BACKWARD, start_ns);
        self.replica().compute.allocator.end_phase(span::BACKWARD);
        Ok(passed)
    }

    /// Announces the gradients that have become final in a graph. Then ends the synchronization of the gradients,
    /// and adds up those of the micro-batches, if each was synchronized.
    fn combine_gradients(&mut self, deferred: &[ParamId]) -> Result<()> {
        self.send_loss()?;
        deferred.iter().try_for_each(|id| self.hooks.announce(*id))?;
        self.finish_gradients()?;
        let Replica { options, storage, compute, .. } = self.replica();
        if !options.no_sync {
            let StepContext { state, track, .. } = &mut self.hooks.cx;
            let add = || state.partial_sums.add_to(compute, storage.grads().tensor(), 0);
            track.record(span::GRAD_SYNC, add)?;
        }
        Ok(())
    }

    /// Waits for the sums of the loss over all ranks.
    fn receive_loss(&mut self) -> Result<StepLoss> {
        let count = self.count_of_all()?;
        let Replica { model, world, compute, .. } = self.replica();
        match &self.loss {
            LossOfAll::Travels(work) => {
                let start_ns = now_ns();
                self.hooks.cx.wait(work)?;
                self.hooks.cx.end_barrier(start_ns);
            }
            LossOfAll::InGraph => world.await_graph(&compute.allocator)?,
            LossOfAll::Open | LossOfAll::Own => {}
        }
        let (mut num_samples, mut own_count, mut own_tokens) = (0, 0, 0);
        for MicroBatch { batch, .. } in self.micro_batches {
            num_samples += batch.num_samples();
            own_count += model.objective.count(batch)?;
            own_tokens += batch.num_tokens()?;
        }
        // All stages of a pipeline have these samples, and all ranks that divide layers. One of them counts them.
        let counted = usize::from(self.replica().counts_samples());
        let is_shared = self.hooks.is_shared;
        let (count, samples) = if is_shared {
            (count, self.micro_batches.iter().map(|of| of.global_count).sum())
        } else {
            (own_count * counted, num_samples * counted)
        };
        let sums = &self.hooks.cx.state.sums;
        let of_all = sums.of_all.to_host()?;
        let of_all = of_all.read::<f64>()?;
        Ok(StepLoss {
            // If the loss is not shared, this rank may have had no sample.
            loss: of_all[0] / count.max(1) as f64,
            correct: of_all[1],
            count,
            samples,
            own_tokens: own_tokens * counted,
            is_shared,
            local_sum: sums.own.to_host()?.read::<f64>()?[0] * counted as f64,
            stops: of_all[2] > 0.0,
            regroups: of_all[3] > 0.0,
        })
    }

    pub(crate) fn replica(&self) -> &'a Replica {
        self.hooks.cx.replica
    }

    pub(crate) fn cx(&mut self) -> &mut StepContext<'a> {
        &mut self.hooks.cx
    }

    /// Whether the gradients of each micro-batch are reduced.
    fn reduces_each(&self) -> bool {
        self.hooks.strategy.reduces_every_pass() || !self.replica().options.no_sync
    }

    /// Whether the passes are a graph, or are captured for one.
    fn is_graph(&self) -> bool {
        !matches!(self.hooks.launch, PassLaunch::ByWork)
    }

    /// Whether nothing is sent before the passes have ended.
    fn defers(&self) -> bool {
        matches!(self.hooks.launch, PassLaunch::Graph(_))
    }

    /// Lets the strategy begin to synchronize gradients, unless the step does not.
    fn begin_gradients(&mut self) -> Result<()> {
        let StepHooks { strategy, cx, .. } = &mut self.hooks;
        if cx.state.synchronizes { strategy.begin_gradients(cx) } else { Ok(()) }
    }

    /// Ends the synchronization of the gradients in place.
    fn finish_gradients(&mut self) -> Result<()> {
        let StepHooks { strategy, cx, .. } = &mut self.hooks;
        let start_ns = cx.track.begin(span::GRAD_SYNC);
        if cx.state.synchronizes {
            strategy.finish_gradients(cx)?;
        }
        cx.replica.pipeline.sum_tied(cx)?;
        cx.track.end(span::GRAD_SYNC, start_ns);
        Ok(())
    }

    /// The number that the mean loss divides by.
    fn count_of_all(&mut self) -> Result<usize> {
        let count = match &self.count {
            SampleCount::Known(count) => *count,
            SampleCount::Travels(work) => {
                self.hooks.cx.wait(work)?;
                // Targets may be left out by all ranks.
                (self.hooks.cx.state.sums.on_host.read::<f64>()?[0] as usize).max(1)
            }
        };
        self.count = SampleCount::Known(count);
        Ok(count)
    }

    /// Writes whether this rank asks to stop, or to meet again, to the sums that the ranks share.
    fn write_asks(&self) -> Result<()> {
        let StepState { sums, asks, .. } = &*self.hooks.cx.state;
        let asks = [asks.to_stop, asks.to_regroup].map(|asks| f64::from(u8::from(asks)));
        Ok(sums.of_all.slice(2..4)?.overwrite::<f64, _>(|last| last.copy_from_slice(&asks))?)
    }

    /// Starts the all-reduce of the sums of the loss, if it is shared and has not started.
    fn send_loss(&mut self) -> Result<()> {
        if !matches!(self.loss, LossOfAll::Open) {
            return Ok(());
        }
        // The count travels in the same memory.
        self.count_of_all()?;
        let StepContext { replica: Replica { world, compute, options, .. }, state, .. } =
            &self.hooks.cx;
        let (own, of_all) = (&state.sums.own, &state.sums.of_all);
        if options.is_one_tree() {
            add_rows(compute, own, state.partial_sums.leaves(), SUMS_LEN)?;
        }
        if self.replica().counts_samples() {
            of_all.slice(0..2)?.copy_from(&own.slice(0..2)?)?;
        } else {
            of_all.slice(0..2)?.fill_zero()?;
        }
        if !matches!(self.hooks.launch, PassLaunch::GraphThatSends) {
            self.write_asks()?;
        }
        self.loss = if self.hooks.is_shared {
            let world = world.for_purpose(Purpose::Loss);
            LossOfAll::Travels(world.all_reduce_async(of_all, ReduceOp::Sum)?)
        } else {
            LossOfAll::Own
        };
        Ok(())
    }
}

/// The number that the mean loss divides by: the samples or tokens of all ranks in the micro-batches of a step.
enum SampleCount {
    Known(usize),
    /// The ranks add up their own, in the first of the sums that they share.
    Travels(Work),
}

impl SampleCount {
    fn begin(
        replica: &Replica,
        state: &StepState,
        micro_batches: &[MicroBatch],
        is_shared: bool,
    ) -> Result<Self> {
        let Replica { model, group, .. } = replica;
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
        let count = state.sums.on_host.slice(0..1)?;
        count.write::<f64>()?[0] = own as f64;
        Ok(Self::Travels(group.all_reduce_async(&count, ReduceOp::Sum)?))
    }
}
