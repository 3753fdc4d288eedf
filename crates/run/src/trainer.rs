//! The training loop, from top to bottom.
//!
//! Every rank runs [`run_rank`] with its group; nothing here depends on whether the ranks are
//! threads or processes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use paceline_checkpoint::progress::{
    Best, EpochSums, Evaluation, LossScaling, Progress, TestResult,
};
use paceline_collectives::{Group, ReduceOp};
use paceline_data::{BatchShape, Dataset};
use paceline_failure::{Failure, Result};
use paceline_host::streams;
use paceline_host::text::plural;
use paceline_launch::device::Device;
use paceline_launch::stop::{StopRequest, left};
use paceline_memory::PhaseUsage;
use paceline_model::Model;
use paceline_observe::figures::event::{Event, Listeners, Save, StepDone};
use paceline_observe::figures::facts::{Facts, Outcome};
use paceline_observe::insight::flops;
use paceline_observe::insight::memory::Needs;
use paceline_observe::record::memory::RankMemory;
use paceline_observe::record::meter::Meter;
use paceline_observe::record::rank_report::RankReport;
use paceline_observe::record::steps::{AllSteps, StepLog};
use paceline_settings::config::TrainConfig;
use paceline_settings::open_data::OpenData;
use paceline_settings::origin::Resume;
use paceline_strategies::{Exactness, Replica, StepLoss, SyncBlocks};
use paceline_trace::now_ns;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::batches::BatchStream;
use crate::sample::{self, TextSampler};
use crate::saving::Saving;
use crate::setup::{self, Host};
use crate::staging::{self, unit_of};
use crate::step::{StepOutcome, Stepper};
use crate::to_device::Loaded;
use crate::{equality, evaluation};

/// Trains as one rank of `world`, which is arranged as the mesh of the configuration. Rank 0 writes to the console and to the
/// folder that `make_folder` returns, if it does. All ranks end after the same step if one of them is asked to stop.
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
    let memory = config.device.memory(host.allocator.clone(), host.local_rank)?;
    let host = Host { allocator: memory, ..host };
    setup::connect_cards(config, &world, &host.allocator)?;
    let agreed = setup::agree(config, world, &placements, make_folder, &host)?;
    let (mut trainer, stream, progress) = setup::build(config, data, agreed, host)?;
    let trained = trainer.train(stream, progress).map_err(|failure| trainer.noted(failure))?;
    let steps = progress.steps + trained.num_steps;
    if trained.is_stopped {
        return trainer.end_early(begin, trained, steps);
    }
    trainer.check_weights(steps)?;
    let evaluated = trainer.evaluate_at_end(&trained, &progress)?;
    trainer.finish(begin, trained, evaluated, None)
}

/// A run fails once this many steps in a row were skipped because their gradients overflowed. A scale is halved 16 times from
/// 65536 to 1, so the rest were skipped with the smallest scale, or with one that does not change.
const MAX_SKIPPED_IN_A_ROW: u64 = 50;

/// The result of training on this rank.
struct Trained {
    /// The measured steps.
    steps: StepLog,
    meter: Meter,
    /// Number of all steps, measured or not.
    num_steps: u64,
    /// The last epoch and its sums. If the run ended within an epoch, the sums of the part that was
    /// trained.
    last: Option<(u64, EpochSums)>,
    /// The loss scale at the end, if the loss is scaled.
    scaling: Option<LossScaling>,
    /// Whether the run has ended early because somebody asked for it.
    is_stopped: bool,
}

/// A rank that is ready to train ([`setup`]).
pub(crate) struct Trainer<'a> {
    pub(crate) config: &'a TrainConfig,
    /// Number of training samples.
    pub(crate) num_samples: usize,
    /// The fields of a sample.
    pub(crate) samples: BatchShape,
    /// The most floating-point operations per second that this rank can make.
    pub(crate) peak_flops_per_s: f64,
    pub(crate) stepper: Stepper,
    /// The model of all stages of a pipeline.
    pub(crate) whole: Option<Model>,
    /// The guarantee of the strategy about the weights.
    pub(crate) exactness: Exactness,
    /// The memory after initialization.
    pub(crate) initialization: PhaseUsage,
    /// On rank 0: the memory that the ranks need by prediction.
    pub(crate) predicted: Needs,
    pub(crate) listeners: Listeners<'a>,
    /// The test set, if the run evaluates.
    pub(crate) test: Option<Arc<dyn Dataset>>,
    /// Writes this rank's part of checkpoints, if the run saves.
    pub(crate) saving: Option<Saving>,
    /// The same for the best weights, if the run keeps them.
    pub(crate) saving_best: Option<Saving>,
    /// The loss of the best weights that are kept. Decides which weights are written there, and nothing about the run.
    pub(crate) kept_loss: Option<f64>,
    /// On rank 0: makes texts, if the run does.
    pub(crate) texts: Option<TextSampler>,
    pub(crate) stop: StopRequest,
    pub(crate) is_launched: bool,
}

