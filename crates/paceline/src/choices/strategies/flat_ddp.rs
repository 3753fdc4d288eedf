//! `--strategy flat_ddp`: one all-reduce of all gradients.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::FlatDdp;

use super::{Plain, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseFlatDdp;

impl Choice for ChooseFlatDdp {
    fn name(&self) -> &'static str {
        "flat_ddp"
    }

    fn about(&self) -> &'static str {
        "One all-reduce of everything after backward"
    }
}

impl StrategyChoice for ChooseFlatDdp {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Plain(|| FlatDdp)))
    }
}
