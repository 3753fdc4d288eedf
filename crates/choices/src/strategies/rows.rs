//! The strategies that paceline comes with, one row each, in the order in which they are compared.
//!
//! A row says how a strategy is named, which flags it reads, how it is built from them, and where it differs from the usual:
//! ranks whose models are equal after every step. To add a strategy to paceline, add a row.

use std::sync::Arc;

use clap::Arg;
use paceline_collectives::Axis;
use paceline_strategies::{
    Ddp, FlatDdp, HalfPrecision, NoSync, SimpleDdp, SimpleDdpAsync, SimpleDdpGa, SimpleDdpHook,
    Single, Strategy, ZeroStage,
};

use super::buckets::{BucketedDdp, ddp_flags};
use super::sharding::{ShardSettings, accumulate_flags, gather_flags};
use super::{
    Advice, Models, OfStrategy, Plain, Resolve, Synchronizes, bucket_ddp_async, local_sgd, top_k,
};
use crate::registry::Choice;

type Row = Choice<OfStrategy>;

/// Even shards can be those of some of the ranks.
const EVENLY: &[Axis] = &[Axis::Dp, Axis::Shard];

/// The rows.
pub(super) const ROWS: &[&Row] = &[
    &row(
        "single",
        "One rank, no communication",
        Vec::new,
        OfStrategy { synchronizes: Synchronizes::Alone, ..made_by::<Single>() },
    ),
    &plain::<SimpleDdp>("simple_ddp", "After backward, one blocking all-reduce per parameter"),
    &row(
        "simple_ddp_ga",
        "simple_ddp that accumulates the gradients of several batches",
        Vec::new,
        OfStrategy { accumulate: SimpleDdpGa::ACCUMULATION, ..made_by::<SimpleDdpGa>() },
    ),
    &plain::<SimpleDdpHook>(
        "simple_ddp_hook",
        "One blocking all-reduce per parameter, during backward",
    ),
    &plain::<SimpleDdpAsync>(
        "simple_ddp_async",
        "One asynchronous all-reduce per parameter, during backward",
    ),
    &row(
        "bucket_ddp_async",
        "Gradients are copied into buckets that are reduced during backward",
        bucket_ddp_async::flags,
        OfStrategy::read_by(bucket_ddp_async::resolve),
    ),
    &Row {
        aliases: &["pytorch_ddp"],
        ..row(
            "ddp",
            "Gradients live in buckets that are reduced during backward",
            ddp_flags,
            OfStrategy::read_by(|settings, defaults| {
                BucketedDdp::resolve(settings, defaults, |ddp| ddp, Advice::ChooseBuckets)
            }),
        )
    },
    &plain::<FlatDdp>("flat_ddp", "One all-reduce of everything after backward"),
    &row(
        "zero1",
        "Optimizer state divided by whole parameters; owners send what they update",
        Vec::new,
        sharded(&[Axis::Dp], |settings, _| ShardSettings::resolve(settings, ZeroStage::One, false)),
    ),
    &row(
        "zero2",
        "Gradients and optimizer state divided by whole parameters",
        accumulate_flags,
        sharded(&[Axis::Dp], |settings, _| ShardSettings::resolve(settings, ZeroStage::Two, false)),
    ),
    &row(
        "zero3",
        "Parameters, gradients and optimizer state divided by whole parameters",
        accumulate_flags,
        sharded(&[Axis::Dp], |settings, _| {
            ShardSettings::resolve(settings, ZeroStage::Three, false)
        }),
    ),
    &Row {
        aliases: &["pytorch_zero1"],
        ..row(
            "sharded1",
            "Optimizer state in even shards; reduced during backward, gathered during forward",
            Vec::new,
            sharded(EVENLY, |settings, _| ShardSettings::resolve(settings, ZeroStage::One, true)),
        )
    },
    &Row {
        aliases: &["pytorch_zero2"],
        ..row(
            "sharded2",
            "Gradients and optimizer state in even shards",
            accumulate_flags,
            sharded(EVENLY, |settings, _| ShardSettings::resolve(settings, ZeroStage::Two, true)),
        )
    },
    &Row {
        aliases: &["pytorch_zero3"],
        ..row(
            "sharded3",
            "Parameters, gradients and optimizer state in even shards; gathered ahead",
            || [accumulate_flags(), gather_flags()].concat(),
            sharded(EVENLY, |settings, _| ShardSettings::resolve(settings, ZeroStage::Three, true)),
        )
    },
    &row(
        "top_k",
        "ddp that sends the largest gradients only and keeps the others for later steps",
        top_k::flags,
        OfStrategy::read_by(top_k::resolve),
    ),
    &row(
        "fp16",
        "ddp with gradients in half precision",
        ddp_flags,
        OfStrategy::read_by(|settings, defaults| {
            let hooked = |ddp: Ddp| ddp.with_hook(HalfPrecision::fp16());
            BucketedDdp::resolve(settings, defaults, hooked, Advice::CompareWithDdp)
        }),
    ),
    &row(
        "bf16",
        "ddp with gradients in bfloat16",
        ddp_flags,
        OfStrategy::read_by(|settings, defaults| {
            let hooked = |ddp: Ddp| ddp.with_hook(HalfPrecision::bf16());
            BucketedDdp::resolve(settings, defaults, hooked, Advice::CompareWithDdp)
        }),
    ),
    &row(
        "local_sgd",
        "Ranks train alone and average their parameters every few steps",
        local_sgd::flags,
        OfStrategy {
            synchronizes: Synchronizes::SomeSteps,
            ..OfStrategy::read_by(local_sgd::resolve)
        },
    ),
    &row(
        "no_sync",
        "No communication: what ddp is compared with to see what it costs",
        Vec::new,
        OfStrategy {
            synchronizes: Synchronizes::Never,
            ..OfStrategy::read_by(|_, _| {
                Ok(Arc::new(Plain { make: || Box::new(NoSync), models: Models::Worthless }))
            })
        },
    ),
];

const fn row(
    name: &'static str,
    about: &'static str,
    flags: fn() -> Vec<Arg>,
    of: OfStrategy,
) -> Row {
    Row { name, aliases: &[], about, flags, of }
}

/// A strategy that divides the model.
const fn sharded(axes: &'static [Axis], resolve: Resolve) -> OfStrategy {
    OfStrategy { axes, is_sharded: true, ..OfStrategy::read_by(resolve) }
}

/// A strategy without flags that keeps the ranks' models equal.
const fn plain<S: Strategy + Default + 'static>(name: &'static str, about: &'static str) -> Row {
    row(name, about, Vec::new, made_by::<S>())
}

/// A strategy without settings of its own.
const fn made_by<S: Strategy + Default + 'static>() -> OfStrategy {
    OfStrategy::read_by(|_, _| {
        Ok(Arc::new(Plain { make: || Box::new(S::default()), models: Models::Equal }))
    })
}
