//! `--strategy no_sync`: no communication, to see what communication costs.

use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::{NoSync, Strategy};

use super::{Models, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseNoSync;

#[derive(Debug)]
struct Settings;

impl Choice for ChooseNoSync {
    fn name(&self) -> &'static str {
        "no_sync"
    }

    fn about(&self) -> &'static str {
        "No communication: what ddp is compared with to see what it costs"
    }
}

impl StrategyChoice for ChooseNoSync {
    fn synchronises(&self) -> Synchronises {
        Synchronises::Never
    }

    fn resolve(&self, _: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
        Ok(Arc::new(Settings))
    }
}

impl StrategySettings for Settings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(NoSync))
    }

    fn models(&self) -> Models {
        Models::Worthless
    }
}
