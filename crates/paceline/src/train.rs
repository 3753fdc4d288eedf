//! The training loop, top to bottom.
//!
//! Every rank runs [`run_rank`] with its group; nothing here depends on whether the ranks are
//! threads or processes.

use std::sync::Arc;
use std::time::Instant;

use paceline_collectives::Group;
use paceline_data::{Batch, Dataset, Loader, LoaderConfig, Order, Position, Prefetch, Sampler};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::Optimizer;
use paceline_strategies::{Ddp, MicroBatch, Replica, SimpleDdp, Single, StepLoss, Strategy};
use paceline_trace::{Lane, Span, now_ns};

use crate::checkpoint::{self, Progress};
use crate::cli::StrategyName;
use crate::config::{ModelSettings, TrainConfig};
use crate::measure::{Meter, RankReport, StepTimes};
use crate::report::{Console, Outcome, StepLine, Summary};
use crate::run_folder::RunFolder;
use crate::{Failure, Result, resources};

/// Spans that a step may record: a strategy records a few per parameter.
const LANE_CAPACITY: usize = 1 << 14;

/// Steps whose times find room without allocating.
const MAX_RESERVED_STEPS: usize = 1 << 20;

fn build_strategy(config: &TrainConfig) -> Box<dyn Strategy> {
    match config.strategy {
        StrategyName::Single => Box::new(Single),
        StrategyName::SimpleDdp => Box::new(SimpleDdp),
        StrategyName::Ddp => Box::new(Ddp::new((config.bucket_cap_mb * 1024.0 * 1024.0) as usize)),
    }
}

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
    let dataset = config.data.open_train(config.seed)?;
    let model = config.model.build(dataset.as_ref(), group.world_size())?;
    console.model(&model);
    let mut strategy = build_strategy(config);
    let replica = Replica::new(strategy.as_mut(), model, compute, group, config.seed)?;
    let mut optimizer = Optimizer::new(config.optimizer.config(), &replica.storage, &allocator)?;
    let mut progress = Progress::default();
    if let Some(from) = &config.resume {
        progress = checkpoint::load(from, &replica.storage, &mut optimizer)?;
    }

    let lane = Lane::with_capacity(LANE_CAPACITY);
    let mut trainer = Trainer { config, replica, optimizer, strategy, lane, console, folder };
    let trained = trainer.train(dataset, progress)?;
    let evaluation = if config.evaluate { Some(trainer.evaluate()?) } else { None };
    trainer.finish(begin, trained, evaluation)
}

/// What training came to on this rank.
struct Trained {
    /// The measured steps.
    steps: Vec<StepTimes>,
    /// All steps, measured or not.
    num_steps: u64,
    /// Of the last epoch.
    last: Option<EpochSums>,
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
    console: Console,
    folder: Option<RunFolder>,
}

