//! The strategies that paceline comes with, one row each, in the order in which they are compared.
//!
//! A row says how a strategy is named, which flags it reads, how it is built from them, and where it differs from the usual:
//! ranks whose models are equal after every step. To add a strategy to paceline, add a row.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_collectives::Axis;
use paceline_failure::Result;
use paceline_strategies::{
    Ddp, FlatDdp, HalfPrecision, NoSync, Sharded, SimpleDdp, SimpleDdpAsync, SimpleDdpGa,
    SimpleDdpHook, Single, Strategy, Zero, ZeroStage,
};

use super::buckets::{BucketedDdp, ddp_flags};
use super::sharding::{ShardSettings, accumulate_flags, gather_flags};
use super::{
    Advice, Models, Plain, StrategyChoice, StrategySettings, Synchronizes, bucket_ddp_async,
    local_sgd, top_k,
};
use crate::models::Defaults;
use crate::registry::Choice;

/// Reads a strategy's flags, checks them and fills in the defaults.
type Resolve = fn(&ArgMatches, &Defaults) -> Result<Arc<dyn StrategySettings>>;

/// A strategy that paceline comes with: the fields for [`Choice`] and [`StrategyChoice`].
struct Row {
    name: &'static str,
    aliases: &'static [&'static str],
    about: &'static str,
    flags: fn() -> Vec<Arg>,
    synchronizes: Synchronizes,
    accumulate: usize,
    axes: &'static [Axis],
    is_sharded: bool,
    resolve: Resolve,
}

/// The rows.
pub(super) const ROWS: &[&dyn StrategyChoice] = &[
    &Row {
        synchronizes: Synchronizes::Alone,
        ..Row::new("single", "One rank, no communication", |_, _| plain(|| Single))
    },
    &Row::new("simple_ddp", "After backward, one blocking all-reduce per parameter", |_, _| {
        plain(|| SimpleDdp)
    }),
    &Row {
        accumulate: SimpleDdpGa::ACCUMULATION,
        ..Row::new(
            "simple_ddp_ga",
            "simple_ddp that accumulates the gradients of several batches",
            |_, _| plain(|| SimpleDdpGa),
        )
    },
    &Row::new(
        "simple_ddp_hook",
        "One blocking all-reduce per parameter, during backward",
        |_, _| plain(SimpleDdpHook::default),
    ),
    &Row::new(
        "simple_ddp_async",
        "One asynchronous all-reduce per parameter, during backward",
        |_, _| plain(SimpleDdpAsync::default),
    ),
    &Row {
        flags: bucket_ddp_async::flags,
        ..Row::new(
            "bucket_ddp_async",
            "Gradients are copied into buckets that are reduced during backward",
            bucket_ddp_async::resolve,
        )
    },
    &Row {
        aliases: &["pytorch_ddp"],
        ..Row::of_ddp(
            "ddp",
            "Gradients live in buckets that are reduced during backward",
            |settings, defaults| {
                BucketedDdp::resolve(settings, defaults, |ddp| ddp, Advice::ChooseBuckets)
            },
        )
    },
    &Row::new("flat_ddp", "One all-reduce of everything after backward", |_, _| plain(|| FlatDdp)),
    &Row {
        is_sharded: true,
        ..Row::new(
            "zero1",
            "Optimizer state divided by whole parameters; owners send what they update",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Zero::new(ZeroStage::One, options)),
                    |_| Advice::ShardWith("sharded1"),
                )
            },
        )
    },
    &Row {
        flags: accumulate_flags,
        is_sharded: true,
        ..Row::new(
            "zero2",
            "Gradients and optimizer state divided by whole parameters",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Zero::new(ZeroStage::Two, options)),
                    |_| Advice::ShardWith("sharded2"),
                )
            },
        )
    },
    &Row {
        flags: accumulate_flags,
        is_sharded: true,
        ..Row::new(
            "zero3",
            "Parameters, gradients and optimizer state divided by whole parameters",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Zero::new(ZeroStage::Three, options)),
                    |_| Advice::ShardWith("sharded3"),
                )
            },
        )
    },
    &Row {
        aliases: &["pytorch_zero1"],
        ..Row::in_even_shards(
            "sharded1",
            "Optimizer state in even shards; reduced during backward, gathered during forward",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Sharded::new(ZeroStage::One, options)),
                    |_| Advice::ChooseGathers { prefetch: None },
                )
            },
        )
    },
    &Row {
        aliases: &["pytorch_zero2"],
        flags: accumulate_flags,
        ..Row::in_even_shards(
            "sharded2",
            "Gradients and optimizer state in even shards",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Sharded::new(ZeroStage::Two, options)),
                    |_| Advice::ChooseGathers { prefetch: None },
                )
            },
        )
    },
    &Row {
        aliases: &["pytorch_zero3"],
        flags: || [accumulate_flags(), gather_flags()].concat(),
        ..Row::in_even_shards(
            "sharded3",
            "Parameters, gradients and optimizer state in even shards; gathered ahead",
            |settings, _| {
                ShardSettings::resolve(
                    settings,
                    |options| Box::new(Sharded::new(ZeroStage::Three, options)),
                    |options| Advice::ChooseGathers { prefetch: Some(options.prefetch) },
                )
            },
        )
    },
    &Row {
        flags: top_k::flags,
        ..Row::new(
            "top_k",
            "ddp that sends the largest gradients only and keeps the others for later steps",
            top_k::resolve,
        )
    },
    &Row::of_ddp("fp16", "ddp with gradients in half precision", |settings, defaults| {
        let hooked = |ddp: Ddp| ddp.with_hook(HalfPrecision::fp16());
        BucketedDdp::resolve(settings, defaults, hooked, Advice::CompareWithDdp)
    }),
    &Row::of_ddp("bf16", "ddp with gradients in bfloat16", |settings, defaults| {
        let hooked = |ddp: Ddp| ddp.with_hook(HalfPrecision::bf16());
        BucketedDdp::resolve(settings, defaults, hooked, Advice::CompareWithDdp)
    }),
    &Row {
        flags: local_sgd::flags,
        synchronizes: Synchronizes::SomeSteps,
        ..Row::new(
            "local_sgd",
            "Ranks train alone and average their parameters every few steps",
            local_sgd::resolve,
        )
    },
    &Row {
        synchronizes: Synchronizes::Never,
        ..Row::new(
            "no_sync",
            "No communication: what ddp is compared with to see what it costs",
            |_, _| Ok(Arc::new(Plain { make: || NoSync, models: Models::Worthless })),
        )
    },
];

