//! The command line, as `clap` sees it. What the flags mean together is decided in
//! [`config`](crate::config).

mod analyze;
mod bench;
mod check;
mod comm;
mod compare;
mod evaluate;
mod given;
mod links;
mod named;
mod profile;
mod strategy;
mod studies;
mod sweep;
mod trace;
mod train;

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

pub use analyze::{
    AnalyzeArgs, AnalyzeCommand, CompareRunsArgs, DiffArgs, KindName, SelectName, StepsName,
};
pub use bench::{BenchArgs, SizeArgs};
pub use check::CheckArgs;
pub use comm::CommArgs;
pub use compare::{CompareArgs, DdpChoice};
pub use evaluate::EvaluateArgs;
pub use given::{Given, TrainFlags};
pub use links::{CnnSizes, LinksArgs};
pub use profile::ProfileArgs;
pub use strategy::StrategyArgs;
pub use studies::{
    BenchCommand, BucketsArgs, ModeName, PredictArgs, ScalingArgs, StudyArgs, StudyCommand,
};
pub use sweep::{NOT_SWEPT, SweepArgs, SweptFlags};
pub use trace::{MergeArgs, TraceCommand};
pub use train::TrainArgs;

const EXAMPLES: &str = "\
Examples:
  paceline train                                      2 ranks, a CNN on synthetic images
  paceline train --nproc 4 --strategy simple_ddp      another strategy, more ranks
  paceline train --ddp-choice all                     every strategy, compared in a table
  paceline train --channels 16 32 --hidden 64 --data cifar10 --data-dir ~/cifar
  paceline train --model mlp --epochs 1 --steps-per-epoch 10 --warmup-steps 2
  paceline train --save ckpt --epochs 2               then: --resume ckpt --epochs 4
  paceline launch -n 2 -- ./my-program --its-flags    any program, with RANK, WORLD_SIZE, ...
  paceline bench all_reduce -b 1K -e 64M -f 4         how fast ranks exchange data
  paceline bench scaling --nproc 1,2,4                what more ranks bring, and what limits them
  paceline check --nproc 4                            does everything here work?
  paceline links --model cnn                          what a link costs a model
  paceline predict --nproc 2,8 --links 10gbe          what more ranks on a network would take
  paceline train --profile && paceline analyze profile/ddp    traces, and a report of them
  paceline sweep --vary nproc=1,2 --output sweeps/a   any settings, in turns, ranked
  paceline compare runs/*                             runs side by side
";

/// Distributed training that shows where every millisecond and megabyte goes.
#[derive(Debug, Parser)]
#[command(name = "paceline", version, before_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model on several ranks
    Train(Box<TrainArgs>),
    /// Evaluate a checkpoint on the test set
    Evaluate(Box<EvaluateArgs>),
    /// Start N copies of any program as the ranks of a run
    Launch(LaunchArgs),
    /// Measure how fast the ranks exchange data, and how training scales
    Bench(BenchCommand),
    /// Check that ranks can start, see their devices, and reach each other
    Check(CheckArgs),
    /// Print what links deliver, and what a model would spend on communication over one
    Links(Box<LinksArgs>),
    /// Vary any settings of training, in turns, and rank what comes of them
    Sweep(Box<SweepArgs>),
    /// Predict the step on more ranks and other links from runs without communication
    Predict(Box<PredictArgs>),
    /// Analyse the traces of a run: where the time went, who waited for whom, and what to do
    Analyze(Box<AnalyzeArgs>),
    /// Compare runs: time, samples/s, the anatomy of the step, memory, accuracy and cost
    Compare(CompareRunsArgs),
    /// Work with the trace files that --profile writes
    #[command(subcommand)]
    Trace(TraceCommand),
    /// What the launcher starts as each rank: ties its life to the launcher's, then becomes COMMAND
    #[command(name = "__rank", hide = true)]
    Rank {
        /// Process number of the launcher.
        parent: u32,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// What ends the ranks' process groups when the launcher itself is killed
    #[command(name = "__guard", hide = true)]
    Guard,
}

/// Flags of `paceline launch`.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct LaunchArgs {
    /// How many copies
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2)]
    pub nproc: usize,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Which model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Convolutions with ReLU and pooling, one hidden layer
    Cnn,
    /// Linear layers with ReLU
    Mlp,
}

impl ModelName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ModelName::Cnn => "cnn",
            ModelName::Mlp => "mlp",
        }
    }
}

/// Which strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum StrategyName {
    /// One rank, no communication
    Single,
    /// After backward, one blocking all-reduce per parameter
    SimpleDdp,
    /// The same, once in several batches
    SimpleDdpGa,
    /// One blocking all-reduce per parameter, during backward
    SimpleDdpHook,
    /// One asynchronous all-reduce per parameter, during backward
    SimpleDdpAsync,
    /// Gradients are copied into buckets that are reduced during backward
    BucketDdpAsync,
    /// Gradients live in buckets that are reduced during backward
    #[value(alias = "pytorch_ddp")]
    Ddp,
    /// One all-reduce of everything after backward
    FlatDdp,
    /// ddp that sends the largest gradients only and holds the others back
    TopK,
    /// ddp with gradients in half precision
    Fp16,
    /// ddp with gradients in bfloat16
    Bf16,
    /// Ranks train alone and average their parameters every few steps
    LocalSgd,
    /// No communication: what ddp is compared with to see what it costs
    NoSync,
}

impl StrategyName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StrategyName::Single => "single",
            StrategyName::SimpleDdp => "simple_ddp",
            StrategyName::SimpleDdpGa => "simple_ddp_ga",
            StrategyName::SimpleDdpHook => "simple_ddp_hook",
            StrategyName::SimpleDdpAsync => "simple_ddp_async",
            StrategyName::BucketDdpAsync => "bucket_ddp_async",
            StrategyName::Ddp => "ddp",
            StrategyName::FlatDdp => "flat_ddp",
            StrategyName::TopK => "top_k",
            StrategyName::Fp16 => "fp16",
            StrategyName::Bf16 => "bf16",
            StrategyName::LocalSgd => "local_sgd",
            StrategyName::NoSync => "no_sync",
        }
    }

    /// Whether it is `ddp`, with whatever communication hook.
    pub fn is_ddp(self) -> bool {
        use StrategyName::*;
        matches!(self, Ddp | TopK | Fp16 | Bf16)
    }

    /// Whether all ranks have the same gradients, of the whole batch, in every step.
    pub fn synchronises_every_step(self) -> bool {
        use StrategyName::*;
        !matches!(self, Single | LocalSgd | NoSync)
    }

    /// Whether it cuts gradients into buckets.
    pub fn has_buckets(self) -> bool {
        self.is_ddp() || self == StrategyName::BucketDdpAsync
    }
}

/// Which transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportName {
    /// Ranks are threads of one process
    Thread,
    /// Ranks are processes of one host that share memory
    Shm,
    /// Ranks are processes anywhere that use sockets
    Tcp,
    /// Shared memory within a host, sockets between hosts
    Hybrid,
    /// An MPI library carries the bytes
    Mpi,
}

impl TransportName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TransportName::Thread => "thread",
            TransportName::Shm => "shm",
            TransportName::Tcp => "tcp",
            TransportName::Hybrid => "hybrid",
            TransportName::Mpi => "mpi",
        }
    }
}

/// Which device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    /// The processor
    Cpu,
}

/// Which data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DataName {
    /// Made from the seed: learnable 28x28 images for the CNN, normal vectors for the MLP
    Synthetic,
    /// IDX files, plain or gzip, in --data-dir
    Mnist,
    /// Binary batches in --data-dir
    Cifar10,
}

impl DataName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DataName::Synthetic => "synthetic",
            DataName::Mnist => "mnist",
            DataName::Cifar10 => "cifar10",
        }
    }
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleName {
    /// As it is
    Constant,
    /// Down to --min-lr on a straight line
    Linear,
    /// Down to --min-lr on half a cosine
    Cosine,
}

impl ScheduleName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleName::Constant => "constant",
            ScheduleName::Linear => "linear",
            ScheduleName::Cosine => "cosine",
        }
    }
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// Stochastic gradient descent
    Sgd,
    /// Adam with decoupled weight decay
    Adamw,
}
