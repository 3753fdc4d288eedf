//! From flags to one resolved configuration, checked as a whole before any rank starts.

use std::path::PathBuf;

use paceline_data::Dataset;
use paceline_model::Model;
use serde::Serialize;

use crate::cli::{
    DeviceName, ModelName, OptimizerName, StrategyArgs, StrategyName, TrainArgs, TransportName,
};
use crate::comm::{self, CommConfig};
use crate::data::{self, DataConfig};
use crate::environment::Placement;
use crate::model_settings::{ModelSettings, OptimizerSettings, resolve_model, resolve_optimizer};
use crate::outputs::{check_file, check_folder};
use crate::profile::{self, ProfileConfig};
use crate::run::open_data::OpenData;
use crate::run::origin::Resume;
use crate::run::ranks::Ranks;
use crate::run::{resume, shards};
use crate::schedule::Schedule;
use crate::strategy::{self, StrategyConfig};
use crate::{Failure, Result, download, launcher, resources};

/// Threads per rank at most. More than any host has cores to give.
const MAX_THREADS: usize = 1024;

/// Everything that decides a run, with all defaults filled in. Written as `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainConfig {
    /// What to train.
    pub model: ModelSettings,
    /// How ranks keep their models equal.
    pub strategy: StrategyConfig,
    /// How ranks reach each other.
    pub transport: TransportName,
    /// How ranks talk to each other.
    pub comm: CommConfig,
    /// Where to compute.
    pub device: DeviceName,
    /// Number of ranks.
    pub world_size: usize,
    /// Threads that compute, per rank.
    pub threads: usize,
    /// Whether each rank has cores of its own.
    pub pin_cores: bool,
    /// Where ranks of another launcher meet.
    pub init_method: InitMethod,
    /// Passes over the data; the last one may be cut short by `steps`.
    pub epochs: usize,
    /// Optimizer steps after which the run ends, if that is not the end of the last epoch.
    pub steps: Option<u64>,
    /// Batches of one pass.
    pub steps_per_epoch: usize,
    /// First steps that are not measured.
    pub warmup_steps: usize,
    /// Samples of a full batch on the rank that has most.
    pub batch_size: usize,
    /// Samples of a full batch on all ranks.
    pub global_batch_size: usize,
    /// Samples of each rank's own shard of the training set, if they do not share every batch.
    pub rank_samples: Option<Vec<usize>>,
    /// The optimizer.
    pub optimizer: OptimizerSettings,
    /// How its learning rate changes.
    pub schedule: Schedule,
    /// The largest norm of the gradients, if they are clipped.
    pub clip_grad_norm: Option<f64>,
    /// The seed of everything.
    pub seed: u64,
    /// The data.
    pub data: DataConfig,
    /// Whether to evaluate after training.
    pub evaluate: bool,
    /// Optimizer steps between two evaluations during training.
    pub eval_every: Option<u64>,
    /// What to record.
    pub profile: Option<ProfileConfig>,
    /// Folder to write checkpoints to.
    pub save: Option<PathBuf>,
    /// Optimizer steps between two checkpoints, if they are not written after every epoch.
    pub save_every: Option<u64>,
    /// What to continue from.
    pub resume: Option<Resume>,
    /// Whether to write scalars for TensorBoard.
    pub tensorboard: bool,
    /// File to write the summary to.
    pub json: Option<PathBuf>,
    /// Whether to be silent.
    pub quiet: bool,
    /// What the flags asked for and did not get, in words.
    pub warnings: Vec<String>,
}

