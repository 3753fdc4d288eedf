//! The training loop, top to bottom.
//!
//! Every rank runs [`run_rank`] with its group; nothing here depends on whether the ranks are
//! threads or processes.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use paceline_collectives::Group;
use paceline_data::Dataset;
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::Optimizer;
use paceline_strategies::{Replica, StepLoss};
use paceline_trace::{Lane, Span, now_ns};

use crate::config::TrainConfig;
use crate::metrics::console::{Console, EvaluationLine, StepLine};
use crate::metrics::meter::{Meter, RankReport, StepTimes};
use crate::metrics::summary::{Outcome, Summary};
use crate::profile::Profiler;
use crate::run::batches::{self, BatchStream};
use crate::run::evaluation;
use crate::run::folder::RunFolder;
use crate::run::progress::{EpochSums, Progress};
use crate::run::resume;
use crate::run::step::{StepOutcome, Stepper};
use crate::{Result, checkpoint, resources};

/// Spans, and marks, that a step may record: a strategy records a few per parameter.
const LANE_CAPACITY: usize = 1 << 14;

/// Steps whose times find room without allocating.
const MAX_RESERVED_STEPS: usize = 1 << 20;

/// Trains as one rank of `group`. Rank 0 writes to the console and to `folder`.
pub fn run_rank(
    config: &TrainConfig,
    group: Group,
    local_rank: usize,
    folder: Option<RunFolder>,
) -> Result<()> {
    let begin = Instant::now();
    let console = Console::new(config, group.rank());
    console.placement(config, &group, local_rank)?;

    let allocator = Allocator::new();
    let compute = Compute::new(config.threads, allocator.clone());
    let (profiler, compute) = match &config.profile {
        Some(profile) => {
            let (profiler, compute) = Profiler::new(profile, compute, &allocator);
            (Some(profiler), compute)
        }
        None => (None, compute),
    };
    let dataset = config.data.open_train(config.seed)?;
    let model = config.model.build(dataset.as_ref(), group.world_size())?;
    console.model(&model);
    let mut strategy = config.strategy.build()?;
    let options = config.strategy.options();
    let replica = Replica::new(strategy.as_mut(), model, compute, group, config.seed, options)?;
    let mut optimizer = Optimizer::new(config.optimizer.config(), &replica.storage, &allocator)?;
    let progress = resume::begin(config, &replica, &mut optimizer)?;
    console.begin(config, progress);

    let lane = Lane::with_capacity(LANE_CAPACITY);
    let evaluates = config.evaluate || config.eval_every.is_some();
    let join = batches::join(config, dataset.as_ref(), &replica)?;
    let test = evaluates.then(|| config.data.open_test(config.seed)).transpose()?;
    let max_norm = config.clip_grad_norm;
    let stepper = Stepper { replica, optimizer, strategy, lane, join, max_norm };
    let mut trainer = Trainer { config, stepper, profiler, console, folder, test };
    let trained = trainer.train(dataset, progress)?;
    let evaluation = if config.evaluate { trainer.evaluate()? } else { None };
    if let Some(sums) = &evaluation {
        trainer.console.evaluation(sums);
        if let Some(folder) = &mut trainer.folder {
            let steps = progress.steps + trained.num_steps;
            let line = EvaluationLine::new(steps, config.epochs as u64, sums);
            folder.add_scalars(steps, &line.scalars())?;
        }
    }
    trainer.finish(begin, trained, evaluation)
}

/// What training came to on this rank.
struct Trained {
    /// The measured steps.
    steps: Vec<StepTimes>,
    meter: Meter,
    /// All steps, measured or not.
    num_steps: u64,
    /// Of the last epoch.
    last: Option<EpochSums>,
}

struct Trainer<'a> {
    config: &'a TrainConfig,
    stepper: Stepper,
    profiler: Option<Profiler>,
    console: Console,
    folder: Option<RunFolder>,
    /// The test set, if there is to be any evaluation.
    test: Option<Arc<dyn Dataset>>,
}

