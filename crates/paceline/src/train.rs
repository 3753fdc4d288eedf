//! The training loop, top to bottom.
//!
//! Every rank runs [`run_rank`] with its group; nothing here depends on whether the ranks are
//! threads or processes.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use paceline_collectives::Group;
use paceline_data::{Batch, Dataset, Loader, LoaderConfig, Order, Sampler};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::Optimizer;
use paceline_strategies::{Join, MicroBatch, Replica, StepLoss, Strategy, clip_grad_norm};
use paceline_trace::{Lane, Span, now_ns};

use crate::checkpoint::{self, Progress};
use crate::config::TrainConfig;
use crate::feed::{self, Feed};
use crate::metrics::console::{Console, EvaluationLine, StepLine};
use crate::metrics::meter::{Meter, RankReport, StepTimes};
use crate::metrics::summary::{Outcome, Summary};
use crate::profile::Profiler;
use crate::run::folder::RunFolder;
use crate::{Failure, Result, resources, resume};

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
    let join = feed::join(config, dataset.as_ref(), &replica)?;
    let test = evaluates.then(|| config.data.open_test(config.seed)).transpose()?;
    let mut trainer = Trainer {
        config,
        replica,
        optimizer,
        strategy,
        lane,
        profiler,
        console,
        folder,
        test,
        join,
    };
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

/// What one step came to.
struct StepOutcome {
    loss: StepLoss,
    /// The norm of the gradients before they were clipped, if they are to be.
    grad_norm: Option<f64>,
    whole: Span,
}

/// Sums over an epoch, over all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochSums {
    /// Sum of the samples' losses.
    pub loss: f64,
    /// Samples classified correctly.
    pub correct: f64,
    /// Samples.
    pub count: f64,
}

impl EpochSums {
    fn add(&mut self, step: &StepLoss) {
        self.loss += step.loss * step.count as f64;
        self.correct += step.correct;
        self.count += step.count as f64;
    }
}

struct Trainer<'a> {
    config: &'a TrainConfig,
    replica: Replica,
    optimizer: Optimizer,
    strategy: Box<dyn Strategy>,
    lane: Lane,
    profiler: Option<Profiler>,
    console: Console,
    folder: Option<RunFolder>,
    /// The test set, if there is to be any evaluation.
    test: Option<Arc<dyn Dataset>>,
    /// Where ranks have batches of their own.
    join: Option<Join>,
}