impl Trainer<'_> {
    fn train(&mut self, dataset: Arc<dyn Dataset>, mut progress: Progress) -> Result<Trained> {
        let config = self.config;
        let order = if config.data.is_generated() {
            Order::Sequential
        } else {
            Order::Shuffled { seed: config.seed }
        };
        let mut loader = self.loader(dataset, order, progress.epochs, config.epochs as u64)?;
        let mut meter = Meter::new();
        // Room for all steps, so that measuring does not allocate; within reason, because a run
        // that is to go on until it is stopped may announce any number of epochs.
        let num_steps = config.epochs.saturating_mul(config.steps_per_epoch);
        let mut steps = Vec::with_capacity(num_steps.min(MAX_RESERVED_STEPS));
        let mut last = None;
        let mut made = 0;
        for epoch in progress.epochs..config.epochs as u64 {
            let epoch_begin = Instant::now();
            let mut sums = EpochSums::default();
            self.console.begin_epoch(epoch, config.steps_per_epoch);
            // What ranks did together outside of steps (meeting, checkpoints) belongs to none.
            self.replica.group.fresh_records(meter.records());
            meter.records().clear();
            for batch in 0..config.steps_per_epoch {
                let asked_ns = now_ns();
                let Some(loaded) = loader.next() else { break };
                let loaded = loaded?;
                let data_ns = now_ns() - asked_ns;

                let (loss, whole) = self.step(loaded)?;
                self.stop_if_not_finite(progress.steps, &loss)?;

                progress.steps += 1;
                made += 1;
                sums.add(&loss);
                self.replica.group.fresh_records(meter.records());
                let times = meter.take(whole, data_ns, &mut self.lane);
                if made > config.warmup_steps as u64 {
                    steps.push(times);
                }
                self.console.step(epoch, batch, loss.loss);
                if let Some(folder) = &mut self.folder {
                    let lr = config.optimizer.lr();
                    folder.add_metrics(&StepLine::new(
                        progress.steps,
                        epoch,
                        batch,
                        &loss,
                        lr,
                        &times,
                    ))?;
                }
            }
            progress.epochs = epoch + 1;
            self.console.end_epoch(epoch, &sums, epoch_begin.elapsed());
            last = Some(sums);
            self.save(progress)?;
        }
        Ok(Trained { steps, num_steps: made, last })
    }

    /// One training step, from the batch to the updated parameters.
    fn step(&mut self, batch: Batch) -> Result<(StepLoss, Span)> {
        let start_ns = now_ns();
        let shares = [share_of(batch)];
        let loss = self.strategy.train_step(&self.replica, &shares, &mut self.lane)?;
        if loss.loss.is_finite() {
            self.strategy.optimizer_step(&self.replica, &mut self.optimizer, &mut self.lane)?;
        }
        Ok((loss, Span { start_ns, end_ns: now_ns() }))
    }

    /// All ranks know the same loss, so all stop together, before the optimizer has touched a
    /// parameter. They still tell each other whose loss it was.
    fn stop_if_not_finite(&self, steps_made: u64, loss: &StepLoss) -> Result<()> {
        if loss.loss.is_finite() {
            return Ok(());
        }
        let group = &self.replica.group;
        let sums = group.gather_object(&loss.local_sum, 0)?;
        let lr = self.config.optimizer.lr();
        let step = steps_made + 1;
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
        Err(Failure::Run(format!(
            "the loss of step {step} is not finite on {culprits}, with a learning rate of {lr:?}; \
             training stopped before the optimizer step: lower --lr, or look at the data"
        )))
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

    fn loader(
        &self,
        dataset: Arc<dyn Dataset>,
        order: Order,
        first_epoch: u64,
        end_epoch: u64,
    ) -> Result<Loader> {
        let Replica { group, compute, .. } = &self.replica;
        let (rank, world) = (group.rank(), group.world_size());
        let sampler =
            Sampler::new(dataset.len(), self.config.global_batch_size, rank, world, order)?
                .with_max_steps(self.config.steps_per_epoch)?;
        // Making samples costs time that would be taken from the step that is being measured.
        let generated = self.config.data.is_generated();
        let prefetch = if generated { Prefetch::None } else { Prefetch::Background { depth: 2 } };
        let start = Position { epoch: first_epoch, step: 0 };
        let settings = LoaderConfig { start, end_epoch, prefetch };
        Ok(Loader::new(dataset, sampler, compute.allocator.clone(), settings)?)
    }

    /// Loss and accuracy over the test set, each sample counted once, summed over the ranks.
    fn evaluate(&mut self) -> Result<EpochSums> {
        let dataset = self.config.data.open_test(self.config.seed)?;
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
        let sums = EpochSums { loss, correct, count };
        self.console.evaluation(&sums);
        Ok(sums)
    }

    /// Gathers what every rank measured, and reports it.
    fn finish(
        &mut self,
        begin: Instant,
        trained: Trained,
        evaluation: Option<EpochSums>,
    ) -> Result<()> {
        let Replica { compute, group, model, storage, .. } = &self.replica;
        let report = RankReport::new(trained.steps, &compute.allocator, &self.lane);
        let weights_sha256 = storage.digest()?;
        let total = begin.elapsed();
        let Some(reports) = group.gather_object(&report, 0)? else { return Ok(()) };
        let sums = evaluation.or(trained.last).unwrap_or_default();
        let has_classes = matches!(self.config.model, ModelSettings::Cnn { .. });
        let outcome = Outcome {
            transport: group.transport(),
            link: group.link(),
            params: model.layout.num_params(),
            num_steps: trained.num_steps,
            loss: sums.loss / sums.count,
            accuracy: has_classes.then_some(sums.correct / sums.count),
            weights_sha256,
            total,
        };
        let summary = Summary::new(self.config, &outcome, &reports);
        let folder = self.folder.as_ref().map(RunFolder::path);
        if let Some(folder) = folder {
            crate::run_folder::write_json(&folder.join("summary.json"), &summary)?;
        }
        if let Some(file) = &self.config.json {
            crate::run_folder::write_json(file, &summary)?;
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
