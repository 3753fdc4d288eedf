//! `--strategy sharded3`: parameters, gradients and optimizer state are divided evenly.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_collectives::Axis;
use paceline_strategies::Sharded3;

use super::sharding::{ShardSettings, accumulate_flags, gather_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSharded3;

impl Choice for ChooseSharded3 {
    fn name(&self) -> &'static str {
        "sharded3"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["pytorch_zero3"]
    }

    fn about(&self) -> &'static str {
        "Parameters, gradients and optimizer state in even shards; gathered ahead"
    }

    fn flags(&self) -> Vec<Arg> {
        [accumulate_flags(), gather_flags()].concat()
    }
}

impl StrategyChoice for ChooseSharded3 {
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
            |options| Box::new(Sharded3::new(options)),
            |options| Advice::ChooseGathers { prefetch: Some(options.prefetch) },
        )
    }
}
