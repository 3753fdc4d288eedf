//! From flags to one resolved configuration, checked as a whole before any rank starts.

use std::path::PathBuf;

use paceline_data::Dataset;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_model::{CnnConfig, MlpConfig, Model, ModelError, OptimizerConfig};
use serde::Serialize;

use crate::cli::{DeviceName, ModelName, OptimizerName, StrategyArgs, TrainArgs, TransportName};
use crate::comm::{self, CommConfig};
use crate::data::{self, DataConfig};
use crate::environment::Placement;
use crate::outputs::{check_file, check_folder};
use crate::resume::{self, Resume};
use crate::schedule::Schedule;
use crate::strategy::{self, StrategyConfig};
use crate::{Failure, Result, compare, download, feed, launcher, resources};

/// Threads per rank at most. More than any host has cores to give.
const MAX_THREADS: usize = 1024;

/// What to train.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum ModelSettings {
    /// The CNN.
    Cnn {
        /// Output channels of each convolution.
        channels: Vec<usize>,
        /// Width of the hidden layer.
        hidden: usize,
        /// Whether batch normalization follows each convolution.
        batch_norm: bool,
        /// Whether there is a head that the loss does not use.
        unused_head: bool,
        /// Units that are not trained.
        frozen: Vec<String>,
    },
    /// The MLP.
    Mlp {
        /// Inputs.
        input_dim: usize,
        /// Width of the hidden layers.
        hidden_dim: usize,
        /// Outputs.
        output_dim: usize,
        /// Hidden layers.
        num_layers: usize,
        /// Whether all but the first share their parameters.
        tie_layers: bool,
        /// Units that are not trained.
        frozen: Vec<String>,
    },
}

impl ModelSettings {
    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            ModelSettings::Cnn { .. } => "cnn",
            ModelSettings::Mlp { .. } => "mlp",
        }
    }

    /// Builds the model for data of this kind.
    pub fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let (mut model, frozen) = match self {
            ModelSettings::Cnn { channels, hidden, batch_norm, unused_head, frozen } => {
                let shape = dataset.input_shape();
                let image = shape.try_into().map_err(|_| {
                    ModelError::Config(format!("a CNN needs images, not samples of {shape:?}"))
                })?;
                let num_classes = data::num_classes(dataset)
                    .ok_or_else(|| ModelError::Config("a CNN needs classes as targets".into()))?;
                let config = CnnConfig {
                    image,
                    channels: channels.clone(),
                    hidden: *hidden,
                    num_classes,
                    batch_norm: *batch_norm,
                    unused_head: *unused_head,
                };
                (config.build(world_size)?, frozen)
            }
            ModelSettings::Mlp {
                input_dim,
                hidden_dim,
                output_dim,
                num_layers,
                tie_layers,
                frozen,
            } => {
                let config = MlpConfig {
                    input_dim: *input_dim,
                    hidden_dim: *hidden_dim,
                    output_dim: *output_dim,
                    num_layers: *num_layers,
                    tie_layers: *tie_layers,
                };
                (config.build(world_size)?, frozen)
            }
        };
        if !frozen.is_empty() {
            model.freeze(frozen)?;
        }
        Ok(model)
    }
}

/// The optimizer's settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum OptimizerSettings {
    /// Stochastic gradient descent.
    Sgd {
        /// Learning rate.
        lr: f64,
        /// Momentum.
        momentum: f64,
        /// Weight decay.
        weight_decay: f64,
    },
    /// AdamW with PyTorch's betas and epsilon.
    Adamw {
        /// Learning rate.
        lr: f64,
        /// Weight decay.
        weight_decay: f64,
    },
}

impl OptimizerSettings {
    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            OptimizerSettings::Sgd { lr, .. } | OptimizerSettings::Adamw { lr, .. } => *lr,
        }
    }

    /// For the model crate.
    pub fn config(&self) -> OptimizerConfig {
        match *self {
            OptimizerSettings::Sgd { lr, momentum, weight_decay } => {
                OptimizerConfig::Sgd(Sgd { lr, momentum, weight_decay })
            }
            OptimizerSettings::Adamw { lr, weight_decay } => OptimizerConfig::AdamW(AdamW {
                lr,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay,
            }),
        }
    }
}

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
    /// Passes over the data.
    pub epochs: usize,
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
    /// Folder to write checkpoints to.
    pub save: Option<PathBuf>,
    /// What to continue from.
    pub resume: Option<Resume>,
    /// File to write the summary to.
    pub json: Option<PathBuf>,
    /// Whether to be silent.
    pub quiet: bool,
    /// What the flags asked for and did not get, in words.
    pub warnings: Vec<String>,
}

