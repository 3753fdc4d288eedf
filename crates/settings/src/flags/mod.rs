//! The flags of a run: those that every run has, and those of every choice.
//!
//! Each flag is defined once, here or in the file of the choice that reads it. Its definition has the
//! name (which is also the key in a configuration file and in a sweep), the help, the accepted values,
//! and the default. How flags combine is defined in `paceline_run::resolve`.

mod compare;
mod profile;
mod stated_by;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Args, Command};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::{self, flags_of};
use paceline_choices::strategies::STRATEGIES;
use paceline_launch::device::Device;
use paceline_numeric::Instructions;

use super::named::{AccumulationName, AmpName, Course, PrecisionName, TransportName};

pub use compare::{CompareFlags, Comparison, Several};
pub use paceline_launch::CommArgs;
pub use profile::ProfileArgs;
pub use stated_by::{RANKS_PER_CORE, is_recorded, is_repeated};

/// The flags that every run has.
#[derive(Clone, Debug, Args)]
pub struct RunFlags {
    /// Model
    #[arg(long, value_parser = MODELS.parser(), default_value = MODELS.default_name(), help_heading = "Model")]
    pub model: String,
    /// Do not train these layers: conv0, fc0, ...
    #[arg(long, num_args = 1.., value_name = "LAYER", help_heading = "Model")]
    pub freeze: Vec<String>,

