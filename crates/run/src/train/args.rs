//! `paceline train`: the flags of a run, and the configuration file or the recipe that they are added to.

use clap::{Arg, ArgAction, Args};
use paceline_failure::Result;
use paceline_launch::StartFlags;
use paceline_settings::flags;
use paceline_settings::part::{Part, Selection};
use paceline_settings::recipes::BeginFlags;
use paceline_settings::spec::RunSpec;

pub(super) const EXAMPLES: &str = "\
Examples:
  paceline train                                      2 ranks, a CNN on synthetic images
  paceline train --nproc 4 --strategy simple_ddp      another strategy, more ranks
  paceline train --ddp-choice all                     every strategy, compared in a table
  paceline train --channels 16 32 --hidden 64 --data cifar10 --data-dir ~/cifar --download
  paceline train --recipe tiny-llama                  a language model learns from reviews
  paceline train --model mlp --epochs 1 --steps-per-epoch 10 --warmup-steps 2
  paceline train --save ckpt --steps 200              then: --resume ckpt --steps 400
  paceline train --save ckpt --save-every 50 --max-restarts 3    starts again after a failure
  paceline train --config runs/20260131-120000-cnn-ddp/config.json --lr 0.02    a run again, changed
  paceline train --profile && paceline analyze profile/ddp    traces, and a report of them
";

/// The parsed command line of `paceline train`.
// With negative numbers allowed, "--lr -1" is rejected as a value, not as an unknown flag.
#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true, arg = help_all())]
pub struct TrainCommand {
    #[command(flatten)]
    begin: BeginFlags,
    #[command(flatten)]
    flags: Part<Every>,
    /// How ranks are started.
    #[command(flatten)]
    pub start: StartFlags,
}

/// Every flag of a run.
#[derive(Clone, Copy, Debug)]
struct Every;

impl Selection for Every {
    fn flags() -> Vec<Arg> {
        flags::all().to_vec()
    }
}

fn help_all() -> Arg {
    Arg::new("help-all")
        .long("help-all")
        .action(ArgAction::HelpLong)
        .help_heading(None)
        .help("Print all flags; --help prints those that one needs first")
}

impl TrainCommand {
    /// The settings of the file or the recipe and of the flags, and notes about settings of the file that
    /// flags replaced.
    pub fn spec(&self) -> Result<(RunSpec, Vec<String>)> {
        self.begin.overlaid(&self.flags.0, |_| true)
    }
}
