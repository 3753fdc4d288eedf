//! The flags of a run as part of another command, which starts runs of its own or needs a model.
//!
//! A command that flattens a [`Part`] has those flags of `paceline train` that it selects, with their help and their checks.

use std::marker::PhantomData;

use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};

use crate::flags;
use crate::spec::RunSpec;

/// Adds the flags of `A` to a command, which keeps its own line of help. For [`Command::defer`]: a command with the flags of a run
/// defines them when its name has been read, because they are many, and each process of a run reads its command line. Code that
/// needs the flags before that builds the whole program ([`Command::build`]).
pub fn add_later<A: Args>(command: Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    A::augment_args(command).about(about)
}

/// Which flags of a run a command takes.
pub trait Selection {
    /// The flags, with the help that they have in this command.
    fn flags() -> Vec<Arg>;
}

/// The flags of a run that a command takes: those that the user typed.
#[derive(Clone, Debug)]
pub struct Part<S>(pub RunSpec, PhantomData<S>);

impl<S: Selection> Args for Part<S> {
    fn augment_args(command: Command) -> Command {
        command.args(S::flags())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Selection> FromArgMatches for Part<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let typed = RunSpec::typed(matches)
            .map_err(|failure| Error::raw(ErrorKind::InvalidUtf8, format!("{failure}\n")))?;
        let flags = S::flags();
        let is_other = |key: &&str| flags.iter().all(|flag| flags::key(flag) != *key);
        let others: Vec<&str> = typed.keys().filter(is_other).collect();
        Ok(Self(typed.without(&others), PhantomData))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