impl Trainer<'_> {
    fn train(&mut self, dataset: Arc<dyn Dataset>, mut progress: Progress) -> Result<Trained> {
        let config = self.config;
        let track = self.profiler.as_ref().map(Profiler::loader);
        let mut feed = Feed::new(config, dataset, &self.replica, progress.epochs, track)?;
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
                    profiler.begin_step(made, &self.replica.group)?;
                    meter.forget(&self.replica.group);
                }
                let asked_ns = now_ns();
                let num_left = config.steps_per_epoch - batches;
                let shares = feed.step(epoch, config.strategy.accumulate.min(num_left))?;
                batches += shares.len();
                let data_ns = now_ns() - asked_ns;

                let lr = config.lr(progress.steps);
                self.optimizer.set_lr(lr);
                let Some(outcome) = self.step(shares)? else { break };
                let StepOutcome { loss, grad_norm, whole } = outcome;
                self.stop_if_not_finite(progress.steps, &loss, grad_norm)?;

                progress.steps += 1;
                made += 1;
                sums.add(&loss);
                meter.read(&self.replica.group);
                self.profile(made - 1, asked_ns, whole, &loss, &meter)?;
                let counts = made > config.warmup_steps as u64;
                let times = meter.take(whole, data_ns, &mut self.lane, counts);
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
            self.strategy.settle(&self.replica, &mut self.lane)?;
            self.lane.clear();
            progress.epochs = epoch + 1;
            self.console.end_epoch(epoch, &sums, epoch_begin.elapsed());
            last = Some(sums);
            self.save(progress)?;
        }
        if let Some(profiler) = &mut self.profiler {
            profiler.finish(&self.replica.group)?;
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
        let group = &self.replica.group;
        profiler.end_step(number, asked_ns, whole, &self.lane, meter.records(), group)
    }

    /// What ranks did together outside of steps (meeting, checkpoints, evaluation) belongs to none.
    fn forget_records(&mut self, meter: &mut Meter) {
        meter.forget(&self.replica.group);
        self.lane.clear();
    }

    /// One training step, from the batches to the updated parameters; nothing if no rank has any.
    fn step(&mut self, batches: Vec<Option<Batch>>) -> Result<Option<StepOutcome>> {
        let start_ns = now_ns();
        let shares = batches.into_iter().filter_map(|batch| self.share(batch).transpose());
        let shares = shares.collect::<Result<Vec<_>>>()?;
        if shares.is_empty() {
            return Ok(None);
        }
        let loss = self.strategy.train_step(&mut self.replica, &shares, &mut self.lane)?;
        let Self { strategy, replica, lane, .. } = self;
        let mut grad_norm = None;
        if let Some(max_norm) = self.config.clip_grad_norm
            && loss.loss.is_finite()
        {
            grad_norm = Some(clip_grad_norm(strategy.as_mut(), replica, max_norm, lane)?);
        }
        if loss.loss.is_finite() && grad_norm.is_none_or(f64::is_finite) {
            strategy.optimizer_step(replica, &mut self.optimizer, lane)?;
        }
        let whole = Span { start_ns, end_ns: now_ns() };
        Ok(Some(StepOutcome { loss, grad_norm, whole }))
    }

    /// This rank's share of a batch. Where the ranks share every batch, each knows how many samples
    /// there are; ranks with batches of their own have to agree.
    fn share(&mut self, batch: Option<Batch>) -> Result<Option<MicroBatch>> {
        let Some(join) = &self.join else { return Ok(batch.map(share_of)) };
        let own = batch.map(|batch| (batch.inputs, batch.targets));
        Ok(join.next(&self.replica, own, &mut self.lane)?)
    }

    /// Where all ranks know the same loss and norm, all stop together, before the optimizer has touched
    /// a parameter. They still tell each other whose loss it was.
    fn stop_if_not_finite(
        &self,
        steps_made: u64,
        loss: &StepLoss,
        grad_norm: Option<f64>,
    ) -> Result<()> {
        let lr = self.config.lr(steps_made);
        let step = steps_made + 1;
        let advice = || {
            format!(
                "with a learning rate of {lr:?}; training stopped before the optimizer step: lower \
                 --lr, or look at the data"
            )
        };
        let group = &self.replica.group;
        if loss.loss.is_finite() {
            let Some(norm) = grad_norm.filter(|norm| !norm.is_finite()) else { return Ok(()) };
            // The gradients are those of all ranks, so there is no culprit, and rank 0 speaks.
            let problem = format!("the gradient norm of step {step} is not finite ({norm})");
            return Err(match group.rank() {
                0 => Failure::Run(format!("{problem}, {}", advice())),
                _ => Failure::Consequence(problem),
            });
        }
        if !loss.is_shared {
            // The others know nothing of it and go on, so this rank has nobody to ask.
            let problem = format!("the loss of step {step} is not finite ({})", loss.local_sum);
            return Err(Failure::Run(format!("{problem}, {}", advice())));
        }
        let sums = group.gather_object(&loss.local_sum, 0)?;
        let Some(sums) = sums else {
            return Err(Failure::Consequence(format!("the loss of step {step} is not finite")));
        };
        let culprits: Vec<String> = sums
            .iter()
            .enumerate()
            .filter(|(_, sum)| !sum.is_finite())
            .map(|(rank, sum)| format!("rank {rank} ({sum})"))
            .collect();
        let culprits = if culprits.is_empty() {
            "the sum over all ranks".to_owned()
        } else {
            culprits.join(", ")
        };
        let problem = format!("the loss of step {step} is not finite on {culprits}");
        Err(Failure::Run(format!("{problem}, {}", advice())))
    }

    fn save(&mut self, progress: Progress) -> Result<()> {
        if let Some(folder) = &self.config.save {
            if self.replica.group.rank() == 0 {
                let storage = &self.replica.storage;
                checkpoint::save(folder, self.config, storage, &self.optimizer, progress)?;
            }
            // No rank goes on, and perhaps dies, before the checkpoint is complete.
            self.replica.group.barrier()?;
        }
        Ok(())
    }

    /// Evaluates after a step, and says so.
    fn evaluate_midway(&mut self, steps: u64, epoch: u64) -> Result<()> {
        self.strategy.settle(&self.replica, &mut self.lane)?;
        let Some(sums) = self.evaluate()? else { return Ok(()) };
        self.console.evaluation_midway(steps, &sums);
        let Some(folder) = &mut self.folder else { return Ok(()) };
        let line = EvaluationLine::new(steps, epoch, &sums);
        folder.add_metrics(&line)?;
        folder.add_scalars(steps, &line.scalars())
    }

    /// Loss and accuracy over the test set, if there is one: all ranks take their shares, and each
    /// sample is counted once.
    fn evaluate(&mut self) -> Result<Option<EpochSums>> {
        let Some(dataset) = self.test.clone() else { return Ok(None) };
        let Replica { compute, group, .. } = &self.replica;
        let (rank, world) = (group.rank(), group.world_size());
        let batch = self.config.global_batch_size;
        let sampler = Sampler::new(dataset.len(), batch, rank, world, Order::Sequential)?;
        let settings = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
        let mut sums = [0.0; 3];
        for batch in Loader::new(dataset, sampler, compute.allocator.clone(), settings)? {
            let share = share_of(batch?);
            let loss = self.strategy.evaluate(&self.replica, &share)?;
            sums[0] += loss.loss;
            sums[1] += loss.correct as f64;
            sums[2] += share.targets.dims()[0] as f64;
        }
        group.all_reduce_slice(&mut sums, paceline_collectives::ReduceOp::Sum)?;
        let [loss, correct, count] = sums;
        Ok(Some(EpochSums { loss, correct, count }))
    }

    /// Gathers what every rank measured, and reports it.
    fn finish(
        &mut self,
        begin: Instant,
        trained: Trained,
        evaluation: Option<EpochSums>,
    ) -> Result<()> {
        let Replica { compute, group, model, storage, .. } = &self.replica;
        let digest = storage.digest()?;
        let Trained { steps, meter, num_steps, last } = trained;
        let mut report = RankReport::new(steps, meter, &compute.allocator, &self.lane, digest);
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

fn share_of(batch: Batch) -> MicroBatch {
    let Batch { inputs, targets, global_count, .. } = batch;
    MicroBatch { inputs, targets, global_count }
}

/// Pins the calling thread, if the run asks for it.
pub fn pin(config: &TrainConfig, local_rank: usize) -> Result<()> {
    if config.pin_cores { resources::pin(local_rank, config.threads) } else { Ok(()) }
}