impl TrainConfig {
    /// Optimizer steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        let per_epoch = self.steps_per_epoch.div_ceil(self.strategy.accumulate);
        (self.epochs as u64).saturating_mul(per_epoch as u64)
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
        self.schedule.lr(self.optimizer.lr(), steps_made, self.total_steps())
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
pub fn resolve(args: &TrainArgs, placement: Option<&Placement>) -> Result<TrainConfig> {
    let config = resolve_inputs(args, placement)?;
    // The launcher has tried it before it started this rank.
    if !placement.is_some_and(Placement::is_of_train) {
        check_outputs(&config)?;
    }
    Ok(config)
}

/// The same for a run whose outputs go elsewhere: touches nothing.
pub fn resolve_inputs(args: &TrainArgs, placement: Option<&Placement>) -> Result<TrainConfig> {
    let is_mlp = args.model == ModelName::Mlp;
    let model = resolve_model(args)?;
    let world_size = resolve_world_size(args, placement)?;
    check_ranks(args, placement, world_size)?;
    let comm = resolve_comm(args, placement, world_size)?;
    let mut warnings = Vec::new();
    let name = compare::chosen(&args.compare, args.strategy.name)?;
    let strategy = StrategyArgs { name, ..args.strategy.clone() };
    let strategy = strategy::resolve(&strategy, world_size, is_mlp, &mut warnings)?;
    let optimizer = resolve_optimizer(args)?;
    if let Some(norm) = args.clip_grad_norm.filter(|norm| !(*norm > 0.0 && norm.is_finite())) {
        return usage(format!("--clip-grad-norm {norm}: pass a number above zero"));
    }
    if args.clip_grad_norm.is_some() && !strategy.name.has_common_gradients() {
        return usage(format!(
            "--clip-grad-norm: with --strategy {} each rank has gradients of its own, whose norms \
             differ; leave it out, or pass another strategy",
            strategy.name.name()
        ));
    }
    let schedule = Schedule::resolve(args, optimizer.lr())?;
    let global_batch_size = resolve_batch(args, world_size, if is_mlp { 256 } else { 64 })?;
    let epochs = args.epochs.unwrap_or(if is_mlp { 5 } else { 3 });
    if epochs == 0 || args.steps_per_epoch == Some(0) {
        return usage("--epochs and --steps-per-epoch must be at least 1".into());
    }
    let data = data::resolve(args, &model, global_batch_size)?;
    if args.download && !placement.is_some_and(Placement::is_of_train) {
        download::download(&data, args.mirror.as_deref(), args.quiet)?;
    }
    let dataset = data.open_train(args.seed)?;
    let natural_steps = match &args.rank_samples {
        Some(samples) => {
            feed::check_rank_samples(args, samples, world_size, dataset.len())?;
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
    let config = TrainConfig {
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
        save: args.save.clone(),
        resume: Resume::resolve(args)?,
        json: args.json.clone(),
        quiet: args.quiet,
        warnings,
    };
    config.schedule.check(config.total_steps())?;
    if config.evaluate || config.eval_every.is_some() {
        config.data.open_test(config.seed)?;
    }
    if placement.is_some_and(Placement::is_of_train) {
        // The launcher has checked the rest before it started this rank; by now, other ranks may
        // have taken their memory.
        return Ok(config);
    }
    check_memory(&config, &built, dataset.as_ref())?;
    resume::check(&config, &built)?;
    Ok(config)
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
}

fn resolve_model(args: &TrainArgs) -> Result<ModelSettings> {
    let given = |flags: &[(&str, bool)]| {
        flags.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag.to_string())
    };
    let cnn_flag = given(&[
        ("--channels", args.channels.is_some()),
        ("--hidden", args.hidden.is_some()),
        ("--batch-norm", args.batch_norm),
        ("--unused-head", args.unused_head),
    ]);
    let mlp_flag = given(&[
        ("--input-dim", args.input_dim.is_some()),
        ("--hidden-dim", args.hidden_dim.is_some()),
        ("--output-dim", args.output_dim.is_some()),
        ("--num-layers", args.num_layers.is_some()),
        ("--tie-layers", args.tie_layers),
    ]);
    let (name, foreign) = match args.model {
        ModelName::Cnn => ("cnn", mlp_flag),
        ModelName::Mlp => ("mlp", cnn_flag),
    };
    if let Some(flag) = foreign {
        return usage(format!("{flag} does not apply to --model {name}; leave it out"));
    }
    let needs_batch_norm = given(&[
        ("--sync-batch-norm", args.strategy.sync_batch_norm),
        ("--broadcast-buffers", args.strategy.broadcast_buffers),
    ]);
    if let (Some(flag), false) = (needs_batch_norm, args.batch_norm) {
        let fix = match args.model {
            ModelName::Cnn => "; add it, or leave this out",
            ModelName::Mlp => ", which is for --model cnn; leave this out",
        };
        return usage(format!("{flag} needs --batch-norm{fix}"));
    }
    let or = |value: Option<u64>, default: usize| value.map_or(default, |v| v as usize);
    let sizes: Vec<(&str, usize)> = match args.model {
        ModelName::Cnn => {
            let channels = args.channels.clone().unwrap_or_else(|| vec![32, 64, 128]);
            let channels = channels.into_iter().map(|c| ("--channels", c as usize));
            channels.chain([("--hidden", or(args.hidden, 512))]).collect()
        }
        ModelName::Mlp => vec![
            ("--input-dim", or(args.input_dim, 4096)),
            ("--hidden-dim", or(args.hidden_dim, 4096)),
            ("--output-dim", or(args.output_dim, 2048)),
        ],
    };
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return usage(format!("{flag} must be above zero everywhere"));
    }
    let sizes: Vec<usize> = sizes.into_iter().map(|(_, size)| size).collect();
    let frozen = args.freeze.clone();
    Ok(match (args.model, sizes.as_slice()) {
        (ModelName::Mlp, &[input_dim, hidden_dim, output_dim]) => {
            let num_layers = args.num_layers.unwrap_or(3);
            if num_layers > 10_000 {
                return usage(format!("--num-layers {num_layers}: at most 10000"));
            }
            let tie_layers = args.tie_layers;
            if tie_layers && num_layers < 3 {
                return usage(format!(
                    "--tie-layers: of {num_layers} hidden layers there are none to share with; pass \
                     --num-layers 3 or more"
                ));
            }
            ModelSettings::Mlp { input_dim, hidden_dim, output_dim, num_layers, tie_layers, frozen }
        }
        (_, [channels @ .., hidden]) => {
            let (channels, hidden) = (channels.to_vec(), *hidden);
            let (batch_norm, unused_head) = (args.batch_norm, args.unused_head);
            ModelSettings::Cnn { channels, hidden, batch_norm, unused_head, frozen }
        }
        (_, []) => return usage("--channels must name at least one convolution".into()),
    })
}

fn resolve_world_size(args: &TrainArgs, placement: Option<&Placement>) -> Result<usize> {
    match (placement, args.nproc) {
        (Some(placement), Some(nproc)) if !placement.is_of_train() => usage(format!(
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

fn check_ranks(args: &TrainArgs, placement: Option<&Placement>, world_size: usize) -> Result<()> {
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
            && let Err(error) = place.meeting()
        {
            return usage(format!("{error}, or pass --init-method file:///PATH"));
        }
    }
    Ok(())
}

fn resolve_comm(
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

fn resolve_init_method(text: &str) -> Result<InitMethod> {
    match text.strip_prefix("file://") {
        _ if text == "env://" => Ok(InitMethod::Environment),
        Some(path) if path.starts_with('/') => Ok(InitMethod::File(path.into())),
        _ => usage(format!("--init-method {text}: pass env:// or file:///PATH")),
    }
}

fn resolve_optimizer(args: &TrainArgs) -> Result<OptimizerSettings> {
    let is_adamw = args.optimizer == OptimizerName::Adamw;
    let lr = args.lr.unwrap_or(if is_adamw { 0.001 } else { 0.01 });
    let weight_decay = args.weight_decay.unwrap_or(if is_adamw { 0.01 } else { 0.0 });
    let momentum = args.momentum;
    for (flag, value) in [("--lr", lr), ("--weight-decay", weight_decay), ("--momentum", momentum)]
    {
        if !(value >= 0.0 && value.is_finite()) {
            return usage(format!("{flag} {value}: pass a number that is not negative"));
        }
    }
    if is_adamw && momentum != 0.0 {
        return usage("--momentum belongs to --optimizer sgd; leave it out for adamw".into());
    }
    Ok(match args.optimizer {
        OptimizerName::Sgd => OptimizerSettings::Sgd { lr, momentum, weight_decay },
        OptimizerName::Adamw => OptimizerSettings::Adamw { lr, weight_decay },
    })
}

fn resolve_batch(args: &TrainArgs, world_size: usize, default: usize) -> Result<usize> {
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
    let runs = crate::run_folder::runs();
    check_folder("the run folder", &runs, "start from a folder that you can write to")?;
    if let Some(folder) = &config.save {
        check_folder("--save", folder, "pass a folder that you can write to")?;
    }
    if let Some(file) = &config.json {
        check_file("--json", file)?;
    }
    Ok(())
}
