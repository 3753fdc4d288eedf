//! Flags of `paceline train`.

use std::path::PathBuf;

use clap::Args;

use super::{
    CommArgs, DataName, DeviceName, EXAMPLES, ModelName, OptimizerName, StrategyName, TransportName,
};

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
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,
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
pub(super) fn size() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(..=1 << 20)
}
