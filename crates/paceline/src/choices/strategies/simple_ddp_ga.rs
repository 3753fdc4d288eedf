//! `--strategy simple_ddp_ga`: `simple_ddp` that accumulates gradients by default.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::SimpleDdpGa;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSimpleDdpGa;

impl Choice for ChooseSimpleDdpGa {
    fn name(&self) -> &'static str {
        "simple_ddp_ga"
    }

    fn about(&self) -> &'static str {
        "simple_ddp that accumulates the gradients of several batches"
    }
}

impl StrategyChoice for ChooseSimpleDdpGa {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn accumulate(&self) -> usize {
        SimpleDdpGa::ACCUMULATION
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(|| SimpleDdpGa)))
    }
}
