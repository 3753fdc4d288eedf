//! `paceline bench`: an operation, or one of the studies of training, which are presets of a sweep.

use clap::{ArgMatches, Args, FromArgMatches};
use paceline_commbench::args::BenchArgs;
use paceline_study::studies::STUDIES;
use paceline_study::study::Study;

/// `paceline bench`: an operation, or a study. Not derived, because a derived command would require the
/// operation even where a study is given.
#[derive(Debug)]
pub enum BenchCommand {
    /// An operation and how to measure it.
    Operation(Box<BenchArgs>),
    /// A study of training, with the flags that were typed after its name.
    Study(&'static Study, ArgMatches),
}

impl Args for BenchCommand {
    fn augment_args(command: clap::Command) -> clap::Command {
        let study =
            |study: &Study| clap::Command::new(study.name).about(study.about).defer(study.flags);
        BenchArgs::augment_args(command)
            .subcommands(STUDIES.iter().map(study))
            .args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
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
        let named = |name| STUDIES.iter().find(|study| study.name == name);
        match matches.subcommand().and_then(|(name, typed)| Some((named(name)?, typed))) {
            Some((study, typed)) => Ok(Self::Study(study, typed.clone())),
            None => BenchArgs::from_arg_matches(matches).map(|args| Self::Operation(args.into())),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
