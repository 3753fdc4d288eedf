//! Flags of `paceline sweep`.

use std::path::PathBuf;

use clap::Args;
use paceline_settings::part::Part;

use crate::flags::Swept;

const EXAMPLES: &str = "\
Examples:
  paceline sweep --vary strategy=simple_ddp,ddp,flat_ddp --output sweeps/strategies
  paceline sweep --vary nproc=1,2,4 --vary bucket-cap-mb=1,25 --output sweeps/a --model mlp
  paceline sweep --vary 'channels=16 32,32 64' --vary batch-norm=false,true --output sweeps/b
  paceline sweep --vary 'link=default;10gbit,50us;1gbit,1ms' --output sweeps/c --rounds 3
";

/// Flags of `paceline sweep`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct SweepArgs {
    /// The name of a flag below, and its values, separated by commas. If repeated, every combination of
    /// the values is run. Semicolons separate values that contain commas, and spaces separate the values
    /// of a list; a switch takes true or false, and default leaves the flag out
    #[arg(long, value_name = "KEY=A,B", required = true, help_heading = "Sweep")]
    pub vary: Vec<String>,
    /// Change one flag at a time from its first value, instead of every combination
    #[arg(long, help_heading = "Sweep")]
    pub one_at_a_time: bool,
    /// Folder for all files. The same command again continues a sweep that was interrupted
    #[arg(long, value_name = "DIR", help_heading = "Sweep")]
    pub output: PathBuf,
    /// How often each case is run. The cases alternate in rounds, and the medians over the rounds count
    #[arg(long, value_name = "R", default_value_t = 5, help_heading = "Sweep", value_parser = crate::rounds)]
    pub rounds: usize,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Sweep", value_parser = crate::seconds)]
    pub run_limit: f64,
    /// The figure that decides which case is better, by its name in summary.json
    #[arg(long, value_name = "NAME", default_value = "samples_per_s", help_heading = "Sweep")]
    pub rank_by: String,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: Part<Swept>,
}
