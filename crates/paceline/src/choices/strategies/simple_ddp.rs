//! `--strategy simple_ddp`: the simplest synchronization.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::SimpleDdp;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSimpleDdp;

impl Choice for ChooseSimpleDdp {
    fn name(&self) -> &'static str {
        "simple_ddp"
    }

    fn about(&self) -> &'static str {
        "After backward, one blocking all-reduce per parameter"
    }
}

impl StrategyChoice for ChooseSimpleDdp {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn steps_every_batch_as_published(&self) -> bool {
        true
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(|| SimpleDdp)))
    }
}
