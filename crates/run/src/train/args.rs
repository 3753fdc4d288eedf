//! `paceline train`: the flags of a run, and the configuration file or the recipe that they are added to.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use paceline_failure::Result;
use paceline_launch::StartFlags;
use paceline_settings::spec::RunSpec;
use paceline_settings::spec_file::SpecFile;
use paceline_settings::{flags, recipes};

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
#[derive(Clone, Debug)]
pub struct TrainCommand {
    typed: std::result::Result<RunSpec, String>,
    config: Option<PathBuf>,
    recipe: Option<String>,
    /// How ranks are started.
    pub start: StartFlags,
}

impl TrainCommand {
    /// The settings of the file or the recipe and of the flags, and notes about settings of the file that
    /// flags replaced.
    pub fn spec(&self) -> Result<(RunSpec, Vec<String>)> {
        let typed = self.typed.clone().map_err(paceline_failure::Failure::Usage)?;
        match (&self.config, &self.recipe) {
            (Some(path), _) => SpecFile::read(path)?.overlaid(&typed),
            (None, Some(recipe)) => recipes::read(recipe)?.overlaid(&typed),
            (None, None) => Ok((typed, Vec::new())),
        }
    }
}

impl Args for TrainCommand {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help_heading("Configuration")
            .help("Begin with the settings of this TOML or JSON file, such as the config.json of a run");
        let recipe = Arg::new("recipe")
            .long("recipe")
            .value_name("NAME")
            .value_parser(recipes::names())
            .conflicts_with("config")
            .help_heading("Configuration")
            .help("Begin with the settings of a recipe");
        // With negative numbers allowed, "--lr -1" is rejected as a value, not as an unknown flag.
        let all = Arg::new("help-all")
            .long("help-all")
            .action(ArgAction::HelpLong)
            .help("Print all flags; --help prints those that one needs first");
        let command = command.before_help(EXAMPLES).allow_negative_numbers(true);
        let command = command.args([config, recipe, all]);
        StartFlags::augment_args(command.args(flags::all().iter().cloned()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TrainCommand {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        let typed = RunSpec::typed(matches).map_err(|failure| failure.to_string());
        let start = StartFlags::from_arg_matches(matches)?;
        let recipe = matches.get_one("recipe").cloned();
        Ok(Self { typed, config: matches.get_one("config").cloned(), recipe, start })
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
