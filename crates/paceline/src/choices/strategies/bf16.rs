//! `--strategy bf16`: `ddp` with gradients in bfloat16.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::HalfPrecision;

use super::buckets::{BucketedDdp, DdpSettings, ddp_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseBf16;

impl Choice for ChooseBf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn about(&self) -> &'static str {
        "ddp with gradients in bfloat16"
    }

    fn flags(&self) -> Vec<Arg> {
        ddp_flags()
    }
}

impl StrategyChoice for ChooseBf16 {
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
            hooked: |ddp| ddp.with_hook(HalfPrecision::bf16()),
            advice: Advice::CompareWithDdp,
        }))
    }
}