impl Row {
    /// A strategy that keeps replicas equal and has no flags.
    const fn new(name: &'static str, about: &'static str, resolve: Resolve) -> Self {
        Self {
            name,
            aliases: &[],
            about,
            flags: Vec::new,
            synchronizes: Synchronizes::EveryStep,
            accumulate: 1,
            axes: &[Axis::Dp],
            is_sharded: false,
            resolve,
        }
    }

    /// `ddp`, or `ddp` with a communication hook.
    const fn of_ddp(name: &'static str, about: &'static str, resolve: Resolve) -> Self {
        Self { flags: ddp_flags, ..Self::new(name, about, resolve) }
    }

    /// A strategy that divides the model evenly, and can do so among some of the ranks.
    const fn in_even_shards(name: &'static str, about: &'static str, resolve: Resolve) -> Self {
        Self { axes: &[Axis::Dp, Axis::Shard], is_sharded: true, ..Self::new(name, about, resolve) }
    }
}

/// The settings of a strategy without settings of its own.
fn plain<S: Strategy + 'static>(make: fn() -> S) -> Result<Arc<dyn StrategySettings>> {
    Ok(Arc::new(Plain { make, models: Models::Equal }))
}

impl Choice for Row {
    fn name(&self) -> &'static str {
        self.name
    }

    fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn flags(&self) -> Vec<Arg> {
        (self.flags)()
    }
}

impl StrategyChoice for Row {
    fn synchronizes(&self) -> Synchronizes {
        self.synchronizes
    }

    fn accumulate(&self) -> usize {
        self.accumulate
    }

    fn axes(&self) -> &'static [Axis] {
        self.axes
    }

    fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    fn resolve(
        &self,
        settings: &ArgMatches,
        defaults: &Defaults,
    ) -> Result<Arc<dyn StrategySettings>> {
        (self.resolve)(settings, defaults)
    }
}