impl Trainer<'_> {
    /// Makes all steps of the run, epoch after epoch.
    fn train(&mut self, mut stream: BatchStream, mut progress: Progress) -> Result<Trained> {
        let config = self.config;
        let mut meter = Meter::new();
        let mut steps = StepLog::new(config.total_steps());
        let mut last = None;
        let mut made = 0;
        let mut is_stopped = false;
        let sync_blocks = config.strategy.sync_blocks.map(SyncBlocks::new).transpose()?;
        self.tell_early_stop(&progress)?;
        while !self.is_over(&progress) && !is_stopped {
            let epoch = progress.position.epoch;
            let epoch_begin = Instant::now();
            self.listeners.tell(Event::EpochBegun { epoch })?;
            let mut ended = None;
            while ended.is_none() && !self.is_over(&progress) && !is_stopped {
                let Replica { world, group, compute, .. } = &self.stepper.replica;
                if made == config.warmup_steps as u64 {
                    compute.allocator.forget_phases();
                }
                self.listeners.tell(Event::StepBegun { number: made, group: world })?;
                // Operations outside of steps (rendezvous, checkpoints, evaluation) do not count for any
                // step.
                meter.forget(group);
                self.stepper.track.clear();
                let asked_ns = now_ns();
                let num_left = config.steps_per_epoch - progress.position.batch;
                let num_batches = config.strategy.accumulate.min(num_left);
                let is_there = self.stepper.to_device.has_next();
                let now = (!is_there).then(|| stream.step(epoch, num_batches)).transpose()?;
                let next = self.next_step(&progress, num_batches);
                let next = next.map(|(epoch, count)| stream.step(epoch, count)).transpose()?;
                let data_ns = now_ns() - asked_ns;

                let state = &mut self.stepper.state;
                state.asks_to_stop = self.stop.signal().is_some();
                state.loss_scale = progress.scaling.map_or(1.0, |of| of.scale);
                state.synchronizes =
                    sync_blocks.is_none_or(|blocks| blocks.is_synchronized(made as usize));
                let lr = config.lr(progress.steps);
                self.stepper.track.mark_begin(format_args!("step {}", progress.steps + 1));
                let Some(outcome) = self.stepper.step(Loaded { now, next }, lr)? else {
                    return Err(Failure::Run(format!("no rank has data in epoch {}", epoch + 1)));
                };
                self.stepper.track.mark_end();
                self.stepper.stop_if_not_finite(progress.steps + 1, lr, &outcome)?;
                let StepOutcome { loss, samples, grad_norm, whole, device } = outcome;
                let grad_norm = grad_norm.filter(|norm| norm.is_finite());
                let is_skipped = self.stepper.scales_loss && grad_norm.is_none();
                progress.scaling = self.rescaled(progress.scaling, is_skipped);

                let batches = progress.position.batch + num_batches;
                ended = progress.advance(num_batches, config.steps_per_epoch, samples, &loss);
                made += 1;
                // After the last step there is nothing left to stop.
                is_stopped =
                    self.agree_to_stop(&loss, ended.is_some())? && !self.is_over(&progress);
                meter.read(&self.stepper.replica.group);
                let counts = made > config.warmup_steps as u64;
                // A device carries out work later than the host asks for it.
                let has_ledger = config.pipeline.is_some() && config.device == Device::Cpu;
                let actions = if has_ledger { self.stepper.state.actions() } else { &[] };
                let counted = counts.then_some(actions);
                let times = meter.times(whole, data_ns, &device, &self.stepper.track, counted);
                if counts {
                    steps.push(made - 1, &times, &loss);
                }
                self.listeners.tell(Event::Step(&StepDone {
                    number: made - 1,
                    steps: progress.steps,
                    epoch,
                    batches,
                    loss: &loss,
                    has_classes: self.has_classes(),
                    lr,
                    grad_norm,
                    scaling: progress.scaling,
                    is_skipped,
                    asked_ns,
                    whole,
                    times,
                    track: &self.stepper.track,
                    records: meter.records(),
                    actions,
                    group: &self.stepper.replica.world,
                }))?;
                // When asked to stop, it leaves one out, unless the run that goes on would decide otherwise without it.
                let decides = config.early_stop.is_some() || self.saving_best.is_some();
                if self.evaluates_after(progress.steps) && (decides || !is_stopped) {
                    self.evaluate_midway(&mut progress, epoch)?;
                    self.tell_early_stop(&progress)?;
                    // Nothing is left to stop if the run ends here.
                    is_stopped &= !self.is_over(&progress);
                }
                self.stop_if_all_are_skipped(&progress)?;
                let is_due = config.sample_every.is_some_and(|n| progress.steps.is_multiple_of(n));
                if is_due && !is_stopped {
                    let text = sample::sample(self.texts.as_ref(), &mut self.stepper)?;
                    let steps = progress.steps;
                    text.map_or(Ok(()), |text| {
                        self.listeners.tell(Event::Sampled { steps, text: &text })
                    })?;
                }
                // At the end of an epoch, the code below synchronizes the replicas and saves.
                let is_due = config.save_every.is_some_and(|n| progress.steps.is_multiple_of(n));
                if is_due && ended.is_none() && !self.is_over(&progress) && !is_stopped {
                    self.stepper.sync_replicas()?;
                    self.save(&progress, false)?;
                }
                self.saving.as_mut().map_or(Ok(()), Saving::look)?;
            }
            self.stepper.sync_replicas()?;
            let sums = ended.unwrap_or(progress.epoch);
            let cut_after = ended.is_none().then_some(progress.position.batch);
            let took = epoch_begin.elapsed();
            let has_classes = self.has_classes();
            self.listeners.tell(Event::EpochEnded { epoch, sums, has_classes, cut_after, took })?;
            last = Some((epoch, sums));
            let is_due = config.save_every.is_none_or(|every| progress.steps.is_multiple_of(every));
            let is_last = self.is_over(&progress) || is_stopped;
            if is_due || is_last {
                self.save(&progress, is_last)?;
            }
        }
        self.listeners.tell(Event::TrainingEnded(&self.stepper.replica.world))?;
        let scaling = progress.scaling;
        Ok(Trained { steps, meter, num_steps: made, last, scaling, is_stopped })
    }

    /// Whether the run has made its last step. The configuration and the progress decide, and nothing else, so that a run
    /// that goes on ends where an uninterrupted one does.
    fn is_over(&self, progress: &Progress) -> bool {
        let ends_early = progress.best.no_longer_falls(self.config.early_stop).is_some();
        ends_early || progress.steps >= self.config.total_steps()
    }

    /// Fails if the gradients of so many steps in a row have overflowed that no later ones will fit, or, at the end of a run,
    /// those of all its steps. All ranks skip the same steps, so they fail together.
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
        if self.stepper.replica.world.rank() > 0 {
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
        let lowest = progress.best.no_longer_falls(self.config.early_stop);
        let Some((best, best_steps)) = lowest else { return Ok(()) };
        self.listeners.tell(Event::EarlyStop { steps: progress.steps, best, best_steps })
    }

    /// The epoch and the number of batches of the step after the next one, which makes `num_batches`; `None` if there is no
    /// such step, or if its batches are not wanted before it begins.
    fn next_step(&self, progress: &Progress, num_batches: usize) -> Option<(u64, usize)> {
        let is_last = progress.steps + 1 >= self.config.total_steps();
        if is_last || !self.stepper.to_device.looks_ahead() {
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

    /// The loss scale of the next step.
    fn rescaled(&self, now: Option<LossScaling>, is_skipped: bool) -> Option<LossScaling> {
        let (setting, now) = self.config.loss_scale.as_ref().zip(now)?;
        let (scale, good_steps) = setting.after(now.scale, now.good_steps, is_skipped);
        let skipped_steps = now.skipped_steps.saturating_add(u64::from(is_skipped));
        let in_a_row = now.skipped_in_a_row.saturating_add(1);
        let skipped_in_a_row = if is_skipped { in_a_row } else { 0 };
        Some(LossScaling { scale, good_steps, skipped_steps, skipped_in_a_row })
    }

    /// Ends a run that was asked to stop: in order, with the figures of its steps so far.
    fn end_early(&mut self, begin: Instant, trained: Trained, steps: u64) -> Result<()> {
        // The ranks agree on it before rank 0 writes, however long that takes.
        let stopped = self.stopped_after(steps);
        // Whatever happens here, the run has ended in order.
        if let Err(problem) = self.finish(begin, trained, None, Some(steps)) {
            streams::stderr().line(&format!("warning: no figures of the steps so far: {problem}"));
        }
        Err(stopped)
    }

    /// Checks the weights at the end of the run: those that the strategy keeps equal must be, and all numbers must be finite.
    fn check_weights(&self, steps: u64) -> Result<()> {
        equality::check(&self.stepper.replica, &self.exactness, steps)?;
        self.stepper.check_finite(steps).map_err(|failure| self.noted(failure))
    }

    /// Evaluates after the last step, if the run does, and informs the listeners. `begun` is where training began.
    fn evaluate_at_end(
        &mut self,
        trained: &Trained,
        begun: &Progress,
    ) -> Result<Option<Evaluation>> {
        let result = if self.config.evaluate { self.evaluate()? } else { None };
        let Some(result) = result else { return Ok(None) };
        let steps = begun.steps + trained.num_steps;
        let evaluation = Evaluation {
            steps,
            epoch: trained.last.map_or(begun.last_epoch(), |(epoch, _)| epoch),
            result,
            is_final: true,
            is_repeated: trained.num_steps > 0 && self.evaluates_after(steps),
        };
        self.listeners.tell(Event::Evaluated(evaluation))?;
        Ok(Some(evaluation))
    }

    /// Whether all ranks stop after this step. They know it with the loss. Ranks that do not share the loss ask each other
    /// at the end of the epoch.
    fn agree_to_stop(&self, loss: &StepLoss, is_epoch_ended: bool) -> Result<bool> {
        if loss.is_shared {
            return Ok(loss.stops);
        }
        if !is_epoch_ended {
            return Ok(false);
        }
        let mut votes = [f64::from(u8::from(loss.stops))];
        self.stepper.replica.world.all_reduce_slice(&mut votes, ReduceOp::Sum)?;
        Ok(votes[0] > 0.0)
    }

    /// Leaves a note for the next run if this one fails because of a number that is not finite.
    fn noted(&self, failure: Failure) -> Failure {
        if let (Failure::NotFinite { step, .. }, Some(saving)) = (&failure, &self.saving)
            && let Err(problem) = saving.note_not_finite(*step)
        {
            // The failure that is reported is the first one.
            streams::stderr()
                .line(&format!("warning: {problem}; a restart begins at the newest checkpoint"));
        }
        failure
    }

    /// How the run ends after it was asked to stop: in order, with a word about the checkpoint, unless the launcher has the
    /// last word.
    fn stopped_after(&self, steps: u64) -> Failure {
        let world = &self.stepper.replica.world;
        // All ranks end with one code, although some may not have had the signal, or have it only now.
        let own = self.stop.signal();
        let yes = |is_so: bool| f64::from(u8::from(is_so));
        // For each rank whether it was asked, and at the end how many were interrupted.
        let mut asked = vec![0.0; world.world_size() + 1];
        asked[world.rank()] = yes(own.is_some());
        asked[world.world_size()] = yes(own == Some(SIGINT));
        let heard = world.all_reduce_slice(&mut asked, ReduceOp::Sum);
        let is_interrupted = asked.pop().is_some_and(|count| heard.is_ok() && count > 0.0);
        let signal = if is_interrupted { SIGINT } else { own.unwrap_or(SIGTERM) };
        let others = (0..asked.len()).filter(|&rank| own.is_none() && asked[rank] > 0.0).collect();
        world.dumper().withdraw();
        let reports = world.rank() == 0 && !self.is_launched;
        let message = reports.then(|| {
            let saved = self.config.save.as_deref().map(|folder| (folder, Some(steps)));
            left(saved, matches!(self.config.resume, Some(Resume::IfThere(_))))
        });
        Failure::Stopped { signal, message, others }
    }

    /// Whether `--eval-every` asks for an evaluation after `steps` steps.
    fn evaluates_after(&self, steps: u64) -> bool {
        self.config.eval_every.is_some_and(|every| steps.is_multiple_of(every))
    }

    /// Begins to write a checkpoint, if the run saves. The last one is complete when this returns. The replicas must be
    /// equal.
    fn save(&mut self, progress: &Progress, is_last: bool) -> Result<()> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let begin = Instant::now();
        // First, because a number that is not finite on one rank only is a difference that no other rank would see.
        equality::check(&self.stepper.replica, &self.exactness, progress.steps)?;
        self.stepper.check_finite(progress.steps)?;
        let (config, num_samples) = (self.config, self.num_samples);
        let waits = is_last || config.save_sync;
        saving.save(config, num_samples, &self.stepper, progress, waits)?;
        let (steps, epoch) = (progress.steps, progress.last_epoch());
        self.listeners.tell(Event::Saved(Save { steps, epoch, took: begin.elapsed() }))
    }

    /// Evaluates after a step, informs the listeners, and saves the weights if the run keeps the best ones and these are better.
    fn evaluate_midway(&mut self, progress: &mut Progress, epoch: u64) -> Result<()> {
        self.stepper.sync_replicas()?;
        let Some(result) = self.evaluate()? else { return Ok(()) };
        let (steps, loss) = (progress.steps, result.sums.mean_loss());
        self.listeners.tell(Event::Evaluated(Evaluation {
            steps,
            epoch,
            result,
            is_final: false,
            is_repeated: false,
        }))?;
        progress.best.note(loss, steps);
        let Some(saving) = &mut self.saving_best else { return Ok(()) };
        if self.kept_loss.is_some_and(|kept| kept <= loss) {
            return Ok(());
        }
        self.kept_loss = Some(loss);
        equality::check(&self.stepper.replica, &self.exactness, steps)?;
        self.stepper.check_finite(steps)?;
        // An earlier evaluation, whose weights were not kept, may have been lower.
        let best = Best { lowest: Some((loss, steps)), since: 0 };
        let of_best = Progress { best, ..*progress };
        saving.save(self.config, self.num_samples, &self.stepper, &of_best, true)
    }

    /// Whether the model classifies, so that there is an accuracy.
    fn has_classes(&self) -> bool {
        self.stepper.replica.model.objective.classifies()
    }

    /// Loss and accuracy over the test set, if there is one.
    fn evaluate(&mut self) -> Result<Option<TestResult>> {
        let Some(test) = self.test.clone() else { return Ok(None) };
        let (strategy, mut cx) = self.stepper.parts();
        let batch = self.config.global_batch_size;
        let result = evaluation::evaluate(strategy, &mut cx, test, batch)?;
        // The time belongs to no step.
        cx.track.clear();
        Ok(Some(result))
    }

    /// Gathers the measurements of all ranks, and reports them. `stopped_after` has the steps of a run that was asked to end.
    fn finish(
        &mut self,
        begin: Instant,
        trained: Trained,
        evaluated: Option<Evaluation>,
        stopped_after: Option<u64>,
    ) -> Result<()> {
        let (strategy, mut cx) = self.stepper.parts();
        let digest = strategy.digest(&mut cx)?;
        let Replica { compute, .. } = &self.stepper.replica;
        // The model of all stages.
        let model = self.whole.as_ref().unwrap_or(&self.stepper.replica.model);
        let world = &self.stepper.replica.world;
        let Trained { steps, meter, num_steps, last, scaling, .. } = trained;
        let memory = RankMemory::new(&self.initialization, &compute.allocator);
        let mut report = RankReport::new(steps, meter, memory, &self.stepper.track, digest);
        report.peak_flops_per_s = self.peak_flops_per_s;
        self.listeners.add_to(&mut report);
        let total = begin.elapsed();
        let Some(reports) = world.gather_object(&report, 0)? else { return Ok(()) };
        let of_all = AllSteps::new(reports.iter().map(|report| &report.steps));
        let length = of_all.tokens_per_sample().map_or(1, |tokens| tokens.round() as usize);
        let options = &self.config.strategy.options;
        let flops_per_sample = flops::per_sample(model, &self.samples, length.max(1), options)?;
        let outcome = Outcome {
            transport: world.transport(),
            link: world.link(),
            params: model.layout.num_params(),
            num_steps,
            stopped_after,
            trained: last.map(|(_, sums)| sums),
            has_classes: model.objective.classifies(),
            predicted: self.predicted.clone(),
            scaling,
            evaluated,
            total,
            flops_per_sample,
            block_flops: match &self.config.pipeline {
                Some(_) => flops::per_block(model, &self.samples, options)?,
                None => None,
            },
            block_names: (0..model.blocks.len()).map(|at| unit_of(model, at).to_owned()).collect(),
        };
        let facts = Facts::new(self.config, &outcome, &reports, &model.layout);
        self.listeners.tell(Event::Ended(&facts))
    }
}
