//! The flags of the strategies that divide the model among the ranks.

use std::sync::Arc;

use clap::builder::PossibleValue;
use clap::{Arg, ArgMatches, Args, ValueEnum};
use paceline_strategies::{ShardAccumulation, ShardOptions, Strategy};

use super::StrategySettings;
use crate::Result;
use crate::choices::registry::{flags_of, read};

/// How gradients of several micro-batches are added up.
#[derive(Clone, Copy, Debug)]
enum AccumulateName {
    Whole,
    Shards,
}

impl ValueEnum for AccumulateName {
    fn value_variants<'a>() -> &'a [Self] {
        &[AccumulateName::Whole, AccumulateName::Shards]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            AccumulateName::Whole => PossibleValue::new("whole")
                .help("Each rank adds up whole gradients: the bits and the memory of replicas"),
            AccumulateName::Shards => PossibleValue::new("shards")
                .help("Gradients are reduced after each batch: less memory, other bits"),
        })
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Strategy")]
struct AccumulateFlags {
    /// Sharding with --accumulate: whether ranks add up whole gradients or their shards
    #[arg(long, value_name = "WHAT", value_enum, default_value = "whole")]
    accumulate_in: AccumulateName,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Strategy")]
struct GatherFlags {
    /// sharded3: units that are gathered ahead of the one in use
    #[arg(long, value_name = "UNITS", default_value_t = ShardOptions::default().prefetch)]
    prefetch: usize,
    /// sharded3: last units of the forward pass that stay gathered until their backward pass
    #[arg(long, value_name = "UNITS", default_value_t = ShardOptions::default().keep_after_forward)]
    keep_after_forward: usize,
}

/// The flags of strategies that divide gradients.
pub(super) fn accumulate_flags() -> Vec<Arg> {
    flags_of::<AccumulateFlags>()
}

/// The flags of strategies that divide parameters evenly.
pub(super) fn gather_flags() -> Vec<Arg> {
    flags_of::<GatherFlags>()
}

/// A strategy that divides the model, with its options.
#[derive(Debug)]
pub(super) struct ShardSettings {
    options: ShardOptions,
    build: fn(ShardOptions) -> Box<dyn Strategy>,
}

impl ShardSettings {
    /// Reads the flags above. A strategy ignores the options for which it has no flag.
    pub(super) fn resolve(
        settings: &ArgMatches,
        build: fn(ShardOptions) -> Box<dyn Strategy>,
    ) -> Result<Arc<dyn StrategySettings>> {
        let accumulate: AccumulateFlags = read(settings)?;
        let gather: GatherFlags = read(settings)?;
        let stated = settings.try_get_one::<usize>("accumulate").ok().flatten();
        let options = ShardOptions {
            prefetch: gather.prefetch,
            keep_after_forward: gather.keep_after_forward,
            max_micro_batches: stated.copied().unwrap_or(1),
            accumulation: match accumulate.accumulate_in {
                AccumulateName::Whole => ShardAccumulation::Whole,
                AccumulateName::Shards => ShardAccumulation::Shards,
            },
        };
        Ok(Arc::new(Self { options, build }))
    }
}

impl StrategySettings for ShardSettings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok((self.build)(self.options))
    }
}
