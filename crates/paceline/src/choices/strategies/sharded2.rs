//! `--strategy sharded2`: gradients and optimizer state are divided evenly.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_collectives::Axis;
use paceline_strategies::Sharded2;

use super::sharding::{ShardSettings, accumulate_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSharded2;

impl Choice for ChooseSharded2 {
    fn name(&self) -> &'static str {
        "sharded2"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["pytorch_zero2"]
    }

    fn about(&self) -> &'static str {
        "Gradients and optimizer state in even shards"
    }

    fn flags(&self) -> Vec<Arg> {
        accumulate_flags()
    }
}

impl StrategyChoice for ChooseSharded2 {
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
            |options| Box::new(Sharded2::new(options)),
            |_| Advice::ChooseGathers { prefetch: None },
        )
    }
}
