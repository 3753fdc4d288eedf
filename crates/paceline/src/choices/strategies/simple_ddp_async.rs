//! `--strategy simple_ddp_async`: synchronizes while the backward pass continues.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::SimpleDdpAsync;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSimpleDdpAsync;

impl Choice for ChooseSimpleDdpAsync {
    fn name(&self) -> &'static str {
        "simple_ddp_async"
    }

    fn about(&self) -> &'static str {
        "One asynchronous all-reduce per parameter, during backward"
    }
}

impl StrategyChoice for ChooseSimpleDdpAsync {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(SimpleDdpAsync::default)))
    }
}