    /// Ranks on this host [default: 2, or the number of cores if smaller]
    // With torchrun's names for it, and mpirun's letter.
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        aliases = ["nproc-per-node", "nproc_per_node"],
        help_heading = "Ranks"
    )]
    pub nproc: Option<usize>,
    /// Axes of the grid of ranks with their sizes, as in dp=4; the strategy says which axes it knows
    /// [default: dp, of all ranks]
    #[arg(long, value_name = "AXIS=N,...", help_heading = "Ranks")]
    pub mesh: Option<String>,
    /// The schedule of a pipeline, whose stages lie along the axis pp of --mesh (paceline schedule lists them), or auto: the best
    /// by rehearsal with measured costs [default: 1f1b]
    #[arg(long, value_name = "NAME", help_heading = "Ranks")]
    pub schedule: Option<String>,
    /// Units with which the stages of a pipeline begin, but the first one, such as fc0 for two stages, or measured: the best by
    /// rehearsal with measured costs [default: a cut by which the stage with most arithmetic has as little as can be]
    #[arg(long, num_args = 1.., value_name = "UNIT", value_delimiter = ',', help_heading = "Ranks")]
    pub stages: Vec<String>,
    /// Schedules that put off the gradients of weights do so for those of a language model's head too, which keeps as much as
    /// all its outputs; with this they are computed with the loss
    #[arg(long, help_heading = "Ranks")]
    pub head_at_once: bool,
    /// The most that a rank of a pipeline may keep of micro-batches in flight, in MB, for --schedule auto and --stages measured
    #[arg(long, value_name = "MB", help_heading = "Ranks")]
    pub pipeline_memory: Option<f64>,
    /// Compute threads per rank
    #[arg(long, value_name = "T", default_value_t = 1, help_heading = "Ranks")]
    pub threads: usize,
    /// Compute with these vector instructions instead of the best that the processor has; avx512-bf16 and amx are AVX-512 with
    /// another way to multiply in bf16 [default: $PACELINE_SIMD, or the best]
    #[arg(long, value_name = "NAME", value_parser = simd_parser(), help_heading = "Ranks")]
    pub simd: Option<Instructions>,
    /// How the ranks reach each other; with --nnodes, hybrid by default, or tcp if each host has one rank
    #[arg(long, alias = "backend", value_enum, default_value_t = TransportName::Shm, help_heading = "Ranks")]
    pub transport: TransportName,
    /// Where to compute: cpu, cuda, or sim, an accelerator emulated on the processor (sim:copy=16gbit,10us,launch=5us states its
    /// copies and launches; sim:late,seed=7 runs its work as late as possible, to find waits that are missing)
    #[arg(long, value_name = "DEVICE", default_value = "cpu", help_heading = "Ranks")]
    pub device: Device,
    /// Load batches into pinned memory, which a device copies at its full bandwidth, and without the host
    #[arg(long, help_heading = "Data")]
    pub pin_memory: bool,
    /// Let the host go on while a batch is copied to the device; from memory that is not pinned it waits all the same
    #[arg(long, help_heading = "Data")]
    pub non_blocking: bool,
    /// Copy the next batch to the device on a stream of its own, beside the step
    #[arg(long, help_heading = "Data")]
    pub copy_stream: bool,
    /// Batches that a thread makes ahead of the step; with 0, each is made in line, when the step asks for it
    /// [default: 2, or 0 for data made from the seed]
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub load_ahead: Option<usize>,
    /// Spend this many microseconds of a core on each sample that is loaded for training, as if it had to be decoded
    #[arg(long, value_name = "US", default_value_t = 0.0, help_heading = "Data")]
    pub decode_us: f64,
    /// Make synthetic data on the host and copy it to the device, like data that is read
    #[arg(long, help_heading = "Data")]
    pub generate_on_host: bool,
    /// Element type of products and activations
    #[arg(long, value_enum, default_value_t = PrecisionName::F32, help_heading = "Ranks")]
    pub precision: PrecisionName,
    /// Mixed precision, as PyTorch names it: --precision bf16, or that of the type
    #[arg(
        long,
        value_enum,
        value_name = "TYPE",
        num_args = 0..=1,
        default_missing_value = "bf16",
        help_heading = "Ranks"
    )]
    pub amp: Option<AmpName>,
    /// Compute --precision fp16 on a processor: each result is rounded as fp16 would round it. Shows what fp16 does to the numbers,
    /// and takes longer than f32
    #[arg(long, help_heading = "Ranks")]
    pub emulate_fp16: bool,
    /// Let a card multiply in f32 on its tensor cores, which round the factors to TF32
    #[arg(long, help_heading = "Ranks")]
    pub tf32: bool,
    /// Launch the passes of a step as one graph of a card, and the optimizer's work as another
    #[arg(long, help_heading = "Ranks")]
    pub cuda_graph: bool,
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,
    /// Give each rank cores of its own
    #[arg(long, help_heading = "Ranks")]
    pub pin_cores: bool,
    /// Where ranks started by hand or by another launcher meet: env:// or file:///PATH
    #[arg(long, value_name = "URL", default_value = "env://", help_heading = "Ranks")]
    pub init_method: String,

    /// How the ranks keep their models equal.
    #[command(flatten)]
    pub strategy: StrategyFlags,
    /// Whether to compare strategies.
    #[command(flatten)]
    pub compare: CompareFlags,

    /// Passes over the data [default: 3, or 5 for the MLP]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub epochs: Option<usize>,
    /// Optimizer steps after which the run ends; it makes as many passes over the data as that takes
    #[arg(long, value_name = "N", conflicts_with = "epochs", help_heading = "Training")]
    pub steps: Option<u64>,
    /// Largest number of batches per epoch, of which --accumulate N makes one step of N [default: all of the data, or 20 batches
    /// of vectors or tokens made from the seed]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps_per_epoch: Option<usize>,
    /// Number of first steps that are left out of the measurements
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Training")]
    pub warmup_steps: usize,
    /// Samples of a batch on each rank; a sample of a language model is a sequence. A step has one batch, or those of
    /// --accumulate [default: 64, or 256 for the MLP, or 4 for Llama]
    #[arg(long, value_name = "N", conflicts_with = "global_batch_size", help_heading = "Training")]
    pub batch_size: Option<usize>,
    /// Samples of a batch on all ranks together, instead of --batch-size. With --accumulate N, a step has N times as many
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub global_batch_size: Option<usize>,
    /// Optimizer
    #[arg(
        long,
        value_parser = OPTIMIZERS.parser(),
        default_value = OPTIMIZERS.default_name(),
        help_heading = "Training"
    )]
    pub optimizer: String,
    /// How the learning rate changes (until the end of the run)
    #[arg(long, value_enum, value_name = "NAME", default_value_t = Course::Constant, help_heading = "Training")]
    pub lr_schedule: Course,
    /// Number of first optimizer steps over which the learning rate rises; unlike --warmup-steps, which
    /// is about measuring
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub lr_warmup_steps: u64,
    /// Learning rate at which linear and cosine end [default: 0]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub min_lr: Option<f64>,
    /// Optimizer steps after which linear and cosine end [default: those of the run]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub lr_steps: Option<u64>,
    /// Scale all gradients down if their common norm is larger than this
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub clip_grad_norm: Option<f64>,
    /// Multiply the loss by a power of two before the backward pass, so that small gradients stay within the range of fp16, and
    /// skip steps whose gradients overflow: a number, or dynamic, which begins at 65536 (or dynamic:N) and is halved and doubled
    /// as PyTorch's GradScaler does [default: dynamic with --precision fp16]
    #[arg(long, value_name = "N|dynamic", help_heading = "Training")]
    pub loss_scale: Option<String>,
    /// Good steps after which --loss-scale dynamic is doubled [default: 2000]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub loss_scale_window: Option<u64>,
    /// Decides initial weights, the order of samples and synthetic data
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// Data set. Nothing is downloaded unless you ask for it, so the default needs no files: it is made from --seed
    #[arg(
        long,
        value_parser = DATA_SETS.parser(),
        default_value = DATA_SETS.default_name(),
        help_heading = "Data"
    )]
    pub data: String,
    /// The same as --data synthetic
    #[arg(long, conflicts_with = "data", help_heading = "Data")]
    pub synthetic: bool,
    /// Number of training samples of each rank, one number per rank. Each rank then trains on its own
    /// shard of the training set, in batches of --batch-size
    #[arg(long, num_args = 1.., value_name = "N", help_heading = "Data")]
    pub rank_samples: Option<Vec<usize>>,
    /// Evaluate on the test set after training
    #[arg(long, help_heading = "Data")]
    pub evaluate: bool,
    /// Evaluate on the test set after every N optimizer steps
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub eval_every: Option<u64>,
    /// End the run after N evaluations of --eval-every in a row without a lower loss
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub early_stop: Option<u64>,

    /// Whether to write traces.
    #[command(flatten)]
    pub profile: ProfileArgs,

    /// Name of the run folder, which gets a number if there is one of this name [default: time, model and strategy]
    // The flag --strategy has the identifier `name`.
    #[arg(id = "run_name", long = "name", value_name = "NAME", help_heading = "Output")]
    pub name: Option<String>,
    /// Folder in which run folders are made [default: $PACELINE_RUNS, or runs]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub run_dir: Option<PathBuf>,
    /// Write a checkpoint into this folder after every epoch and at the end of the run
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub save: Option<PathBuf>,
    /// Also keep the checkpoint with the lowest loss of all evaluations of --eval-every, in the folder best within that of --save
    #[arg(long, requires = "save", help_heading = "Output")]
    pub save_best: bool,
    /// Write the checkpoint after every N optimizer steps instead of after every epoch
    #[arg(long, value_name = "N", requires = "save", help_heading = "Output")]
    pub save_every: Option<u64>,
    /// Keep the last N checkpoints, and the last one that the steps after it have proven
    #[arg(long, value_name = "N", requires = "save", default_value_t = 2, help_heading = "Output")]
    pub save_keep: usize,
    /// Memory of each rank for the copy from which a checkpoint is written, in MiB; if the copy does not
    /// fit, training waits while the rest is written [default: as much as the copy takes]
    #[arg(long, value_name = "MiB", requires = "save", help_heading = "Output")]
    pub save_budget_mb: Option<usize>,
    /// Go on training only when a checkpoint is complete, and not while it is written
    #[arg(long, requires = "save", help_heading = "Output")]
    pub save_sync: bool,
    /// Continue from the checkpoint in this folder; with auto, from the one in the folder of --save, if
    /// there is one yet
    #[arg(long, value_name = "DIR|auto", help_heading = "Output")]
    pub resume: Option<PathBuf>,
    /// Print a line for every N batches, with their times on rank 0, and mean times after each epoch and at the end
    /// [default: at most 4 lines without times in a run, and one a minute; a bar on a terminal]
    #[arg(long, value_name = "N", help_heading = "Output")]
    pub log_every: Option<usize>,
    /// Print what a language model makes of the beginning of a text after every N optimizer steps
    #[arg(long, value_name = "N", help_heading = "Output")]
    pub sample_every: Option<u64>,
    /// Write scalars of steps and evaluations for TensorBoard. They are in the run folder, whose name TensorBoard shows
    #[arg(long, help_heading = "Output")]
    pub tensorboard: bool,
    /// Write the summary to this file too
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Print all that there is: where each rank is, the parts of communication, and memory by phase. summary.txt in the run
    /// folder has it too, and paceline show prints that
    #[arg(long, conflicts_with = "quiet", help_heading = "Output")]
    pub verbose: bool,
    /// Print nothing but errors
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
}

