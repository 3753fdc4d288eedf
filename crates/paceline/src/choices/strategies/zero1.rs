//! `--strategy zero1`: optimizer state is divided by whole parameters.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::Zero1;

use super::sharding::ShardSettings;
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseZero1;

impl Choice for ChooseZero1 {
    fn name(&self) -> &'static str {
        "zero1"
    }

    fn about(&self) -> &'static str {
        "Optimizer state divided by whole parameters; owners send what they update"
    }
}

impl StrategyChoice for ChooseZero1 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn resolve(&self, settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        ShardSettings::resolve(settings, |_| Box::new(Zero1), |_| Advice::ShardWith("sharded1"))
    }
}
