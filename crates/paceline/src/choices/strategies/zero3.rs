//! `--strategy zero3`: parameters, gradients and optimizer state are divided by whole parameters.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::Zero3;

use super::sharding::{ShardSettings, accumulate_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseZero3;

impl Choice for ChooseZero3 {
    fn name(&self) -> &'static str {
        "zero3"
    }

    fn about(&self) -> &'static str {
        "Parameters, gradients and optimizer state divided by whole parameters"
    }

    fn flags(&self) -> Vec<Arg> {
        accumulate_flags()
    }
}

impl StrategyChoice for ChooseZero3 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn resolve(&self, settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        ShardSettings::resolve(
            settings,
            |options| Box::new(Zero3::new(options)),
            |_| Advice::ShardWith("sharded3"),
        )
    }
}
