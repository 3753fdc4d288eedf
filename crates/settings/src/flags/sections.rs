//! The flags of a run by what they are about. A flag is a field, with its help, its values and its default. The heading of its
//! struct decides who may state it ([`super::Scope`]).

use std::path::PathBuf;

use clap::builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use paceline_choices::data::DATA_SETS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::strategies::STRATEGIES;
use paceline_collectives::{MAX_RANKS, MeshShape};
use paceline_failure::numbers::{above_zero, at_least, within};
use paceline_launch::device::Device;
use paceline_numeric::Instructions;
use paceline_strategies::schedule::SCHEDULES;
use serde::Serialize;

use super::PLACES;
use crate::loss_scale::LossScale;
use crate::named::{AccumulationName, AmpName, PrecisionName, TransportName};
use crate::pipeline::AUTO;
use crate::ranks::InitMethod;

/// The largest number of threads per rank, which is more than any host has cores.
const MAX_THREADS: usize = 1024;
/// The most batches that a thread makes ahead of the step.
const MAX_AHEAD: usize = 1000;
/// The longest that a sample may take to decode, in microseconds: a second.
const MAX_DECODE_US: f64 = 1e6;

/// Flags about the ranks, and where they compute.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub struct RankFlags {
    /// Ranks on this host [default: 2, or the number of cores if smaller]
    // With torchrun's names for it, and mpirun's letter.
    #[arg(short = 'n', long, value_name = "N", aliases = ["nproc-per-node", "nproc_per_node"], value_parser = within(1, MAX_RANKS))]
    pub nproc: Option<usize>,
    /// Compute with these vector instructions instead of the best that the processor has; fma has the same bits on every
    /// processor with AVX2 or AVX-512, also in bf16, which avx512-bf16 and amx multiply in another way [default:
    /// $PACELINE_SIMD, or the best]
    #[arg(long, value_name = "NAME", value_parser = simd_parser())]
    pub simd: Option<Instructions>,
    /// How the ranks reach each other; with --nnodes, hybrid by default, or tcp if each host has one rank
    #[arg(long, alias = "backend", value_enum, default_value_t = TransportName::Shm)]
    pub transport: TransportName,
    /// Where to compute: cpu, cuda, auto, or sim, a device emulated on the processor (cuda:N is one card, and auto is cuda if
    /// there is a card; sim:copy=16gbit,10us,launch=5us states copies and launches; sim:late,seed=7 runs work as late as possible, to
    /// find waits that are missing)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Launch the passes of a step as one graph of a card, and the optimizer's work as another
    #[arg(long)]
    pub cuda_graph: bool,
    /// Where ranks started by hand or by another launcher meet: env:// or file:///PATH
    #[arg(long, value_name = "URL", default_value = "env://", help_heading = PLACES)]
    pub init_method: InitMethod,
}

/// Flags about how a host computes and loads its part.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Host")]
pub struct HostFlags {
    /// Compute threads per rank
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = within(1, MAX_THREADS))]
    pub threads: usize,
    /// Give each rank cores of its own
    #[arg(long)]
    pub pin_cores: bool,
    /// Batches that a thread makes ahead of the step; with 0, each is made in line, when the step asks for it
    /// [default: 2, or 0 for data made from the seed]
    #[arg(long, value_name = "N", value_parser = within(0, MAX_AHEAD))]
    pub load_ahead: Option<usize>,
    /// Spend this many microseconds of a core on each sample that is loaded for training, as if it had to be decoded
    #[arg(long, value_name = "US", default_value_t = 0.0, value_parser = within(0.0, MAX_DECODE_US))]
    pub decode_us: f64,
}

