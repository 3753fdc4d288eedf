//! `--strategy simple_ddp_hook`: synchronizes during the backward pass, and blocks it.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::SimpleDdpHook;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseSimpleDdpHook;

impl Choice for ChooseSimpleDdpHook {
    fn name(&self) -> &'static str {
        "simple_ddp_hook"
    }

    fn about(&self) -> &'static str {
        "One blocking all-reduce per parameter, during backward"
    }
}

impl StrategyChoice for ChooseSimpleDdpHook {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(SimpleDdpHook::default)))
    }
}
