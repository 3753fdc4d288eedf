//! `--strategy ddp`: gradients live in buckets that are reduced during backward.

use std::sync::Arc;

use clap::{Arg, ArgMatches};

use super::buckets::{BucketedDdp, DdpSettings, ddp_flags};
use super::{Advice, StrategyChoice, StrategySettings, Synchronises};
use crate::Result;
use crate::choices::models::Defaults;
use crate::choices::registry::Choice;

/// The choice.
pub(super) struct ChooseDdp;

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
        ddp_flags()
    }
}

impl StrategyChoice for ChooseDdp {
    fn synchronises(&self) -> Synchronises {
        Synchronises::EveryStep
    }

    fn steps_every_batch_as_published(&self) -> bool {
        true
    }

    fn resolve(
        &self,
        settings: &ArgMatches,
        defaults: &Defaults,
    ) -> Result<Arc<dyn StrategySettings>> {
        let settings = DdpSettings::resolve(settings, defaults)?;
        Ok(Arc::new(BucketedDdp { settings, hooked: |ddp| ddp, advice: Advice::ChooseBuckets }))
    }
}
