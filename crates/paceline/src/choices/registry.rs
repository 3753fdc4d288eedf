//! A registry: the choices that one flag can name, and the flags that each choice adds.
//!
//! A registry knows names and flags, but not what a choice builds.

use std::collections::BTreeSet;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use crate::{Failure, Result};

/// Something that a flag can name.
pub trait Choice: Sync {
    /// Its name on the command line and in files.
    fn name(&self) -> &'static str;

    /// Other names for it.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// One line of help.
    fn about(&self) -> &'static str;

    /// The flags that it reads in addition to those of every run. Two choices may share a flag.
    fn flags(&self) -> Vec<Arg> {
        Vec::new()
    }
}

/// The choices that one flag can name. If the flag has a default, it is the first choice.
pub struct Registry<C: ?Sized + 'static> {
    /// The flag, without dashes.
    pub key: &'static str,
    /// All choices, in the order of the help.
    pub choices: &'static [&'static C],
}

impl<C: Choice + ?Sized> Registry<C> {
    /// The choice with this name or alias. Fails for an unknown name.
    pub fn get(&self, name: &str) -> Result<&'static C> {
        let is_named =
            |choice: &&&'static C| choice.name() == name || choice.aliases().contains(&name);
        self.choices.iter().copied().find(|choice| is_named(&choice)).ok_or_else(|| {
            let names: Vec<&str> = self.choices.iter().map(|choice| choice.name()).collect();
            Failure::Usage(format!("--{} {name}: pass one of {}", self.key, names.join(", ")))
        })
    }

    /// The names, with their help.
    pub fn values(&self) -> impl Iterator<Item = PossibleValue> {
        self.choices.iter().map(|choice| {
            PossibleValue::new(choice.name()).aliases(choice.aliases()).help(choice.about())
        })
    }

    /// The `clap` parser that accepts the names.
    pub fn parser(&self) -> PossibleValuesParser {
        PossibleValuesParser::new(self.values())
    }

    /// The flags of all choices, each once.
    pub fn flags(&self) -> Vec<Arg> {
        let mut flags: Vec<Arg> = Vec::new();
        for flag in self.choices.iter().flat_map(|choice| choice.flags()) {
            if flags.iter().all(|known| known.get_id() != flag.get_id()) {
                flags.push(flag);
            }
        }
        flags
    }

    /// The flags, without dashes, that some choice reads but `chosen` does not.
    pub fn foreign_to(&self, chosen: &C) -> BTreeSet<String> {
        let names = |flags: Vec<Arg>| -> BTreeSet<String> {
            flags.iter().filter_map(|flag| flag.get_long().map(str::to_owned)).collect()
        };
        &names(self.flags()) - &names(chosen.flags())
    }

    /// The names of the choices that read a flag.
    pub fn readers(&self, flag: &str) -> Vec<&'static str> {
        let reads = |choice: &&C| choice.flags().iter().any(|own| own.get_long() == Some(flag));
        self.choices.iter().copied().filter(|c| reads(c)).map(|choice| choice.name()).collect()
    }
}

/// The flags that a struct derives.
pub fn flags_of<T: Args>() -> Vec<Arg> {
    T::augment_args(Command::new("flags")).get_arguments().cloned().collect()
}

/// Reads a struct of flags from the parsed settings of a run.
pub fn read<T: FromArgMatches>(settings: &ArgMatches) -> Result<T> {
    T::from_arg_matches(settings).map_err(|error| Failure::Usage(error.to_string()))
}

/// A parser for the width of a layer, at most 2^20: large enough for any real model, and small enough
/// that the product of two widths does not overflow.
pub fn width() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(..=1 << 20)
}