/// Flags about a pipeline.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Pipeline")]
pub struct PipelineFlags {
    /// The schedule of a pipeline, whose stages lie along the axis pp of --mesh (paceline schedule lists them), or auto: the best
    /// by rehearsal with measured costs [default: 1f1b]
    #[arg(long, value_name = "NAME", value_parser = schedules(), hide_possible_values = true)]
    pub schedule: Option<String>,
    /// First unit of every stage except stage 0, such as fc0 for two stages, or measured: the best by rehearsal with measured
    /// costs [default: the cut whose slowest stage, loss included, is fastest]
    #[arg(long, num_args = 1.., value_name = "UNIT", value_delimiter = ',')]
    pub stages: Vec<String>,
    /// Schedules that postpone the gradients of weights do so for a language model's head too, which keeps as much as all its
    /// outputs; with this they are computed with the loss
    #[arg(long)]
    pub head_at_once: bool,
    /// The most that a rank of a pipeline may keep of micro-batches in flight, in MB, for --schedule auto and --stages measured
    #[arg(long, value_name = "MB", value_parser = within(1e-6, 1e12))]
    pub pipeline_memory: Option<f64>,
}

/// Flags about how products are computed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Precision")]
pub struct PrecisionFlags {
    /// Element type of products and activations
    #[arg(long, value_enum, default_value_t = PrecisionName::F32)]
    pub precision: PrecisionName,
    /// Mixed precision, as PyTorch names it: --precision bf16, or that of the type
    #[arg(long, value_enum, value_name = "TYPE", num_args = 0..=1, default_missing_value = "bf16")]
    pub amp: Option<AmpName>,
    /// Compute --precision fp16 on a processor: each result is rounded as fp16 would round it. Shows the effect of fp16 on the numbers,
    /// and takes longer than f32
    #[arg(long)]
    pub emulate_fp16: bool,
    /// Let a card multiply in f32 on its tensor cores, which round the factors to TF32
    #[arg(long)]
    pub tf32: bool,
}

/// Flags about steps.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingFlags {
    /// Passes over the data [default: 3, or 5 for the MLP]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    pub epochs: Option<usize>,
    /// Optimizer steps after which the run ends; it makes as many passes over the data as that takes
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = at_least::<u64>(1))]
    pub steps: Option<u64>,
    /// Largest number of batches per epoch; --accumulate N makes one step of N [default: all of the data, or 20 batches
    /// of vectors or tokens made from the seed]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    pub steps_per_epoch: Option<usize>,
    /// Number of first steps that are left out of the measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub warmup_steps: usize,
    /// Samples of a batch on each rank; a sample of a language model is a sequence. A step has one batch, or those of
    /// --accumulate [default: 64, or 256 for the MLP, or 4 for Llama]
    #[arg(long, value_name = "N", conflicts_with = "global_batch_size", value_parser = at_least::<usize>(1))]
    pub batch_size: Option<usize>,
    /// Samples of a batch on all ranks together, instead of --batch-size. With --accumulate N, a step has N times as many
    #[arg(long, value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Optimizer
    #[arg(long, value_parser = OPTIMIZERS.parser(), default_value = OPTIMIZERS.default_name())]
    pub optimizer: String,
    /// Scale all gradients down if their common norm is larger than this
    #[arg(long, value_name = "X", value_parser = above_zero)]
    pub clip_grad_norm: Option<f64>,
    /// Decides initial weights, the order of samples and synthetic data
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

/// Flags about how the loss is scaled.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Training")]
pub struct LossScaleFlags {
    /// Multiply the loss by a power of two before the backward pass, so that small gradients stay within the range of fp16, and
    /// skip steps whose gradients overflow: a number, or dynamic, which begins at 65536 (or dynamic:N) and is halved and doubled
    /// as PyTorch's GradScaler does [default: dynamic with --precision fp16]
    #[arg(long, value_name = "N|dynamic")]
    pub loss_scale: Option<LossScale>,
    /// Good steps after which --loss-scale dynamic is doubled [default: 2000]
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    pub loss_scale_window: Option<u64>,
}

/// Flags about the data.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Data")]
pub struct DataFlags {
    /// Data set. Nothing is downloaded unless you ask for it, so the default needs no files: it is made from --seed
    #[arg(long, value_parser = DATA_SETS.parser(), default_value = DATA_SETS.default_name())]
    pub data: String,
    /// The same as --data synthetic
    #[arg(long, conflicts_with = "data")]
    pub synthetic: bool,
    /// Number of training samples of each rank, one number per rank. Each rank then trains on its own
    /// shard of the training set, in batches of --batch-size
    #[arg(long, num_args = 1.., value_name = "N")]
    pub rank_samples: Option<Vec<usize>>,
}

