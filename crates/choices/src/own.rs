//! A program's own choices: a type whose fields are the flags, and the registry entry that is made from it.
//!
//! This file does not know which programs there are.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use clap::{Arg, ArgMatches, Args};
use paceline_failure::Result;

use super::data::{DataChoice, DataSettings, RunNeeds};
use super::models::{Defaults, ModelChoice, ModelSettings};
use super::registry::{Choice, flags_of, read};
use super::strategies::{StrategyChoice, StrategySettings, Synchronizes};

/// A choice that a program adds. The fields of the type are its flags: each field has the help, the accepted values and the
/// default of one flag. So a value of the type is the choice with all its settings.
///
/// The type also implements [`ModelSettings`], [`DataSettings`] or [`OwnStrategy`], and is added by a method of
/// `paceline::Program`.
pub trait Own: Args + Debug + Send + Sync + 'static {
    /// Its name on the command line and in files.
    const NAME: &'static str;

    /// One line of help.
    const ABOUT: &'static str;
}

/// A strategy that a program adds.
pub trait OwnStrategy: Own + StrategySettings {
    /// How often the ranks' models are made equal.
    const SYNCHRONIZES: Synchronizes;
}

/// The registry entry of a type.
pub struct Entry<T>(pub PhantomData<fn() -> T>);

impl<T: Own> Choice for Entry<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn about(&self) -> &'static str {
        T::ABOUT
    }

    fn flags(&self) -> Vec<Arg> {
        flags_of::<T>()
    }
}

impl<T: Own + ModelSettings> ModelChoice for Entry<T> {
    fn resolve(&self, settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>> {
        Ok(Arc::new(read::<T>(settings)?))
    }
}

impl<T: Own + DataSettings> DataChoice for Entry<T> {
    fn resolve(&self, settings: &ArgMatches, _: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
        Ok(Arc::new(read::<T>(settings)?))
    }
}

impl<T: OwnStrategy> StrategyChoice for Entry<T> {
    fn synchronizes(&self) -> Synchronizes {
        T::SYNCHRONIZES
    }

    fn resolve(&self, settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(read::<T>(settings)?))
    }
}