/// Flags about how the ranks keep their models equal. Flags that only some strategies read are defined
/// with these.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Strategy")]
pub struct StrategyFlags {
    /// How the ranks keep their models equal [default: ddp, or single with one rank]
    #[arg(long = "strategy", value_parser = STRATEGIES.parser(), value_name = "NAME")]
    pub name: Option<String>,
    /// Batches whose gradients add up before each optimizer step [default: 1, or 4 for simple_ddp_ga]
    #[arg(
        long,
        value_name = "N",
        aliases = ["gradient-accumulation-steps", "gradient_accumulation_steps"]
    )]
    pub accumulate: Option<usize>,
    /// The order in which a rank adds up the gradients of its batches. tree takes one copy of the gradients for 2 or 3
    /// batches, two for 4 to 7, three for 8 to 15
    #[arg(long, value_enum, value_name = "ORDER", default_value_t = AccumulationName::Sequential)]
    pub accumulation_order: AccumulationName,
    /// Reduce the gradients only after the last batch of a step; with --no-sync off after each, which sends --accumulate times
    /// as much
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        default_value_t = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        action = ArgAction::Set
    )]
    pub no_sync: bool,
    /// Allow parameters that get no gradient in a step; their gradient is then zero
    #[arg(long)]
    pub find_unused_parameters: bool,
    /// With --find-unused-parameters: the parameters without a gradient may differ from step to step
    #[arg(long)]
    pub no_static_graph: bool,
    /// With --batch-norm: normalize by the samples of all ranks, not of each rank alone
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// With --batch-norm: all ranks take rank 0's running statistics before each step
    #[arg(long)]
    pub broadcast_buffers: bool,
    /// Alternate blocks of N synchronized and N unsynchronized steps, and print how much longer the
    /// synchronized ones take
    #[arg(long, value_name = "N")]
    pub sync_blocks: Option<usize>,
}