/// Flags about the output of a run.
#[derive(Clone, Debug, Args, Serialize)]
#[command(next_help_heading = "Output")]
pub struct OutputFlags {
    /// Name of the run folder, which gets a number if there is one of this name [default: time, model and strategy]
    // The flag --strategy has the identifier `name`.
    #[arg(id = "run_name", long = "name", value_name = "NAME")]
    pub name: Option<String>,
    /// Folder in which run folders are made [default: $PACELINE_RUNS, or runs]
    #[arg(long, value_name = "DIR", help_heading = PLACES)]
    pub run_dir: Option<PathBuf>,
    /// Print a line for every N batches, with their times on rank 0, and mean times after each epoch and at the end
    /// [default: at most 4 lines without times in a run, and one a minute; a bar on a terminal]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    pub log_every: Option<usize>,
    /// Write scalars of steps and evaluations for TensorBoard. They are in the run folder, whose name TensorBoard shows
    #[arg(long, help_heading = "Observation")]
    pub tensorboard: bool,
    /// Compare digests of gradients and weights between replicas after each step, and keep them in the run folder, for
    /// paceline compare --numerics
    #[arg(long, help_heading = "Observation")]
    pub watch_numerics: bool,
    /// Keep digests of the tensors of each pass in the run folder, by micro-batch and rank, for paceline compare --numerics; with a
    /// place such as 2:0:forward:conv1 (step, micro-batch, phase, name) also the values of that tensor
    #[arg(long, value_name = "PLACE", num_args = 0..=1, default_missing_value = "digests", help_heading = "Observation")]
    pub watch_passes: Option<String>,
    /// Write the summary to this file too
    #[arg(long, value_name = "FILE", help_heading = PLACES)]
    pub json: Option<PathBuf>,
    /// Print every table: where each rank is, the parts of communication, and memory by phase. summary.txt in the run
    /// folder has it too, and paceline show prints that
    #[arg(long, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Print nothing but errors
    #[arg(long)]
    pub quiet: bool,
}

/// Flags about the checkpoints that a run writes.
#[derive(Clone, Debug, Args, Serialize)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointFlags {
    /// Write a checkpoint into this folder after every epoch and at the end of the run
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Also keep the checkpoint with the lowest loss of all evaluations of --eval-every, in the folder best within that of --save
    #[arg(long, requires = "save")]
    pub save_best: bool,
    /// Write the checkpoint after every N optimizer steps instead of after every epoch
    #[arg(long, value_name = "N", requires = "save", value_parser = at_least::<u64>(1))]
    pub save_every: Option<u64>,
    /// Keep the last N checkpoints, and the last one that the steps after it have proven; at least 2, because the weights of the last
    /// one may be ruined
    #[arg(long, value_name = "N", requires = "save", default_value_t = 2, value_parser = at_least::<usize>(2))]
    pub save_keep: usize,
    /// Memory of each rank for the copy from which a checkpoint is written, in MiB; if the copy does not
    /// fit, training waits while the rest is written [default: as much as the copy takes]
    #[arg(long, value_name = "MiB", requires = "save")]
    pub save_budget_mb: Option<usize>,
    /// Go on training only when a checkpoint is complete, and not while it is written
    #[arg(long, requires = "save")]
    pub save_sync: bool,
    /// Continue from the checkpoint in this folder; with auto, from the one in the folder of --save, if there is one yet
    #[arg(long, value_name = "DIR|auto")]
    #[serde(skip)]
    pub resume: Option<PathBuf>,
}

impl CheckpointFlags {
    /// Bytes of each rank for the copy from which a checkpoint is written, if they are limited.
    pub fn budget_bytes(&self) -> Option<usize> {
        self.save_budget_mb.map(|mb| mb.saturating_mul(1 << 20))
    }
}

