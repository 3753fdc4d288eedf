//! The flags of the strategies that divide the model among the ranks.

use std::sync::Arc;

use clap::{Arg, ArgMatches, Args, ValueEnum};
use paceline_collectives::MeshShape;
use paceline_failure::{Result, usage};
use paceline_model::Model;
use paceline_strategies::{ShardAccumulation, ShardOptions, Sharded, Strategy, Zero, ZeroStage};

use super::{Advice, StrategySettings};
use crate::registry::{flags_of, read};

/// How gradients of several micro-batches are added up.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum AccumulateName {
    /// Each rank adds up whole gradients: the bits and the memory of replicas
    Whole,
    /// Gradients are reduced after each batch: less memory, other bits
    Shards,
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
    /// sharded3: gather parameters in this type. With bf16 half of the bytes travel, passes work with rounded parameters, and owners keep
    /// all digits
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    gather_precision: GatherPrecision,
}

/// The type in which parameters are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GatherPrecision {
    F32,
    Bf16,
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
    stage: ZeroStage,
    options: ShardOptions,
    /// Otherwise by whole parameters.
    is_even: bool,
}

impl ShardSettings {
    /// Reads the flags above. A strategy ignores the options for which it has no flag.
    pub(super) fn resolve(
        settings: &ArgMatches,
        stage: ZeroStage,
        is_even: bool,
    ) -> Result<Arc<dyn StrategySettings>> {
        let accumulate: AccumulateFlags = read(settings)?;
        let gather: GatherFlags = read(settings)?;
        let stated = settings.try_get_one::<usize>("accumulate").ok().flatten();
        let options = ShardOptions {
            prefetch: gather.prefetch,
            keep_after_forward: gather.keep_after_forward,
            max_micro_batches: stated.copied().unwrap_or(1),
            gathers_bf16: gather.gather_precision == GatherPrecision::Bf16,
            accumulation: match accumulate.accumulate_in {
                AccumulateName::Whole => ShardAccumulation::Whole,
                AccumulateName::Shards => ShardAccumulation::Shards,
            },
        };
        Ok(Arc::new(Self { stage, options, is_even }))
    }

    fn strategy(&self) -> Box<dyn Strategy> {
        if self.is_even {
            Box::new(Sharded::new(self.stage, self.options))
        } else {
            Box::new(Zero::new(self.stage, self.options))
        }
    }

    /// A warning if a rank owns nothing but padding.
    fn idle_ranks(&self, model: &Model, world_size: usize) -> Option<String> {
        let strategy = self.strategy();
        let mesh = MeshShape::replicas(world_size);
        let params: Vec<_> = model.layout.trained().map(|(_, param)| param.range()).collect();
        let has_any = |rank: &usize| {
            let owned = strategy.owned(model, &mesh, *rank).state;
            owned.iter().any(|own| params.iter().any(|p| p.start < own.end && own.start < p.end))
        };
        let idle: Vec<String> =
            (0..world_size).filter(|rank| !has_any(rank)).map(|rank| rank.to_string()).collect();
        (!idle.is_empty()).then(|| {
            format!(
                "{} divides the model so that nothing is left for rank {}: use fewer ranks, or a larger model",
                strategy.name(),
                idle.join(", ")
            )
        })
    }
}

impl StrategySettings for ShardSettings {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(self.strategy())
    }

    fn advice(&self) -> Advice {
        match self.stage {
            ZeroStage::Three if self.is_even => {
                Advice::ChooseGathers { prefetch: Some(self.options.prefetch) }
            }
            _ if self.is_even => Advice::ChooseGathers { prefetch: None },
            ZeroStage::One => Advice::ShardWith("sharded1"),
            ZeroStage::Two => Advice::ShardWith("sharded2"),
            ZeroStage::Three => Advice::ShardWith("sharded3"),
        }
    }

    fn check(&self, model: &Model, world_size: usize) -> Result<Vec<String>> {
        let elems = model.layout.num_trained_params();
        if elems < world_size {
            return usage(format!(
                "{world_size} ranks cannot share {elems} trained parameters: each rank must own at least one; pass \
                 a smaller --nproc or a larger model"
            ));
        }
        let units = ShardOptions::num_gathered(model);
        let ShardOptions { prefetch, keep_after_forward, .. } = self.options;
        let gathers = matches!(self.advice(), Advice::ChooseGathers { prefetch: Some(_) });
        if gathers && prefetch >= units.max(2) {
            return usage(format!(
                "--prefetch {prefetch}: the model has {units} units, so at most {} can be ahead of the one in use; \
                 pass 0 to {}",
                units.saturating_sub(1),
                units.saturating_sub(1)
            ));
        }
        if gathers && keep_after_forward > units.max(1) {
            return usage(format!(
                "--keep-after-forward {keep_after_forward}: the model has {units} units; pass 0 to {units}, or \
                 --strategy sharded2, which keeps all of them"
            ));
        }
        Ok(self.idle_ranks(model, world_size).into_iter().collect())
    }
}
