//! The training loop, from top to bottom: a run is a loop over epochs, an epoch one over steps.
//!
//! It does not depend on whether the ranks are threads or processes.

use std::path::PathBuf;
use std::time::Instant;

use paceline_checkpoint::progress::{Best, Evaluation, LossScaling, Progress, TestResult};
use paceline_collectives::{Group, ReduceOp};
use paceline_failure::{Failure, Result};
use paceline_host::resources::cpu_times::CpuTimes;
use paceline_host::streams;
use paceline_host::text::plural;
use paceline_launch::device::Device;
use paceline_observe::figures::event::{Event, Save, StepDone};
use paceline_observe::record::times::StepTimes;
use paceline_settings::config::TrainConfig;
use paceline_settings::open_data::OpenData;
use paceline_strategies::{Exactness, Replica, StepLoss, Stepped, SyncBlocks, Trainer};
use paceline_trace::{Span, now_ns};

use crate::batches::BatchStream;
use crate::saving::Saving;
use crate::setup::{self, Host, RankRun};
use crate::step::{self, StepOutcome};
use crate::to_device::Loaded;
use crate::training::{TrainedUntil, Training, batches_of_step};
use crate::{equality, evaluation, sample, staging, watch};

/// Trains as one rank of `world`, which is arranged as the mesh of the configuration. Rank 0 writes to the console and to the
/// folder of `make_folder`, if any. All ranks end after the same step if one of them is asked to stop.
pub fn run_rank(
    config: &TrainConfig,
    data: OpenData,
    world: Group,
    local_rank: usize,
    make_folder: impl FnOnce() -> Result<Option<PathBuf>>,
    host: Host,
) -> Result<()> {
    let begin = Instant::now();
    let placements = setup::compare(config, &data, &world, local_rank)?;
    let chosen = staging::choose(config, &data, &world)?;
    let config = chosen.as_ref().unwrap_or(config);
    let (mut of_rank, stream, progress) =
        setup::begin(config, data, world, &placements, make_folder, host, None)?;
    let mut run = Training::new(progress, config.total_steps());
    of_rank.train_to_end(stream, &mut run, begin).map(drop)
}

/// A run fails after so many skipped steps in a row, whose gradients overflowed. A scale is halved 16 times from 65536 to 1, so
/// the rest were skipped with the smallest scale, or with one that does not change.
const MAX_SKIPPED_IN_A_ROW: u64 = 50;

