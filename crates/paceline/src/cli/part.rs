//! The flags of a run as part of another command, which starts runs of its own or needs a model.
//!
//! A command that flattens [`TrainFlags`] has all flags of `paceline train`, with their help and their
//! checks, except those that the command sets itself.

use clap::{Arg, ArgMatches, Args, FromArgMatches};

use crate::choices::models::MODELS;
use crate::run::flags;
use crate::run::spec::RunSpec;

/// Flags that commands with [`TrainFlags`] do not pass on: the commands set them, or they make no sense
/// in a run that only measures.
const NOT_PASSED_ON: [&str; 22] = [
    "nproc",
    // It depends on the number of ranks.
    "mesh",
    // Measurements count --steps-per-epoch and --epochs.
    "steps",
    "json",
    "quiet",
    "log-every",
    "name",
    "run-dir",
    "save",
    "save-every",
    "save-keep",
    "save-budget-mb",
    "save-sync",
    "tensorboard",
    "resume",
    "evaluate",
    "eval-every",
    "ddp-choice",
    "shard-choice",
    "like-for-like",
    "as-published",
    "price-per-hour",
];

/// The flags of a run, except those that the command sets itself.
#[derive(Clone, Debug)]
pub struct TrainFlags(pub RunSpec);

fn passed_on() -> Vec<Arg> {
    let passed_on = |flag: &Arg| !NOT_PASSED_ON.contains(&flags::key(flag));
    let all = flags::all().into_iter().filter(passed_on);
    all.map(|flag| match flags::key(&flag) {
        "epochs" => flag.help("Passes over the data [default: enough for the steps]"),
        "steps-per-epoch" => {
            flag.help("Batches of a run [default: for 30 steps, with those of warm-up]")
        }
        _ => flag,
    })
    .collect()
}

/// The flags by which models are sized.
#[derive(Clone, Debug)]
pub struct ModelFlags(pub RunSpec);

/// The flags of a run that an evaluation takes too.
#[derive(Clone, Debug)]
pub struct EvaluationFlags(pub RunSpec);

/// The flags of a run that a sweep varies or passes on.
#[derive(Clone, Debug)]
pub struct SweptFlags(pub RunSpec);

/// Implements `clap` traits for a group of flags whose values become a specification.
macro_rules! part_of_a_run {
    ($name:ident, $flags:expr) => {
        impl Args for $name {
            fn augment_args(command: clap::Command) -> clap::Command {
                command.args($flags)
            }

            fn augment_args_for_update(command: clap::Command) -> clap::Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Ok(Self(typed(matches, &$flags)?))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    };
}
part_of_a_run!(TrainFlags, passed_on());
part_of_a_run!(ModelFlags, MODELS.flags());
part_of_a_run!(EvaluationFlags, super::evaluate::taken());
part_of_a_run!(SweptFlags, super::sweep::swept());

/// The values that the user typed for these flags.
fn typed(matches: &ArgMatches, flags: &[Arg]) -> Result<RunSpec, clap::Error> {
    let typed = RunSpec::typed(matches).map_err(|failure| {
        clap::Error::raw(clap::error::ErrorKind::InvalidUtf8, format!("{failure}\n"))
    })?;
    let is_other = |key: &&str| flags.iter().all(|flag| flags::key(flag) != *key);
    let others: Vec<&str> = typed.keys().filter(is_other).collect();
    Ok(typed.without(&others))
}