fn simd_parser() -> impl TypedValueParser<Value = Instructions> {
    PossibleValuesParser::new(Instructions::ALL.map(Instructions::name))
        .try_map(|name| name.parse::<Instructions>())
}

/// Every flag of a run, in the order of the help. The flags of choices follow the flag that names one.
///
/// A command asks for them a dozen times, and they take thousands of allocations, so they are made once, and again when the
/// program has added a choice.
pub fn all() -> Arc<[Arg]> {
    /// The flags, and of how many choices they are. Choices are only ever added.
    type Made = ([usize; 4], Arc<[Arg]>);
    static MADE: Mutex<Option<Made>> = Mutex::new(None);
    let num_choices = [
        MODELS.num_choices(),
        DATA_SETS.num_choices(),
        OPTIMIZERS.num_choices(),
        STRATEGIES.num_choices(),
    ];
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, flags) = match made.take().filter(|(of, _)| *of == num_choices) {
        Some(known) => made.insert(known),
        None => made.insert((num_choices, make())),
    };
    flags.clone()
}

fn make() -> Arc<[Arg]> {
    let mut flags: Vec<Arg> = Vec::new();
    for flag in flags_of::<RunFlags>() {
        let of_choices = match key(&flag) {
            key if key == MODELS.key => MODELS.flags(),
            key if key == DATA_SETS.key => DATA_SETS.flags(),
            key if key == OPTIMIZERS.key => OPTIMIZERS.flags(),
            key if key == STRATEGIES.key => STRATEGIES.flags(),
            _ => Vec::new(),
        };
        flags.push(flag);
        flags.extend(of_choices);
    }
    let ordered = flags.into_iter().enumerate();
    ordered.map(|(place, flag)| switch(flag).display_order(place)).collect()
}

/// The name of a flag, without dashes.
pub fn key(flag: &Arg) -> &str {
    flag.get_long().unwrap_or(flag.get_id().as_str())
}

/// Whether the flag of this name takes several values.
pub fn takes_list(name: &str) -> bool {
    all().iter().any(|flag| key(flag) == name && registry::takes_list(flag))
}

/// The `clap` command that parses the flags of a run.
pub fn command() -> Command {
    // With negative numbers allowed, "--lr -1" is rejected as a value, not as an unknown flag.
    Command::new("paceline train").allow_negative_numbers(true).args(all().iter().cloned())
}

/// Lets a switch take a value, as in `--batch-norm=false`, so that a flag can turn off what a file turns
/// on.
fn switch(flag: Arg) -> Arg {
    if !matches!(flag.get_action(), ArgAction::SetTrue) {
        return flag;
    }
    flag.action(ArgAction::Set)
        .value_parser(clap::value_parser!(bool))
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .default_value("false")
        .value_name("BOOL")
        .hide_default_value(true)
        .hide_possible_values(true)
}
