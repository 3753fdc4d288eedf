//! `--strategy fp16`: `ddp` with gradients in half precision.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::HalfPrecision;

use super::buckets::{BucketedDdp, DdpSettings, ddp_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseFp16;

impl Choice for ChooseFp16 {
    fn name(&self) -> &'static str {
        "fp16"
    }

    fn about(&self) -> &'static str {
        "ddp with gradients in half precision"
    }

    fn flags(&self) -> Vec<Arg> {
        ddp_flags()
    }
}

impl StrategyChoice for ChooseFp16 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn resolve(
        &self,
        settings: &ArgMatches,
        defaults: &Defaults,
    ) -> Result<Arc<dyn StrategySettings>> {
        let settings = DdpSettings::resolve(settings, defaults)?;
        Ok(Arc::new(BucketedDdp {
            settings,
            hooked: |ddp| ddp.with_hook(HalfPrecision::fp16()),
            advice: Advice::CompareWithDdp,
        }))
    }
}
