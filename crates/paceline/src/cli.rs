//! The command line, as `clap` sees it. What the flags mean together is decided in
//! [`config`](crate::config).

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  paceline train                                      2 ranks, a CNN on synthetic images
  paceline train --nproc 4 --strategy simple_ddp      another strategy, more ranks
  paceline train --channels 16 32 --hidden 64 --data cifar10 --data-dir ~/cifar
  paceline train --model mlp --epochs 1 --steps-per-epoch 10 --warmup-steps 2
  paceline train --save ckpt --epochs 2               then: --resume ckpt --epochs 4
  paceline launch -n 2 -- ./my-program --its-flags    any program, with RANK, WORLD_SIZE, ...
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
    /// Start N copies of any program as the ranks of a run
    Launch(LaunchArgs),
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

/// Which strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum StrategyName {
    /// One rank, no communication
    Single,
    /// After backward, one blocking all-reduce per parameter
    SimpleDdp,
    /// Buckets that are reduced during backward
    #[value(alias = "pytorch_ddp")]
    Ddp,
}

impl StrategyName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StrategyName::Single => "single",
            StrategyName::SimpleDdp => "simple_ddp",
            StrategyName::Ddp => "ddp",
        }
    }
}

/// Which transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportName {
    /// Ranks are threads of one process
    Thread,
    /// Ranks are processes that share memory
    Shm,
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

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// Stochastic gradient descent
    Sgd,
    /// Adam with decoupled weight decay
    Adamw,
}

/// Flags of `paceline train`.
#[derive(Debug, Args)]
// With negative numbers allowed, "--lr -1" is answered as a value, not as an unknown flag.
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct TrainArgs {
    /// Model
    #[arg(long, value_enum, default_value_t = ModelName::Cnn, help_heading = "Model")]
    pub model: ModelName,
    /// CNN: output channels of each convolution [default: 32 64 128]
    #[arg(long, num_args = 1.., value_name = "C", help_heading = "Model", value_parser = size())]
    pub channels: Option<Vec<u64>>,
    /// CNN: width of the hidden layer [default: 512]
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = size())]
    pub hidden: Option<u64>,
    /// MLP: inputs [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = size())]
    pub input_dim: Option<u64>,
    /// MLP: width of the hidden layers [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = size())]
    pub hidden_dim: Option<u64>,
    /// MLP: outputs [default: 2048]
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = size())]
    pub output_dim: Option<u64>,
    /// MLP: hidden layers [default: 3]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub num_layers: Option<usize>,

    /// Ranks on this host [default: 2, or the number of cores if smaller]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub nproc: Option<usize>,
    /// Threads that compute, per rank
    #[arg(long, value_name = "T", default_value_t = 1, help_heading = "Ranks")]
    pub threads: usize,
    /// How the ranks keep their models equal [default: ddp, or single with one rank]
    #[arg(long, value_enum, help_heading = "Ranks")]
    pub strategy: Option<StrategyName>,
    /// How the ranks reach each other
    #[arg(long, value_enum, default_value_t = TransportName::Shm, help_heading = "Ranks")]
    pub transport: TransportName,
    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu, help_heading = "Ranks")]
    pub device: DeviceName,
    /// Bucket size of ddp in MB [default: 25, or 50 for the MLP]
    #[arg(long, value_name = "MB", help_heading = "Ranks")]
    pub bucket_cap_mb: Option<f64>,
    /// Give each rank cores of its own
    #[arg(long, help_heading = "Ranks")]
    pub pin_cores: bool,
    /// Where ranks started by hand or by another launcher meet: env:// or file:///PATH
    #[arg(long, value_name = "URL", default_value = "env://", help_heading = "Ranks")]
    pub init_method: String,

    /// Passes over the data [default: 3, or 5 for the MLP]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub epochs: Option<usize>,
    /// Steps of an epoch at most [default: all of the data, or 20 for the MLP]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps_per_epoch: Option<usize>,
    /// First steps that are left out of the measurements
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Training")]
    pub warmup_steps: usize,
    /// Samples per step and rank [default: 64, or 256 for the MLP]
    #[arg(long, value_name = "N", conflicts_with = "global_batch_size", help_heading = "Training")]
    pub batch_size: Option<usize>,
    /// Samples per step of all ranks together
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub global_batch_size: Option<usize>,
    /// Optimizer
    #[arg(long, value_enum, default_value_t = OptimizerName::Sgd, help_heading = "Training")]
    pub optimizer: OptimizerName,
    /// Learning rate [default: 0.01, or 0.001 for AdamW]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub lr: Option<f64>,
    /// Momentum of SGD
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Training")]
    pub momentum: f64,
    /// Weight decay [default: 0, or 0.01 for AdamW]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Decides initial weights, the order of samples and synthetic data
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// Data set
    #[arg(long, value_enum, default_value_t = DataName::Synthetic, help_heading = "Data")]
    pub data: DataName,
    /// The same as --data synthetic
    #[arg(long, conflicts_with = "data", help_heading = "Data")]
    pub synthetic: bool,
    /// Folder of the data set's files
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub data_dir: Option<PathBuf>,
    /// Synthetic training images [default: 8192]; a quarter as many to evaluate on
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub samples: Option<usize>,
    /// Evaluate on the test set after training
    #[arg(long, help_heading = "Data")]
    pub evaluate: bool,

    /// Write a checkpoint into this folder after every epoch
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub save: Option<PathBuf>,
    /// Continue from the checkpoint in this folder
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub resume: Option<PathBuf>,
    /// Write the summary to this file too
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Print nothing but errors
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
}

/// A width of a layer: large enough for anything real, small enough that products of two fit.
fn size() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(..=1 << 20)
}