impl TrainConfig {
    /// The ranks that it starts.
    pub fn ranks(&self) -> Ranks<'_> {
        let TrainConfig { world_size, threads, pin_cores, transport, comm, init_method, .. } = self;
        Ranks {
            world_size: *world_size,
            threads: *threads,
            pin_cores: *pin_cores,
            transport: *transport,
            comm,
            init_method,
        }
    }

    /// Optimizer steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        let per_epoch = self.steps_per_epoch.div_ceil(self.strategy.accumulate);
        self.steps.unwrap_or((self.epochs as u64).saturating_mul(per_epoch as u64))
    }

    /// Samples of a step on all ranks: of a full one, or where ranks have shards of their own, the
    /// mean over an epoch.
    pub fn samples_per_step(&self) -> f64 {
        let batches = self.strategy.accumulate.min(self.steps_per_epoch) as f64;
        let per_batch = match &self.rank_samples {
            None => self.global_batch_size as f64,
            Some(samples) => {
                let most = self.steps_per_epoch.saturating_mul(self.batch_size);
                let sum: usize = samples.iter().map(|samples| most.min(*samples)).sum();
                sum as f64 / self.steps_per_epoch as f64
            }
        };
        batches * per_batch
    }

    /// The learning rate of the optimizer step that follows `steps_made`.
    pub fn lr(&self, steps_made: u64) -> f64 {
        self.schedule.lr(self.optimizer.lr(), steps_made, self.lr_steps())
    }

    /// Optimizer steps over which the learning rate takes its course.
    pub fn lr_steps(&self) -> u64 {
        self.schedule.steps.unwrap_or_else(|| self.total_steps())
    }
}

/// Where the ranks meet.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InitMethod {
    /// By MASTER_PORT.
    Environment,
    /// Through this file.
    File(PathBuf),
}

/// Checks all flags together and fills in the defaults. Opens the data and the checkpoint, so that
/// whatever is wrong with them is said now; writes nothing but data that are to be fetched and, last of
/// all, tries whether it could.
pub fn resolve(args: &TrainArgs, placement: Option<&Placement>) -> Result<(TrainConfig, OpenData)> {
    let (config, data) = resolve_inputs(args, placement)?;
    // The launcher has tried it before it started this rank.
    if !placement.is_some_and(Placement::is_of_train) {
        check_outputs(&config)?;
    }
    Ok((config, data))
}

