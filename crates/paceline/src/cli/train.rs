//! Flags of `paceline train`.

use std::path::PathBuf;

use clap::Args;

use super::{
    CommArgs, CompareArgs, DataName, DeviceName, EXAMPLES, ModelName, OptimizerName, ProfileArgs,
    ScheduleName, StrategyArgs, TransportName,
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
    /// MLP: all hidden layers after the first share their parameters
    #[arg(long, help_heading = "Model")]
    pub tie_layers: bool,
    /// CNN: batch normalization between each convolution and its ReLU
    #[arg(long, help_heading = "Model")]
    pub batch_norm: bool,
    /// CNN: a second head that the loss does not use, so that its parameters get no gradient
    #[arg(long, help_heading = "Model")]
    pub unused_head: bool,
    /// Leave these layers as they are: conv0, fc0, ...
    #[arg(long, num_args = 1.., value_name = "LAYER", help_heading = "Model")]
    pub freeze: Vec<String>,

    /// Ranks on this host [default: 2, or the number of cores if smaller]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub nproc: Option<usize>,
    /// Threads that compute, per rank
    #[arg(long, value_name = "T", default_value_t = 1, help_heading = "Ranks")]
    pub threads: usize,
    /// How the ranks reach each other
    #[arg(long, value_enum, default_value_t = TransportName::Shm, help_heading = "Ranks")]
    pub transport: TransportName,
    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu, help_heading = "Ranks")]
    pub device: DeviceName,
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
    pub strategy: StrategyArgs,
    /// Whether to compare strategies.
    #[command(flatten)]
    pub compare: CompareArgs,

    /// Passes over the data [default: 3, or 5 for the MLP]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub epochs: Option<usize>,
    /// Optimizer steps after which the run ends, in as many passes over the data as they take
    #[arg(long, value_name = "N", conflicts_with = "epochs", help_heading = "Training")]
    pub steps: Option<u64>,
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
    /// How the learning rate changes until the end of the run
    #[arg(long, value_enum, default_value_t = ScheduleName::Constant, help_heading = "Training")]
    pub lr_schedule: ScheduleName,
    /// First optimizer steps, over which the learning rate rises; unlike --warmup-steps, which is
    /// about measuring
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub lr_warmup_steps: u64,
    /// Learning rate at which linear and cosine end [default: 0]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub min_lr: Option<f64>,
    /// Optimizer steps after which linear and cosine end [default: those of the run]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub lr_steps: Option<u64>,
    /// Momentum of SGD
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Training")]
    pub momentum: f64,
    /// Weight decay [default: 0, or 0.01 for AdamW]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Scale gradients down where the norm of all of them together is larger
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub clip_grad_norm: Option<f64>,
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
    /// Fetch the data set's files into --data-dir first, unless they are there
    #[arg(long, help_heading = "Data")]
    pub download: bool,
    /// Fetch them from this folder instead of the usual one
    #[arg(long, value_name = "URL", requires = "download", help_heading = "Data")]
    pub mirror: Option<String>,
    /// Synthetic training images [default: 8192]; a quarter as many to evaluate on
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub samples: Option<usize>,
    /// Samples of each rank, one number per rank, of which it trains on batches of --batch-size: a
    /// shard of the training set for each, and uneven ones if the numbers differ
    #[arg(long, num_args = 1.., value_name = "N", help_heading = "Data")]
    pub rank_samples: Option<Vec<usize>>,
    /// Height, width and channels of synthetic images [default: 28 28 1]
    #[arg(long, num_args = 3, value_names = ["H", "W", "C"], help_heading = "Data", value_parser = size())]
    pub image: Option<Vec<u64>>,
    /// Evaluate on the test set after training
    #[arg(long, help_heading = "Data")]
    pub evaluate: bool,
    /// Evaluate on the test set after every N optimizer steps
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub eval_every: Option<u64>,

    /// Whether to write traces.
    #[command(flatten)]
    pub profile: ProfileArgs,

    /// Write a checkpoint into this folder after every epoch and at the end of the run
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub save: Option<PathBuf>,
    /// Write it after every N optimizer steps instead of after every epoch
    #[arg(long, value_name = "N", requires = "save", help_heading = "Output")]
    pub save_every: Option<u64>,
    /// Continue from the checkpoint in this folder; with auto, from the one in --save, if there is one
    /// yet
    #[arg(long, value_name = "DIR|auto", help_heading = "Output")]
    pub resume: Option<PathBuf>,
    /// Write scalars for TensorBoard into the run folder, of each step and each evaluation
    #[arg(long, help_heading = "Output")]
    pub tensorboard: bool,
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