impl Trainer<'_> {
    fn train(&mut self, dataset: Arc<dyn Dataset>, mut progress: Progress) -> Result<Trained> {
        let config = self.config;
        let track = self.profiler.as_ref().map(Profiler::loader);
        let replica = &self.stepper.replica;
        let mut stream = BatchStream::new(config, dataset, replica, progress.epochs, track)?;
        let mut meter = Meter::new();
        // Room for all steps, so that measuring does not allocate; within reason, because a run
        // that is to go on until it is stopped may announce any number of epochs.
        let num_steps = usize::try_from(config.total_steps()).unwrap_or(usize::MAX);
        let mut steps = Vec::with_capacity(num_steps.min(MAX_RESERVED_STEPS));
        let mut last = None;
        let mut made = 0;
        for epoch in progress.epochs..config.epochs as u64 {
            let epoch_begin = Instant::now();
            let mut sums = EpochSums::default();
            self.console.begin_epoch(epoch, config.steps_per_epoch);
            self.forget_records(&mut meter);
            let mut batches = 0;
            while batches < config.steps_per_epoch {
                if let Some(profiler) = &mut self.profiler {
                    profiler.begin_step(made, &self.stepper.replica.group)?;
                    meter.forget(&self.stepper.replica.group);
                }
                let asked_ns = now_ns();
                let num_left = config.steps_per_epoch - batches;
                let shares = stream.step(epoch, config.strategy.accumulate.min(num_left))?;
                batches += shares.len();
                let data_ns = now_ns() - asked_ns;

                let lr = config.lr(progress.steps);
                let Some(outcome) = self.stepper.step(shares, lr)? else { break };
                self.stepper.stop_if_not_finite(progress.steps + 1, lr, &outcome)?;
                let StepOutcome { loss, grad_norm, whole } = outcome;

                progress.steps += 1;
                made += 1;
                sums.add(&loss);
                meter.read(&self.stepper.replica.group);
                self.profile(made - 1, asked_ns, whole, &loss, &meter)?;
                let counts = made > config.warmup_steps as u64;
                let times = meter.take(whole, data_ns, &mut self.stepper.lane, counts);
                if counts {
                    steps.push(times);
                }
                self.console.step(epoch, batches, loss.loss);
                if let Some(folder) = &mut self.folder {
                    let steps = progress.steps;
                    let line = StepLine::new(steps, epoch, batches, &loss, lr, grad_norm, &times);
                    folder.add_metrics(&line)?;
                    folder.add_scalars(steps, &line.scalars(config.model.has_classes()))?;
                }
                if config.eval_every.is_some_and(|every| progress.steps.is_multiple_of(every)) {
                    self.evaluate_midway(progress.steps, epoch)?;
                    self.forget_records(&mut meter);
                }
            }
            self.stepper.settle()?;
            progress.epochs = epoch + 1;
            self.console.end_epoch(epoch, &sums, epoch_begin.elapsed());
            last = Some(sums);
            self.save(progress)?;
        }
        if let Some(profiler) = &mut self.profiler {
            profiler.finish(&self.stepper.replica.group)?;
        }
        Ok(Trained { steps, meter, num_steps: made, last })
    }

    /// Hands a step, whose batches were asked for at `asked_ns`, to the profiler, if there is one.
    fn profile(
        &mut self,
        number: u64,
        asked_ns: u64,
        whole: Span,
        loss: &StepLoss,
        meter: &Meter,
    ) -> Result<()> {
        let Some(profiler) = &mut self.profiler else { return Ok(()) };
        profiler.count("loss", whole.end_ns, loss.loss);
        let group = &self.stepper.replica.group;
        profiler.end_step(number, asked_ns, whole, &self.stepper.lane, meter.records(), group)
    }

    /// What ranks did together outside of steps (meeting, checkpoints, evaluation) belongs to none.
    fn forget_records(&mut self, meter: &mut Meter) {
        meter.forget(&self.stepper.replica.group);
        self.stepper.lane.clear();
    }

    fn save(&mut self, progress: Progress) -> Result<()> {
        if let Some(folder) = &self.config.save {
            if self.stepper.replica.group.rank() == 0 {
                let storage = &self.stepper.replica.storage;
                checkpoint::save(folder, self.config, storage, &self.stepper.optimizer, progress)?;
            }
            // No rank goes on, and perhaps dies, before the checkpoint is complete.
            self.stepper.replica.group.barrier()?;
        }
        Ok(())
    }

    /// Evaluates after a step, and says so.
    fn evaluate_midway(&mut self, steps: u64, epoch: u64) -> Result<()> {
        self.stepper.settle()?;
        let Some(sums) = self.evaluate()? else { return Ok(()) };
        self.console.evaluation_midway(steps, &sums);
        let Some(folder) = &mut self.folder else { return Ok(()) };
        let line = EvaluationLine::new(steps, epoch, &sums);
        folder.add_metrics(&line)?;
        folder.add_scalars(steps, &line.scalars())
    }

    /// Loss and accuracy over the test set, if there is one.
    fn evaluate(&mut self) -> Result<Option<EpochSums>> {
        let Some(test) = self.test.clone() else { return Ok(None) };
        let Stepper { strategy, replica, .. } = &mut self.stepper;
        let batch = self.config.global_batch_size;
        evaluation::evaluate(strategy.as_mut(), replica, test, batch).map(Some)
    }

    /// Gathers what every rank measured, and reports it.
    fn finish(
        &mut self,
        begin: Instant,
        trained: Trained,
        evaluation: Option<EpochSums>,
    ) -> Result<()> {
        let Replica { compute, group, model, storage, .. } = &self.stepper.replica;
        let digest = storage.digest()?;
        let Trained { steps, meter, num_steps, last } = trained;
        let mut report =
            RankReport::new(steps, meter, &compute.allocator, &self.stepper.lane, digest);
        if let Some(profiler) = &self.profiler {
            report.dropped_spans += profiler.dropped();
            report.trace = profiler.trace().map(Path::to_owned);
        }
        let total = begin.elapsed();
        let Some(reports) = group.gather_object(&report, 0)? else { return Ok(()) };
        let sums = evaluation.or(last).unwrap_or_default();
        let has_classes = self.config.model.has_classes();
        let outcome = Outcome {
            transport: group.transport(),
            link: group.link(),
            params: model.layout.num_params(),
            num_steps,
            loss: sums.loss / sums.count,
            accuracy: has_classes.then_some(sums.correct / sums.count),
            total,
        };
        let summary = Summary::new(self.config, &outcome, &reports, &model.layout);
        let folder = self.folder.as_ref().map(RunFolder::path);
        if let Some(folder) = folder {
            crate::run::folder::write_json(&folder.join("summary.json"), &summary)?;
        }
        if let Some(file) = &self.config.json {
            crate::run::folder::write_json(file, &summary)?;
        }
        self.console.summary(self.config, &summary, &outcome, folder);
        Ok(())
    }
}

/// Pins the calling thread, if the run asks for it.
pub fn pin(config: &TrainConfig, local_rank: usize) -> Result<()> {
    if config.pin_cores { resources::pin(local_rank, config.threads) } else { Ok(()) }
}