/// Flags about evaluations.
#[derive(Clone, Debug, Args, Serialize)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationFlags {
    /// Evaluate on the test set after training
    #[arg(long)]
    pub evaluate: bool,
    /// Evaluate on the test set after every N optimizer steps
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    pub eval_every: Option<u64>,
    /// End the run after N evaluations of --eval-every in a row without a lower loss
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    pub early_stop: Option<u64>,
    /// Generate a sample text after every N optimizer steps
    #[arg(long, value_name = "N", help_heading = "Observation", value_parser = at_least::<u64>(1))]
    pub sample_every: Option<u64>,
}

/// Flags about how batches come to a device.
#[derive(Clone, Copy, Debug, Default, Args, Serialize)]
#[command(next_help_heading = "Host")]
pub struct CopyFlags {
    /// Load batches into pinned memory, which a device copies at its full bandwidth, and without the host
    #[arg(long)]
    pub pin_memory: bool,
    /// Let the host go on while a batch is copied to the device; from memory that is not pinned it waits all the same
    #[arg(long)]
    pub non_blocking: bool,
    /// Copy the next batch to the device on a stream of its own, beside the step
    #[arg(long)]
    pub copy_stream: bool,
    /// Make synthetic data on the host and copy it to the device, like data that is read
    #[arg(long)]
    pub generate_on_host: bool,
}

/// Flags about how the ranks keep their models equal. Flags that only some strategies read are defined
/// with these.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Strategy")]
pub struct StrategyFlags {
    /// How the ranks keep their models equal [default: ddp, or single with one rank]
    #[arg(long = "strategy", value_parser = STRATEGIES.parser(), value_name = "NAME")]
    pub name: Option<String>,
    /// Axes of the grid of ranks with their sizes, as in dp=4; the strategy says which axes it knows
    /// [default: dp, of all ranks]
    #[arg(long, value_name = "AXIS=N,...")]
    pub mesh: Option<MeshShape>,
    /// With --mesh tp=N, whose ranks divide each layer: between layers each has some of the rows too, so that activations are
    /// divided as well
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        default_value_t = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        action = ArgAction::Set
    )]
    pub sequence_parallel: bool,
    /// With --mesh tp=N: a backward pass exchanges a layer's input and the gradient of it while it computes. Takes more memory
    #[arg(long)]
    pub overlap_tp: bool,
    /// Cut each layer into this many parts, which are added up as a tree: a run ends with the same bits on 1, 2, 4 .. ranks along tp
    /// [default: the ranks along tp]
    #[arg(long, value_name = "N", value_parser = within(1, MAX_RANKS))]
    pub tp_parts: Option<usize>,
    /// Batches whose gradients add up before each optimizer step [default: 1, or 4 for simple_ddp_ga]
    #[arg(
        long,
        value_name = "N",
        aliases = ["gradient-accumulation-steps", "gradient_accumulation_steps"],
        value_parser = at_least::<usize>(1)
    )]
    pub accumulate: Option<usize>,
    /// Instead of --accumulate: cut each global batch into micro-batches of N samples by the data alone. A step is one global batch,
    /// and ends with the same bits on any number of ranks, with any exact strategy, in any pipeline
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    pub micro_batch_size: Option<usize>,
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
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(2))]
    pub sync_blocks: Option<usize>,
    /// Sharding: the ranks that keep each shard, with the optimizer's state. With 2, the next rank makes the same updates to a
    /// copy, so that a shard outlives its owner
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<usize>(1, 2))]
    pub replicate_shards: usize,
}

/// The names of the schedules.
fn schedules() -> PossibleValuesParser {
    let names = SCHEDULES.iter().map(|schedule| schedule.name());
    PossibleValuesParser::new(std::iter::once(AUTO).chain(names))
}

fn simd_parser() -> impl TypedValueParser<Value = Instructions> {
    PossibleValuesParser::new(Instructions::ALL.map(Instructions::name))
        .try_map(|name| name.parse::<Instructions>())
}
