//! `--strategy bucket_ddp_async`: gradients are copied into buckets that are reduced during backward.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_failure::Result;
use paceline_strategies::{BucketDdpAsync, Strategy};
use serde::Serialize;
use serde_json::{Value, json};

use super::buckets::BucketFlags;
use super::{StrategySettings, bytes};
use crate::models::Defaults;
use crate::registry::{flags_of, read};

#[derive(Debug, Serialize)]
struct Settings {
    bucket_cap_mb: f64,
}

/// Its flags.
pub(super) fn flags() -> Vec<Arg> {
    flags_of::<BucketFlags>()
}

/// Reads the flags.
pub(super) fn resolve(
    settings: &ArgMatches,
    defaults: &Defaults,
) -> Result<Arc<dyn StrategySettings>> {
    let flags: BucketFlags = read(settings)?;
    Ok(Arc::new(Settings { bucket_cap_mb: flags.mb(defaults) }))
}

impl StrategySettings for Settings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(BucketDdpAsync::new(bytes(self.bucket_cap_mb))))
    }

    fn to_json(&self) -> Value {
        json!(self)
    }
}
