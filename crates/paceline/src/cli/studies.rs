//! Flags of the studies of `paceline bench`, and of `paceline predict`, which make training runs and
//! compare them.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, Subcommand, ValueEnum};

use super::{BenchArgs, TrainFlags};

const SCALING_EXAMPLES: &str = "\
Examples:
  paceline bench scaling                              1, 2 and 4 ranks, weak and strong
  paceline bench scaling --model mlp --hidden-dim 1024 --charts charts
  paceline bench scaling --link 10gbit,50us           on a network that this machine does not have
  paceline bench scaling --nproc 1,2,4,8 --mode strong --global-batch-size 256 --json scaling.json
";

const BUCKETS_EXAMPLES: &str = "\
Examples:
  paceline bench buckets                              2 ranks, a CNN
  paceline bench buckets --link 10gbit,50us --channels 64 128 256 --hidden 2048
  paceline bench buckets --model mlp --sizes 1,2,4,8,16,32,64,128 --charts charts
";

const PREDICT_EXAMPLES: &str = "\
Examples:
  paceline predict                                    2 ranks on 1, 10 and 100 Gbit/s
  paceline predict --nproc 2,8,64 --links 10gbit,50us 100gbe --channels 64 128 256 --hidden 2048
  paceline predict --model mlp --links 25gbe measured --measure
";

/// `paceline bench`: an operation, or a study. The traits are not derived, because the derived code would
/// require the operation even if a study is given.
#[derive(Debug)]
pub enum BenchCommand {
    /// An operation and how to measure it.
    Operation(Box<BenchArgs>),
    /// A study of training.
    Study(StudyCommand),
}

impl Args for BenchCommand {
    fn augment_args(command: clap::Command) -> clap::Command {
        StudyCommand::augment_subcommands(BenchArgs::augment_args(command))
            .args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
            .subcommand_required(false)
            .arg_required_else_help(false)
            .subcommand_help_heading("Studies of training")
            .subcommand_value_name("STUDY")
            .disable_help_subcommand(true)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for BenchCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        match matches.subcommand() {
            Some(_) => StudyCommand::from_arg_matches(matches).map(Self::Study),
            None => BenchArgs::from_arg_matches(matches).map(|args| Self::Operation(args.into())),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A study, which makes several training runs and compares them.
#[derive(Debug, Subcommand)]
pub enum StudyCommand {
    /// How training speeds up with the number of ranks, and what limits it
    Scaling(Box<ScalingArgs>),
    /// Which bucket size hides communication best
    Buckets(Box<BucketsArgs>),
}

/// What stays the same when ranks are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeName {
    /// The samples of each rank
    Weak,
    /// The samples of all ranks together
    Strong,
    /// Both, one after the other
    Both,
}

/// Flags of `paceline bench scaling`.
#[derive(Debug, Args)]
#[command(before_help = SCALING_EXAMPLES, allow_negative_numbers = true)]
pub struct ScalingArgs {
    /// Numbers of ranks, separated by commas; 1 has to be among them
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,2,4",
        help_heading = "Study"
    )]
    pub nproc: Vec<usize>,
    /// What stays the same when ranks are added: the batch of each rank, or the global batch. Both begin
    /// with the batch of --batch-size or --global-batch-size on one rank
    #[arg(long, value_enum, default_value_t = ModeName::Both, help_heading = "Study")]
    pub mode: ModeName,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// Flags of `paceline bench buckets`.
#[derive(Debug, Args)]
#[command(before_help = BUCKETS_EXAMPLES, allow_negative_numbers = true)]
pub struct BucketsArgs {
    /// Bucket sizes in MB of 2^20 bytes, separated by commas [default: 1, 10, 100, 1000, and powers of
    /// two from 1/32 of the gradients up to the first one that holds them all]
    #[arg(long, value_name = "MB", value_delimiter = ',', help_heading = "Study")]
    pub sizes: Vec<f64>,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Study")]
    pub nproc: usize,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// Flags of `paceline predict`.
#[derive(Debug, Args)]
#[command(before_help = PREDICT_EXAMPLES, allow_negative_numbers = true)]
pub struct PredictArgs {
    /// Numbers of ranks to predict, separated by commas
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "2",
        help_heading = "Study"
    )]
    pub nproc: Vec<usize>,
    /// Links to predict, separated by spaces: BANDWIDTH,LATENCY, or a name as in `paceline links`, or
    /// `measured` for the transport as it is here
    #[arg(
        long,
        num_args = 1..,
        value_name = "LINK",
        default_values = ["1gbe", "10gbe", "100gbe"],
        help_heading = "Study"
    )]
    pub links: Vec<String>,
    /// Also run on each link, emulated, and print the measured times beside the predicted ones
    #[arg(long, help_heading = "Study")]
    pub measure: bool,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// Flags that all studies have.
#[derive(Clone, Debug, Args)]
pub struct StudyArgs {
    /// How often each run is made. The runs alternate in rounds, and the medians over the rounds count
    #[arg(long, value_name = "R", default_value_t = 3, help_heading = "Study")]
    pub rounds: usize,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Study")]
    pub run_limit: f64,
    /// Write everything that was measured to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Write the rows to this file, as CSV
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub csv: Option<PathBuf>,
    /// Write charts into this folder, as PNG and SVG
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub charts: Option<PathBuf>,
}
