//! `--strategy ddp`: gradients live in buckets that are reduced during backward.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_strategies::{BucketCaps, Strategy};
use serde_json::{Value, json};

use super::buckets::{BucketFlags, DdpFlags, DdpSettings};
use super::{Advice, Bits, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::{Choice, flags_of, read};

/// The choice.
pub(super) struct ChooseDdp;

#[derive(Debug)]
struct Settings(DdpSettings);

impl Choice for ChooseDdp {
    fn name(&self) -> &'static str {
        "ddp"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["pytorch_ddp"]
    }

    fn about(&self) -> &'static str {
        "Gradients live in buckets that are reduced during backward"
    }

    fn flags(&self) -> Vec<Arg> {
        [flags_of::<BucketFlags>(), flags_of::<DdpFlags>()].concat()
    }
}

impl StrategyChoice for ChooseDdp {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn bits(&self) -> Bits {
        Bits::Exact
    }

    fn steps_every_batch_as_published(&self) -> bool {
        true
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
        Ok(Box::new(self.0.ddp()))
    }

    fn to_json(&self) -> Value {
        json!(self.0)
    }

    fn caps(&self) -> Option<BucketCaps> {
        Some(self.0.caps())
    }

    fn advice(&self) -> Advice {
        Advice::ChooseBuckets
    }
}
