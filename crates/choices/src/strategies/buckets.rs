//! The common part of strategies with buckets: flags for their sizes, and `ddp` made from them.

use std::sync::Arc;

use clap::{Arg, ArgMatches, Args};
use paceline_failure::Result;
use paceline_failure::numbers::above_zero;
use paceline_strategies::{BucketCaps, Ddp, Strategy};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Advice, StrategySettings, bytes};
use crate::models::Defaults;
use crate::registry::{flags_of, read};

/// Flags of every strategy with buckets.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Strategy")]
pub(super) struct BucketFlags {
    /// Bucket size in MiB [default: 25, or 50 for the MLP]
    #[arg(long, value_name = "MiB", value_parser = above_zero)]
    bucket_cap_mb: Option<f64>,
}

impl BucketFlags {
    /// The size in MiB.
    pub fn mb(&self, defaults: &Defaults) -> f64 {
        self.bucket_cap_mb.unwrap_or(defaults.bucket_cap_mb)
    }
}

/// Flags of `ddp` and its variants with communication hooks, in addition to [`BucketFlags`].
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Strategy")]
pub(super) struct DdpFlags {
    /// Size of the first bucket of ddp in MiB [default: 1, or --bucket-cap-mb if smaller]
    #[arg(long, value_name = "MiB", value_parser = above_zero)]
    first_bucket_mb: Option<f64>,
    /// ddp: copy gradients into the buckets and back, instead of storing them there
    #[arg(long)]
    no_gradient_view: bool,
}

/// Settings of `ddp`, all defaults filled in.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct DdpSettings {
    bucket_cap_mb: f64,
    first_bucket_mb: f64,
    no_gradient_view: bool,
}

impl DdpSettings {
    /// Reads the flags, checks them and fills in the defaults.
    pub fn resolve(settings: &ArgMatches, defaults: &Defaults) -> Result<Self> {
        let (buckets, ddp): (BucketFlags, DdpFlags) = (read(settings)?, read(settings)?);
        let bucket_cap_mb = buckets.mb(defaults);
        Ok(Self {
            bucket_cap_mb,
            first_bucket_mb: ddp.first_bucket_mb.unwrap_or(first_mb(bucket_cap_mb)),
            no_gradient_view: ddp.no_gradient_view,
        })
    }

    /// The sizes in bytes.
    pub fn caps(&self) -> BucketCaps {
        BucketCaps { first_bytes: bytes(self.first_bucket_mb), bytes: bytes(self.bucket_cap_mb) }
    }

    /// The strategy, without a communication hook.
    pub fn ddp(&self) -> Ddp {
        let ddp = Ddp::with_caps(self.caps());
        if self.no_gradient_view { ddp.without_view() } else { ddp }
    }
}

/// `ddp` with its settings, with or without a communication hook.
#[derive(Debug)]
pub(super) struct BucketedDdp {
    settings: DdpSettings,
    /// Adds the communication hook.
    hooked: fn(Ddp) -> Ddp,
    /// The kind of advice that fits.
    advice: Advice,
}

impl BucketedDdp {
    /// Reads the flags of `ddp`. `hooked` adds a communication hook, if there is one.
    pub fn resolve(
        settings: &ArgMatches,
        defaults: &Defaults,
        hooked: fn(Ddp) -> Ddp,
        advice: Advice,
    ) -> Result<Arc<dyn StrategySettings>> {
        let settings = DdpSettings::resolve(settings, defaults)?;
        Ok(Arc::new(Self { settings, hooked, advice }))
    }
}

impl StrategySettings for BucketedDdp {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new((self.hooked)(self.settings.ddp())))
    }

    fn to_json(&self) -> Value {
        json!(self.settings)
    }

    fn caps(&self) -> Option<BucketCaps> {
        Some(self.settings.caps())
    }

    fn advice(&self) -> Advice {
        self.advice
    }
}

/// All flags of `ddp` and its variants.
pub(super) fn ddp_flags() -> Vec<Arg> {
    [flags_of::<BucketFlags>(), flags_of::<DdpFlags>()].concat()
}

/// The default bucket sizes of `ddp`.
pub fn default_caps(defaults: &Defaults) -> BucketCaps {
    let mb = defaults.bucket_cap_mb;
    BucketCaps { first_bytes: bytes(first_mb(mb)), bytes: bytes(mb) }
}

/// The default size of the first bucket, which is small so that communication starts early.
fn first_mb(bucket_cap_mb: f64) -> f64 {
    bucket_cap_mb.min(1.0)
}
