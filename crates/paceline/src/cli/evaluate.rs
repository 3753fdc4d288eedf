//! Flags of `paceline evaluate`: a checkpoint, and those flags of `paceline train` that concern the model, the
//! data, the ranks and how they talk to each other.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches};

use super::{Given, TrainArgs};

const EXAMPLES: &str = "\
Examples:
  paceline evaluate --checkpoint ckpt                 the CNN on the test part of synthetic images
  paceline evaluate --checkpoint ckpt --data mnist --data-dir ~/mnist --nproc 4
";

/// Groups of flags that an evaluation takes from `paceline train`, by their heading in its help.
const HEADINGS: [&str; 4] = ["Model", "Ranks", "Communication", "Data"];
/// Other flags that it takes.
const ALSO: [&str; 3] = ["batch_size", "global_batch_size", "seed"];
/// Flags of these groups that only training has a use for.
const ONLY_TRAINING: [&str; 3] = ["rank_samples", "evaluate", "eval_every"];

/// Flags of `paceline evaluate`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct EvaluateArgs {
    /// Folder of the checkpoint, as --save names it
    #[arg(long, value_name = "DIR", help_heading = "Evaluation")]
    pub checkpoint: PathBuf,
    /// Write loss, accuracy and the number of samples to this file too
    #[arg(long, value_name = "FILE", help_heading = "Evaluation")]
    pub json: Option<PathBuf>,
    /// Flags of `paceline train`.
    #[command(flatten)]
    pub flags: EvaluationFlags,
}

/// The flags of `paceline train` that an evaluation takes too.
#[derive(Clone, Debug)]
pub struct EvaluationFlags(pub Given);

fn taken() -> clap::Command {
    let train = TrainArgs::augment_args(clap::Command::new("train"));
    let is_taken = |arg: &&clap::Arg| {
        let id = arg.get_id().as_str();
        let of_heading = arg.get_help_heading().is_some_and(|text| HEADINGS.contains(&text));
        (of_heading && !ONLY_TRAINING.contains(&id)) || ALSO.contains(&id)
    };
    let args = train.get_arguments().filter(is_taken).cloned();
    clap::Command::new("train").args(args.map(|arg| match arg.get_id().as_str() {
        "seed" => arg.help("Decides synthetic data; the seed that the checkpoint was trained with"),
        _ => arg,
    }))
}

impl Args for EvaluationFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(taken().get_arguments())
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for EvaluationFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(Given::of(&taken(), matches)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0 = Given::of(&taken(), matches);
        Ok(())
    }
}
