//! `--strategy sharded1`: optimizer state is divided evenly.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_collectives::Axis;
use paceline_strategies::Sharded1;

use super::sharding::ShardSettings;
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSharded1;

impl Choice for ChooseSharded1 {
    fn name(&self) -> &'static str {
        "sharded1"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["pytorch_zero1"]
    }

    fn about(&self) -> &'static str {
        "Optimizer state in even shards; reduced during backward, gathered during forward"
    }
}

impl StrategyChoice for ChooseSharded1 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn axes(&self) -> &'static [Axis] {
        &[Axis::Dp, Axis::Shard]
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn resolve(&self, settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        ShardSettings::resolve(
            settings,
            |_| Box::new(Sharded1::default()),
            |_| Advice::ChooseGathers { prefetch: None },
        )
    }
}
