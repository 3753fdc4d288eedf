//! Flags of `paceline sweep`.

use std::path::PathBuf;

use clap::{Arg, Args};
use paceline_settings::flags;
use paceline_settings::part::{Part, Selection};

const EXAMPLES: &str = "\
Examples:
  paceline sweep --vary strategy=simple_ddp,ddp,flat_ddp --output sweeps/strategies
  paceline sweep --vary nproc=1,2,4 --vary bucket-cap-mb=1,25 --output sweeps/a --model mlp
  paceline sweep --vary 'channels=16 32,32 64' --vary batch-norm=false,true --output sweeps/b
  paceline sweep --vary 'link=default;10gbit,50us;1gbit,1ms' --output sweeps/c --rounds 3
";

/// Flags of `paceline train` that a sweep neither varies nor passes on, and why.
pub const NOT_SWEPT: [(&str, &str); 18] = [
    ("config", "all runs start from one configuration"),
    ("recipe", "all runs start from one configuration"),
    ("json", "each run's summary goes into the folder of the sweep"),
    ("quiet", "the runs of a sweep print nothing"),
    ("log-every", "the runs of a sweep print nothing"),
    ("name", "each run's folder has a name of its own"),
    ("run-dir", "run folders go into the folder of the sweep"),
    ("save", "runs of several rounds would write the same checkpoint"),
    ("save-every", "runs of several rounds would write the same checkpoint"),
    ("save-keep", "runs of several rounds would write the same checkpoint"),
    ("save-budget-mb", "runs of several rounds would write the same checkpoint"),
    ("save-sync", "runs of several rounds would write the same checkpoint"),
    ("resume", "runs of several rounds would not begin alike"),
    ("ddp-choice", "vary strategy"),
    ("shard-choice", "vary strategy"),
    ("like-for-like", "it is about comparisons such as --ddp-choice all"),
    ("as-published", "it is about comparisons such as --ddp-choice all"),
    ("price-per-hour", "it is about comparisons such as --ddp-choice all"),
];

/// Flags of `paceline sweep`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct SweepArgs {
    /// The name of a flag below, and its values, separated by commas. If repeated, every combination of
    /// the values is run. Semicolons separate values that contain commas, and spaces separate the values
    /// of a list; a switch takes true or false, and default leaves the flag out
    #[arg(long, value_name = "KEY=A,B", required = true, help_heading = "Sweep")]
    pub vary: Vec<String>,
    /// Folder for all files. The same command again continues a sweep that was interrupted
    #[arg(long, value_name = "DIR", help_heading = "Sweep")]
    pub output: PathBuf,
    /// How often each case is run. The cases alternate in rounds, and the medians over the rounds count
    #[arg(long, value_name = "R", default_value_t = 5, help_heading = "Sweep")]
    pub rounds: usize,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Sweep")]
    pub run_limit: f64,
    /// The figure that decides which case is better, by its name in summary.json
    #[arg(long, value_name = "NAME", default_value = "samples_per_s", help_heading = "Sweep")]
    pub rank_by: String,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: Part<Swept>,
}

/// The flags of a run, except those that a sweep sets itself.
#[derive(Clone, Copy, Debug)]
pub struct Swept;

impl Selection for Swept {
    fn flags() -> Vec<Arg> {
        let is_swept =
            |flag: &Arg| NOT_SWEPT.iter().all(|(left_out, _)| *left_out != flags::key(flag));
        flags::all().into_iter().filter(is_swept).collect()
    }
}
