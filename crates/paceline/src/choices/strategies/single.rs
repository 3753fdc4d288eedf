//! `--strategy single`: one rank trains alone.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::Single;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSingle;

impl Choice for ChooseSingle {
    fn name(&self) -> &'static str {
        "single"
    }

    fn about(&self) -> &'static str {
        "One rank, no communication"
    }
}

impl StrategyChoice for ChooseSingle {
    fn synchronises(&self) -> Synchronises {
        Synchronises::Alone
    }

    fn steps_every_batch_as_published(&self) -> bool {
        true
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(|| Single)))
    }
}