/// The same for a run whose outputs go elsewhere: writes nothing but data that are to be fetched.
pub fn resolve_inputs(
    args: &TrainArgs,
    placement: Option<&Placement>,
) -> Result<(TrainConfig, OpenData)> {
    let is_mlp = args.model == ModelName::Mlp;
    let model = resolve_model(args)?;
    let world_size = resolve_world_size(args, placement)?;
    check_ranks(args, placement, world_size)?;
    let comm = resolve_comm(args, placement, world_size)?;
    let mut warnings = Vec::new();
    let name = args.compare.chosen(args.strategy.name)?;
    let strategy = StrategyArgs { name, ..args.strategy.clone() };
    let strategy = strategy::resolve(&strategy, world_size, is_mlp, &mut warnings)?;
    let optimizer = resolve_optimizer(args)?;
    if let Some(norm) = args.clip_grad_norm.filter(|norm| !(*norm > 0.0 && norm.is_finite())) {
        return usage(format!("--clip-grad-norm {norm}: pass a number above zero"));
    }
    let is_alone = strategy.name == StrategyName::Single;
    if args.clip_grad_norm.is_some() && !is_alone && !strategy.keeps_replicas_equal() {
        return usage(format!(
            "--clip-grad-norm: with {} each rank has gradients of its own, whose norms differ; leave it \
             out, or pass another strategy",
            strategy.words()
        ));
    }
    check_drift(args, &strategy, &mut warnings)?;
    let schedule = Schedule::resolve(args, optimizer.lr())?;
    let global_batch_size = resolve_batch(args, world_size, if is_mlp { 256 } else { 64 })?;
    if args.epochs == Some(0) || args.steps == Some(0) || args.steps_per_epoch == Some(0) {
        return usage("--epochs, --steps and --steps-per-epoch must be at least 1".into());
    }
    if args.save_every == Some(0) {
        return usage("--save-every 0: pass the number of optimizer steps between two".into());
    }
    let data = data::resolve(args, &model, global_batch_size)?;
    if args.download && !placement.is_some_and(Placement::is_of_train) {
        download::download(&data, args.mirror.as_deref(), args.quiet)?;
    }
    let dataset = data.open_train(args.seed)?;
    let natural_steps = match &args.rank_samples {
        Some(samples) => {
            shards::check_rank_samples(args, samples, world_size, dataset.len())?;
            // All go on until the last one is out of data.
            let most = samples.iter().max().copied().unwrap_or(0);
            most.div_ceil(global_batch_size / world_size)
        }
        None => dataset.len().div_ceil(global_batch_size),
    };
    let steps_per_epoch = match args.steps_per_epoch {
        Some(asked) if asked > natural_steps => {
            warnings.push(format!(
                "--steps-per-epoch {asked}: the data make {natural_steps} steps of up to \
                 {global_batch_size} samples; an epoch ends after those"
            ));
            natural_steps
        }
        asked => asked.unwrap_or(natural_steps),
    };
    let steps_of_epoch = steps_per_epoch.div_ceil(strategy.accumulate);
    let epochs = match args.steps {
        Some(steps) => usize::try_from(steps.div_ceil(steps_of_epoch as u64)).unwrap_or(usize::MAX),
        None => args.epochs.unwrap_or(if is_mlp { 5 } else { 3 }),
    };
    if let Some(block) = strategy.sync_blocks {
        let made = args.steps.and_then(|steps| usize::try_from(steps).ok());
        let made = made.unwrap_or(epochs.saturating_mul(steps_of_epoch));
        let needed = args.warmup_steps.saturating_add(block.saturating_mul(2));
        if made < needed {
            return usage(format!(
                "--sync-blocks {block}: two blocks and {} steps of warm-up are {needed} steps, but the run \
                 has {made}; pass more --epochs or --steps, or smaller blocks",
                args.warmup_steps
            ));
        }
    }
    if strategy.accumulate > steps_per_epoch {
        warnings.push(format!(
            "--accumulate {}: an epoch has {steps_per_epoch} batches, and no step goes beyond one: each \
             epoch is one step of {steps_per_epoch} batches",
            strategy.accumulate
        ));
    }
    let built = model.build(dataset.as_ref(), world_size).map_err(|e| {
        Failure::Usage(format!("{e}; choose other --channels, --hidden, --freeze or data"))
    })?;
    let mut config = TrainConfig {
        model,
        strategy,
        transport: args.transport,
        comm,
        device: args.device,
        world_size,
        threads: args.threads,
        pin_cores: args.pin_cores,
        init_method: resolve_init_method(&args.init_method)?,
        epochs,
        steps: args.steps,
        steps_per_epoch,
        warmup_steps: args.warmup_steps,
        batch_size: global_batch_size.div_ceil(world_size),
        global_batch_size,
        rank_samples: args.rank_samples.clone(),
        optimizer,
        schedule,
        clip_grad_norm: args.clip_grad_norm,
        seed: args.seed,
        data,
        evaluate: args.evaluate,
        eval_every: args.eval_every,
        profile: None,
        save: args.save.clone(),
        save_every: args.save_every,
        resume: Resume::resolve(args)?,
        tensorboard: args.tensorboard,
        json: args.json.clone(),
        quiet: args.quiet,
        warnings,
    };
    config.schedule.check(config.lr_steps())?;
    let (total, choice) = (config.total_steps(), config.strategy.name.name());
    config.profile = profile::resolve(&args.profile, choice, total, &mut config.warnings)?;
    let evaluates = config.evaluate || config.eval_every.is_some();
    let test = evaluates.then(|| config.data.open_test(config.seed)).transpose()?;
    let data = OpenData { train: dataset, test };
    if placement.is_some_and(Placement::is_of_train) {
        // The launcher has checked the rest before it started this rank; by now, other ranks may
        // have taken their memory.
        return Ok((config, data));
    }
    check_memory(&config, &built, data.train.as_ref())?;
    resume::check(&config, &built, data.train.len())?;
    Ok((config, data))
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
}

