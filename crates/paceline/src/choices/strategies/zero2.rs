//! `--strategy zero2`: gradients and optimizer state are divided by whole parameters.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::Zero2;

use super::sharding::{ShardSettings, accumulate_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseZero2;

impl Choice for ChooseZero2 {
    fn name(&self) -> &'static str {
        "zero2"
    }

    fn about(&self) -> &'static str {
        "Gradients and optimizer state divided by whole parameters"
    }

    fn flags(&self) -> Vec<Arg> {
        accumulate_flags()
    }
}

impl StrategyChoice for ChooseZero2 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn resolve(&self, settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        ShardSettings::resolve(
            settings,
            |options| Box::new(Zero2::new(options)),
            |_| Advice::ShardWith("sharded2"),
        )
    }
}