impl RankRun<'_> {
    /// Trains from where the run is, checks and reports the result.
    pub(crate) fn train_to_end(
        &mut self,
        stream: BatchStream,
        run: &mut Training,
        begin: Instant,
    ) -> Result<TrainedUntil> {
        self.train(stream, run).map_err(|failure| self.noted(failure))?;
        if run.regroups.are_due {
            // No gather is on its way when the ranks leave each other.
            self.trainer.sync_replicas()?;
            return Ok(TrainedUntil::Regroup);
        }
        if run.is_stopped {
            return self.end_early(begin, run).map(|()| TrainedUntil::Over);
        }
        let checked = check_weights(&self.trainer, &self.exactness, run.progress.steps);
        checked.map_err(|failure| self.noted(failure))?;
        let evaluated = self.evaluate_at_end(run)?;
        self.finish(begin, run, evaluated, None)?;
        if self.member.is_some() {
            // Another rank 0 would have to finish if this one died before it has written everything.
            let world = &self.trainer.replica.world;
            let all_know = world.barrier();
            if world.rank() > 0 {
                all_know?;
            }
        }
        Ok(TrainedUntil::Over)
    }

    fn train(&mut self, mut stream: BatchStream, run: &mut Training) -> Result<()> {
        self.tell_early_stop(&run.progress)?;
        while run.after.is_some() || self.goes_on(run) {
            self.epoch(&mut stream, run)?;
        }
        if run.regroups.are_due {
            return Ok(());
        }
        let threads = self.config.world_size * self.config.threads;
        run.cpu.pct = CpuTimes::waited_pct(run.cpu.begin, threads);
        self.listeners.tell(Event::TrainingEnded(&self.trainer.replica.world))
    }

    /// Makes the steps of an epoch, or those that are left of it, and saves if that is due.
    fn epoch(&mut self, stream: &mut BatchStream, run: &mut Training) -> Result<()> {
        let epoch = run.after.map_or(run.progress.position.epoch, |after| after.epoch);
        let begin = Instant::now();
        self.listeners.tell(Event::EpochBegun { epoch })?;
        let mut ended = None;
        while ended.is_none() && (run.after.is_some() || self.goes_on(run)) {
            if run.after.is_none() {
                self.step(stream, run)?;
            }
            ended = run.after.and_then(|after| after.ended);
            self.between_steps(run, epoch, ended.is_some())?;
            if ended.is_none() {
                run.after = None;
            }
        }
        if ended.is_none() && run.regroups.are_due {
            return Ok(());
        }
        self.trainer.sync_replicas()?;
        let sums = ended.unwrap_or(run.progress.epoch);
        let cut_after = ended.is_none().then_some(run.progress.position.batch);
        let (took, has_classes) = (begin.elapsed(), self.has_classes());
        self.listeners.tell(Event::EpochEnded { epoch, sums, has_classes, cut_after, took })?;
        run.last = Some((epoch, sums));
        let every = self.config.checkpoints.save_every;
        let is_last = run.is_stopped || self.is_over(&run.progress);
        if every.is_none() || is_due(every, run.progress.steps) || is_last {
            self.save(&run.progress, is_last)?;
        }
        run.after = None;
        Ok(())
    }

    /// Loads the batches of a step, makes it and reports it.
    fn step(&mut self, stream: &mut BatchStream, run: &mut Training) -> Result<()> {
        let (config, number, before) = (self.config, run.num_steps, run.progress);
        let Replica { world, group, compute, .. } = &self.trainer.replica;
        if number == config.warmup_steps as u64 {
            compute.allocator.forget_phases();
            run.cpu.begin = CpuTimes::now();
        }
        self.listeners.tell(Event::StepBegun { number, group: world, compute })?;
        // Operations outside of steps (rendezvous, checkpoints, evaluation) do not count for any step.
        run.meter.forget(group);
        self.trainer.track.clear();
        let (epoch, asked_ns) = (before.position.epoch, now_ns());
        run.regroups.asked_ns = asked_ns;
        let num_batches = batches_of_step(config, &before);
        let is_there = self.inputs.to_device.has_next();
        let now = (!is_there).then(|| stream.step(epoch, num_batches)).transpose()?;
        let next = self.next_step(&before, num_batches);
        let next = next.map(|(epoch, count)| stream.step(epoch, count)).transpose()?;
        let waited = Span { start_ns: asked_ns, end_ns: now_ns() };

        let state = &mut self.trainer.state;
        state.asks.to_stop = self.stop.signal().is_some();
        state.asks.to_regroup = self.member.as_ref().is_some_and(|member| member.is_asked());
        state.loss_scale = before.scaling.map_or(1.0, |of| of.scale);
        let synchronizes = |blocks: SyncBlocks| blocks.is_synchronized(number as usize);
        state.synchronizes = self.sync_blocks.is_none_or(synchronizes);
        let (steps, lr) = (before.steps + 1, config.lr(before.steps));
        state.observer().iter_mut().for_each(|of| of.begin_step(steps));
        self.trainer.track.mark_begin(format_args!("step {steps}"));
        let Some(outcome) = self.inputs.step(&mut self.trainer, Loaded { now, next }, lr)? else {
            return Err(Failure::Run(format!("no rank has data in epoch {}", epoch + 1)));
        };
        self.trainer.track.mark_end();
        // At once, since the weights are those after the step: no failure of others may come between.
        run.advance(config, num_batches, outcome.samples, &outcome.stepped);
        if let Some(ranks) = watch::passes(&mut self.trainer, outcome.stepped.grad_norm)? {
            self.listeners.tell(Event::Passes(steps, &ranks))?;
        }
        step::stop_if_not_finite(&self.trainer, steps, lr, &outcome.stepped)?;

        let (loss, is_over) = (&outcome.stepped.loss, self.is_over(&run.progress));
        let has_ended = run.after.is_some_and(|after| after.ended.is_some());
        // After the last step there is nothing left to stop.
        run.is_stopped = self.agree_to_stop(loss, has_ended)? && !is_over;
        run.regroups.are_due = loss.regroups && !is_over;
        let batches = before.position.batch + num_batches;
        self.report_step(run, &outcome, lr, waited, epoch, batches)
    }

    /// Measures the last step and informs the listeners. `waited` is the wait for its data; `batches` of its epoch are done.
    fn report_step(
        &mut self,
        run: &mut Training,
        outcome: &StepOutcome,
        lr: f64,
        waited: Span,
        epoch: u64,
        batches: usize,
    ) -> Result<()> {
        let &StepOutcome { ref stepped, whole, ref device, .. } = outcome;
        let &Stepped { ref loss, grad_norm, is_updated } = stepped;
        let (number, has_classes) = (run.num_steps - 1, self.has_classes());
        let Trainer { replica, state, track, optimizer, .. } = &self.trainer;
        let compare = || watch::compare(replica, optimizer, &self.exactness, run.progress.steps);
        let digests = if is_updated { compare()? } else { None };
        run.meter.read(&replica.group);
        // A device carries out work later than the host asks for it.
        let has_ledger = self.config.pipeline.is_some() && self.config.device == Device::Cpu;
        let actions = if has_ledger { state.actions() } else { &[] };
        let counted = (number >= self.config.warmup_steps as u64).then_some(actions);
        let times = run.meter.times(whole, waited.len_ns(), device, track, counted);
        if counted.is_some() {
            run.steps.push(number, &times, loss);
        }
        self.listeners.tell(Event::Step(&StepDone {
            number,
            steps: run.progress.steps,
            epoch,
            batches,
            loss,
            has_classes,
            lr,
            grad_norm: grad_norm.filter(|norm| norm.is_finite()),
            scaling: run.progress.scaling,
            asked_ns: waited.start_ns,
            whole,
            times,
            track,
            records: run.meter.records(),
            actions,
            group: &replica.world,
            compute: &replica.compute,
            digests: digests.as_deref(),
        }))?;
        run.regroups.reported = run.progress.steps;
        Ok(())
    }

    /// Reports the last step if the listeners do not know it: this rank has completed it alone after others were lost, or rank 0
    /// was lost before it wrote of it. It has taken until now.
    pub(crate) fn report_completed(&mut self, run: &mut Training) -> Result<()> {
        let Some(Stepped { loss, grad_norm, .. }) = &run.regroups.stepped else { return Ok(()) };
        if run.regroups.reported + 1 != run.progress.steps {
            return Ok(());
        }
        let batches = match run.progress.position.batch {
            0 => self.config.steps_per_epoch,
            batch => batch,
        };
        let has_classes = self.has_classes();
        let whole = Span { start_ns: run.regroups.asked_ns, end_ns: now_ns() };
        let Trainer { replica, track, .. } = &self.trainer;
        self.listeners.tell(Event::Step(&StepDone {
            number: run.num_steps - 1,
            steps: run.progress.steps,
            epoch: run.progress.last_epoch(),
            batches,
            loss,
            has_classes,
            lr: self.config.lr(run.progress.steps - 1),
            grad_norm: grad_norm.filter(|norm| norm.is_finite()),
            scaling: run.progress.scaling,
            asked_ns: run.regroups.asked_ns,
            whole,
            times: StepTimes { step: whole.len_ns(), ..StepTimes::default() },
            track,
            records: &[],
            actions: &[],
            group: &replica.world,
            compute: &replica.compute,
            digests: None,
        }))?;
        run.regroups.reported = run.progress.steps;
        Ok(())
    }

    /// Evaluates, makes a text and saves after a step, each if it is due.
    fn between_steps(&mut self, run: &mut Training, epoch: u64, is_epoch_over: bool) -> Result<()> {
        let (config, steps) = (self.config, run.progress.steps);
        // A run that was asked to stop skips an evaluation that decides nothing.
        let decides = config.evaluation.early_stop.is_some() || self.saving_best.is_some();
        if is_due(config.evaluation.eval_every, steps) && (decides || !run.is_stopped) {
            // One that is repeated since ranks were lost afterward counts once.
            run.progress.best = run.after.map_or(run.progress.best, |after| after.best);
            self.evaluate_midway(&mut run.progress, epoch)?;
            self.tell_early_stop(&run.progress)?;
            // Nothing is left to stop if the run ends here.
            run.is_stopped &= !self.is_over(&run.progress);
        }
        self.stop_if_all_are_skipped(&run.progress)?;
        if is_due(config.evaluation.sample_every, steps)
            && !run.is_stopped
            && let Some(text) = sample::sample(self.texts.as_ref(), &mut self.trainer)?
        {
            self.listeners.tell(Event::Sampled { steps, text: &text })?;
        }
        // At the end of an epoch the replicas are synchronized and saved in any case.
        if is_due(config.checkpoints.save_every, steps) && !is_epoch_over && self.goes_on(run) {
            self.trainer.sync_replicas()?;
            self.save(&run.progress, false)?;
        }
        self.saving.as_mut().map_or(Ok(()), Saving::look)
    }

    fn goes_on(&self, run: &Training) -> bool {
        !run.is_stopped && !run.regroups.are_due && !self.is_over(&run.progress)
    }

    /// Whether the run has made its last step. Only configuration and progress decide, so a resumed run ends where an
    /// uninterrupted one does.
    fn is_over(&self, progress: &Progress) -> bool {
        let ends_early = progress.best.no_longer_falls(self.config.evaluation.early_stop).is_some();
        ends_early || progress.steps >= self.config.total_steps()
    }

    /// Fails if [`MAX_SKIPPED_IN_A_ROW`] steps in a row were skipped, or all steps of the run. All ranks skip the same steps, so they
    /// fail together.
    fn stop_if_all_are_skipped(&self, progress: &Progress) -> Result<()> {
        let Some(LossScaling { scale, skipped_in_a_row: count, .. }) = progress.scaling else {
            return Ok(());
        };
        let steps = progress.steps;
        if count < MAX_SKIPPED_IN_A_ROW && !(self.is_over(progress) && count == steps) {
            return Ok(());
        }
        let problem = format!(
            "the gradients of {} in a row overflowed, the last time in step {steps}",
            plural(count as usize, "step")
        );
        if self.trainer.replica.world.rank() > 0 {
            return Err(Failure::Consequence(problem));
        }
        let fix = if scale > 1.0 {
            "pass a smaller --loss-scale, or --precision bf16"
        } else {
            "pass --precision bf16 or f32, lower --lr, or look at the data"
        };
        let message = format!(
            "{problem}, so every rank skipped them and no weight has changed since; the loss scale is now {scale}: {fix}"
        );
        Err(Failure::NotFinite { step: steps, message })
    }

    /// Says why the run ends early, if it does.
    fn tell_early_stop(&mut self, progress: &Progress) -> Result<()> {
        let lowest = progress.best.no_longer_falls(self.config.evaluation.early_stop);
        let Some((best, best_steps)) = lowest else { return Ok(()) };
        self.listeners.tell(Event::EarlyStop { steps: progress.steps, best, best_steps })
    }

    /// The epoch and the number of batches of the step after the next one, which makes `num_batches`; `None` if there is none,
    /// or if its batches are not wanted yet.
    fn next_step(&self, progress: &Progress, num_batches: usize) -> Option<(u64, usize)> {
        let is_last = progress.steps + 1 >= self.config.total_steps();
        if is_last || !self.inputs.to_device.looks_ahead() {
            return None;
        }
        let position = progress.position;
        let left = self.config.steps_per_epoch - position.batch - num_batches;
        let (epoch, left) = match left {
            0 => (position.epoch + 1, self.config.steps_per_epoch),
            left => (position.epoch, left),
        };
        Some((epoch, self.config.strategy.accumulate.min(left)))
    }

    /// Whether all ranks stop after this step. The loss carries the answer; ranks that do not share it ask each other at the end
    /// of the epoch.
    fn agree_to_stop(&self, loss: &StepLoss, is_epoch_ended: bool) -> Result<bool> {
        if loss.is_shared {
            return Ok(loss.stops);
        }
        if !is_epoch_ended {
            return Ok(false);
        }
        let mut votes = [f64::from(u8::from(loss.stops))];
        self.trainer.replica.world.all_reduce_slice(&mut votes, ReduceOp::Sum)?;
        Ok(votes[0] > 0.0)
    }

    /// Leaves a note for the next run if this one fails on a number that is not finite.
    pub(crate) fn noted(&self, failure: Failure) -> Failure {
        if let (Failure::NotFinite { step, .. }, Some(saving)) = (&failure, &self.saving)
            && let Err(problem) = saving.note_not_finite(*step)
        {
            // The failure that is reported is the first one.
            streams::stderr()
                .line(&format!("warning: {problem}; a restart begins at the newest checkpoint"));
        }
        failure
    }

    /// Begins to write a checkpoint, if the run saves; the last one is complete on return. The replicas must be equal.
    fn save(&mut self, progress: &Progress, is_last: bool) -> Result<()> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let begin = Instant::now();
        check_weights(&self.trainer, &self.exactness, progress.steps)?;
        let (config, num_samples) = (self.config, self.num_samples);
        let waits = is_last || config.checkpoints.save_sync;
        saving.save(config, num_samples, &self.trainer, progress, waits)?;
        let (steps, epoch) = (progress.steps, progress.last_epoch());
        self.listeners.tell(Event::Saved(Save { steps, epoch, took: begin.elapsed() }))
    }

    /// Evaluates, informs the listeners, and saves the weights if the run keeps the best and these are better.
    fn evaluate_midway(&mut self, progress: &mut Progress, epoch: u64) -> Result<()> {
        self.trainer.sync_replicas()?;
        let Some(result) = self.evaluate()? else { return Ok(()) };
        let (steps, loss) = (progress.steps, result.sums.mean_loss());
        self.listeners.tell(Event::Evaluated(Evaluation {
            steps,
            epoch,
            result,
            is_final: false,
            is_repeated: false,
        }))?;
        if let Some(saving) = &mut self.saving_best
            && !self.kept_loss.is_some_and(|kept| kept <= loss)
        {
            check_weights(&self.trainer, &self.exactness, steps)?;
            // An earlier evaluation, whose weights were not kept, may have been lower.
            let best = Best { lowest: Some((loss, steps)), since: 0 };
            let of_best = Progress { best, ..*progress };
            saving.save(self.config, self.num_samples, &self.trainer, &of_best, true)?;
            self.kept_loss = Some(loss);
        }
        // Last, so that an evaluation which is interrupted can be repeated.
        progress.best.note(loss, steps);
        Ok(())
    }

    fn has_classes(&self) -> bool {
        self.trainer.replica.model.objective.classifies()
    }

    /// Loss and accuracy over the test set, if there is one.
    pub(crate) fn evaluate(&mut self) -> Result<Option<TestResult>> {
        let Some(test) = self.test.clone() else { return Ok(None) };
        let (strategy, mut cx) = self.trainer.parts();
        let batch = (self.config.global_batch_size, self.config.micro_batches.as_ref());
        let result = evaluation::evaluate(strategy, &mut cx, test, batch, None)?;
        // The time belongs to no step.
        cx.track.clear();
        Ok(Some(result))
    }
}

/// Checks the weights after `steps` steps: those that the strategy keeps equal must be, and all numbers must be finite.
fn check_weights(trainer: &Trainer, exactness: &Exactness, steps: u64) -> Result<()> {
    // First, because a number that is not finite on one rank only is a difference that no other rank would see.
    equality::check(&trainer.replica, exactness, steps)?;
    step::check_finite(trainer, steps)
}

/// Whether something done every so many steps is due after `steps` steps.
pub(crate) fn is_due(every: Option<u64>, steps: u64) -> bool {
    every.is_some_and(|every| steps.is_multiple_of(every))
}