/// Refuses what needs one model where the ranks hold several, and warns where it matters.
fn check_drift(
    args: &TrainArgs,
    strategy: &StrategyConfig,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let flags = [
        ("--save", args.save.is_some()),
        ("--evaluate", args.evaluate),
        ("--eval-every", args.eval_every.is_some()),
    ];
    let wanted = flags.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| *flag);
    let drifts = strategy.name == StrategyName::NoSync || strategy.sync_blocks.is_some();
    if let (Some(flag), true) = (wanted, drifts) {
        return usage(format!(
            "{flag}: with {} the ranks hold different models, and none of them is worth it; leave it out",
            strategy.words()
        ));
    }
    if strategy.name == StrategyName::LocalSgd && strategy.local_sgd_as_published {
        if let Some(flag) = wanted {
            warnings.push(format!(
                "{flag}: local_sgd as published never averages the models: each rank evaluates its own, \
                 and rank 0's is saved"
            ));
        }
    } else if strategy.name == StrategyName::LocalSgd {
        let early = [
            ("--eval-every", args.eval_every.is_some(), "evaluation"),
            ("--save-every", args.save_every.is_some(), "checkpoint"),
        ];
        for (flag, _, what) in early.iter().filter(|(_, is_given, _)| *is_given) {
            warnings.push(format!(
                "{flag}: local_sgd averages its models before each {what}, and trains on from there"
            ));
        }
    }
    let is_stateless = args.momentum == 0.0 && args.optimizer == OptimizerName::Sgd;
    let lost = match strategy.name {
        StrategyName::TopK => Some("what the ranks hold back"),
        StrategyName::LocalSgd if !is_stateless => Some("the other ranks' optimizers"),
        _ => None,
    };
    if let (Some(lost), Some(_)) = (lost, &args.save) {
        warnings.push(format!(
            "--save: {lost} are no part of a checkpoint, so a run that is resumed ends with other weights \
             than one that is not"
        ));
    }
    Ok(())
}

/// The number of ranks.
pub fn resolve_world_size(args: &TrainArgs, placement: Option<&Placement>) -> Result<usize> {
    match (placement, args.nproc) {
        (Some(placement), Some(nproc)) if !placement.is_ours() => usage(format!(
            "--nproc {nproc} starts ranks of its own, but RANK and WORLD_SIZE say that another \
             launcher has started {}; leave --nproc out, or unset RANK and WORLD_SIZE",
            placement.place.world_size
        )),
        (Some(placement), _) => {
            launcher::check_num_ranks("WORLD_SIZE", placement.place.world_size)?;
            Ok(placement.place.world_size)
        }
        (None, Some(nproc)) => {
            launcher::check_num_ranks("--nproc", nproc)?;
            Ok(nproc)
        }
        (None, None) => Ok(resources::num_cores().min(2)),
    }
}

/// Checks what the ranks need of this host and of their launcher.
pub fn check_ranks(
    args: &TrainArgs,
    placement: Option<&Placement>,
    world_size: usize,
) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&args.threads) {
        return usage(format!(
            "--threads {}: a rank can have 1 to {MAX_THREADS} threads; pass a number in that range",
            args.threads
        ));
    }
    let cores = resources::num_cores();
    let local_ranks = placement.map_or(world_size, |placement| placement.place.local_world_size);
    if args.pin_cores && local_ranks * args.threads > cores {
        return usage(format!(
            "--pin-cores needs a core for each of {local_ranks} x {} threads, but there are {cores}; \
             leave it out, or lower --nproc or --threads",
            args.threads
        ));
    }
    if let Some(placement) = placement {
        let place = &placement.place;
        placement.check_transport(Some(args.transport))?;
        if args.init_method == "env://"
            && let Err(error) = place.rendezvous()
        {
            return usage(format!("{error}, or pass --init-method file:///PATH"));
        }
    }
    Ok(())
}

