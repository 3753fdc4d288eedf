//! `--strategy top_k`: `ddp` that sends the largest gradients only and keeps the others for later steps.

use std::sync::Arc;

use clap::{Arg, ArgMatches, Args};
use paceline_failure::Result;
use paceline_failure::numbers::part;
use paceline_strategies::{BucketCaps, Strategy, TopK};
use serde::Serialize;
use serde_json::{Value, json};

use super::buckets::{DdpSettings, ddp_flags};
use super::{Advice, StrategySettings};
use crate::models::Defaults;
use crate::registry::{flags_of, read};

#[derive(Debug, Args)]
#[command(next_help_heading = "Strategy")]
struct Flags {
    /// top_k: the fraction of the gradients to send, above 0 and up to 1
    #[arg(long, value_name = "K", default_value_t = TopK::DEFAULT_K, value_parser = part)]
    top_k: f64,
}

#[derive(Debug, Serialize)]
struct Settings {
    #[serde(flatten)]
    ddp: DdpSettings,
    top_k: f64,
}

/// Its flags.
pub(super) fn flags() -> Vec<Arg> {
    [ddp_flags(), flags_of::<Flags>()].concat()
}

/// Reads the flags.
pub(super) fn resolve(
    settings: &ArgMatches,
    defaults: &Defaults,
) -> Result<Arc<dyn StrategySettings>> {
    let ddp = DdpSettings::resolve(settings, defaults)?;
    let Flags { top_k } = read(settings)?;
    Ok(Arc::new(Settings { ddp, top_k }))
}

impl StrategySettings for Settings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(self.ddp.ddp().with_hook(TopK::new(self.top_k)?)))
    }

    fn to_json(&self) -> Value {
        json!(self)
    }

    fn caps(&self) -> Option<BucketCaps> {
        Some(self.ddp.caps())
    }

    fn weights_follow_from_buckets(&self) -> bool {
        self.top_k < 1.0
    }

    fn keeps_gradients(&self) -> bool {
        self.top_k < 1.0
    }

    fn advice(&self) -> Advice {
        Advice::CompareWithDdp
    }
}
