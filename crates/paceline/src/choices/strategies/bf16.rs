//! `--strategy bf16`: `ddp` with gradients in bfloat16.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::{BucketCaps, HalfPrecision, Strategy};
use serde_json::{Value, json};

use super::buckets::{BucketFlags, DdpFlags, DdpSettings};
use super::{Advice, Bits, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::{Choice, flags_of, read};

/// The choice.
pub(super) struct ChooseBf16;

#[derive(Debug)]
struct Settings(DdpSettings);

impl Choice for ChooseBf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn about(&self) -> &'static str {
        "ddp with gradients in bfloat16"
    }

    fn flags(&self) -> Vec<Arg> {
        [flags_of::<BucketFlags>(), flags_of::<DdpFlags>()].concat()
    }
}

impl StrategyChoice for ChooseBf16 {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn bits(&self) -> Bits {
        Bits::Own
    }

    fn resolve(
        &self,
        settings: &ArgMatches,
        defaults: &Defaults,
    ) -> Result<Arc<dyn StrategySettings>> {
        let ddp = DdpSettings::resolve(read(settings)?, read(settings)?, defaults)?;
        Ok(Arc::new(Settings(ddp)))
    }
}

impl StrategySettings for Settings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(self.0.ddp().with_hook(HalfPrecision::bf16())))
    }

    fn to_json(&self) -> Value {
        json!(self.0)
    }

    fn caps(&self) -> Option<BucketCaps> {
        Some(self.0.caps())
    }

    fn advice(&self) -> Advice {
        Advice::CompareWithDdp
    }
}