/// How the ranks talk to each other.
pub fn resolve_comm(
    args: &TrainArgs,
    placement: Option<&Placement>,
    world_size: usize,
) -> Result<CommConfig> {
    let comm = comm::resolve(&args.comm, &[args.transport])?;
    let is_one_host = placement.is_none_or(|placement| placement.place.is_one_host());
    // A single rank that this command has not got from a launcher needs no transport at all.
    let connects = world_size > 1 || placement.is_some();
    let refusal = comm.refusal(args.transport, world_size).filter(|_| is_one_host && connects);
    match refusal {
        Some(reason) => usage(format!("--transport {}: {reason}", args.transport.name())),
        None => Ok(comm),
    }
}

/// Where ranks of another launcher meet.
pub fn resolve_init_method(text: &str) -> Result<InitMethod> {
    match text.strip_prefix("file://") {
        _ if text == "env://" => Ok(InitMethod::Environment),
        Some(path) if path.starts_with('/') => Ok(InitMethod::File(path.into())),
        _ => usage(format!("--init-method {text}: pass env:// or file:///PATH")),
    }
}

/// Samples of a batch on all ranks, of which each has `default` unless the flags say otherwise.
pub fn resolve_batch(args: &TrainArgs, world_size: usize, default: usize) -> Result<usize> {
    match (args.batch_size, args.global_batch_size) {
        (Some(0), _) => usage("--batch-size 0: each rank needs at least one sample".into()),
        (_, Some(global)) if global < world_size => usage(format!(
            "--global-batch-size {global} is smaller than the {world_size} ranks that share it; \
             raise it, or lower --nproc"
        )),
        (_, Some(global)) => Ok(global),
        (local, None) => local
            .unwrap_or(default)
            .checked_mul(world_size)
            .map_or_else(|| usage("--batch-size is too large".into()), Ok),
    }
}

/// Refuses a run that cannot fit, before it fails half-way.
fn check_memory(config: &TrainConfig, model: &Model, dataset: &dyn Dataset) -> Result<()> {
    let Some(available) = resources::available_bytes() else { return Ok(()) };
    let elem = size_of::<f32>() as f64;
    let copies = 2.0 + config.optimizer.config().state_names().len() as f64;
    let state = model.layout.len() as f64 * copies * elem;
    let inputs = config.strategy.accumulate.min(config.steps_per_epoch) * config.batch_size;
    let inputs = (inputs * dataset.input_shape().iter().product::<usize>()) as f64 * elem;
    let activations = inputs + config.batch_size as f64 * model.activation_elems as f64 * elem;
    let data = data::resident_bytes(&config.data, dataset);
    let needed = (state + activations + data) * config.world_size as f64;
    if needed <= available as f64 {
        return Ok(());
    }
    let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
    usage(format!(
        "not enough memory: {} ranks need about {} ({} each for {} parameters with gradients and \
         optimizer state, {} for activations of {} samples), and {} are available; use a smaller \
         model, a smaller batch, or fewer ranks",
        config.world_size,
        gb(needed),
        gb(state),
        model.layout.num_params(),
        gb(activations),
        config.batch_size,
        gb(available as f64)
    ))
}

/// Tries whether everything that the run will write can be written.
fn check_outputs(config: &TrainConfig) -> Result<()> {
    let runs = crate::run::folder::runs();
    check_folder("the run folder", &runs, "start from a folder that you can write to")?;
    if let Some(folder) = &config.save {
        check_folder("--save", folder, "pass a folder that you can write to")?;
    }
    if let Some(file) = &config.json {
        check_file("--json", file)?;
    }
    config.profile.as_ref().map_or(Ok(()), ProfileConfig::check)
}
