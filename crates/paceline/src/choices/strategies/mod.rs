//! The strategies that `--strategy` can name, one file each.
//!
//! What a strategy does is in the crate `paceline-strategies`; a file here says how it is named, which flags
//! it reads, and what the rest of the program has to know of it before it exists. What a strategy promises about
//! the weights that it ends with, it states itself (`paceline_strategies::Exactness`).

mod bf16;
mod bucket_ddp_async;
mod buckets;
mod ddp;
mod flat_ddp;
mod fp16;
mod local_sgd;
mod no_sync;
mod simple_ddp;
mod simple_ddp_async;
mod simple_ddp_ga;
mod simple_ddp_hook;
mod single;
mod top_k;

use std::fmt::Debug;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_strategies::{BucketCaps, Strategy};
use serde_json::{Value, json};

use super::models::Defaults;
use super::registry::{Choice, Registry};
use crate::Result;

pub use buckets::default_caps;

/// All strategies, in the order in which they are compared.
pub static STRATEGIES: Registry<dyn StrategyChoice> = Registry {
    key: "strategy",
    choices: &[
        &single::ChooseSingle,
        &simple_ddp::ChooseSimpleDdp,
        &simple_ddp_ga::ChooseSimpleDdpGa,
        &simple_ddp_hook::ChooseSimpleDdpHook,
        &simple_ddp_async::ChooseSimpleDdpAsync,
        &bucket_ddp_async::ChooseBucketDdpAsync,
        &ddp::ChooseDdp,
        &flat_ddp::ChooseFlatDdp,
        &top_k::ChooseTopK,
        &fp16::ChooseFp16,
        &bf16::ChooseBf16,
        &local_sgd::ChooseLocalSgd,
        &no_sync::ChooseNoSync,
    ],
};

/// The strategy of one rank where none is named.
pub const ALONE: &str = "single";
/// The strategy of several ranks where none is named.
pub const TOGETHER: &str = "ddp";

/// A strategy that `--strategy` can name.
pub trait StrategyChoice: Choice {
    /// How often the ranks' models are made equal.
    fn synchronises(&self) -> Synchronises;

    /// Batches of an optimizer step, where no number is given.
    fn accumulate(&self) -> usize {
        1
    }

    /// Whether the published measurement of this strategy makes a step of every batch, while the others
    /// accumulate.
    fn steps_every_batch_as_published(&self) -> bool {
        false
    }

    /// Reads its flags, checks them and fills in the defaults.
    fn resolve(
        &self,
        settings: &ArgMatches,
        defaults: &Defaults,
    ) -> Result<Arc<dyn StrategySettings>>;
}

/// How often a strategy makes the ranks' models equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synchronises {
    /// After every step all ranks hold the same parameters.
    EveryStep,
    /// Models drift apart for several steps, then they are averaged.
    SomeSteps,
    /// Models drift apart.
    Never,
    /// There is one rank.
    Alone,
}

/// A strategy with its own settings, all defaults filled in.
pub trait StrategySettings: Debug + Send + Sync {
    /// The strategy itself.
    fn build(&self) -> Result<Box<dyn Strategy>>;

    /// The settings, as `config.json` has them.
    fn to_json(&self) -> Value {
        json!({})
    }

    /// The sizes of the buckets in which gradients live, if there are such buckets.
    fn caps(&self) -> Option<BucketCaps> {
        None
    }

    /// What the ranks' models are worth between two steps.
    fn models(&self) -> Models {
        Models::Equal
    }

    /// What a checkpoint lacks, if the optimizer has state or none, so that a run that is resumed ends with
    /// other weights than one that is not.
    fn not_in_checkpoint(&self, _optimizer_has_state: bool) -> Option<&'static str> {
        None
    }

    /// What advice about communication is right.
    fn advice(&self) -> Advice {
        Advice::UseBuckets
    }
}

/// What the ranks' models are worth when one of them is evaluated or saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Models {
    /// All are the same, or are made the same before.
    Equal,
    /// All are made the same before, and training goes on from there.
    EqualAfterAverage,
    /// Each rank has another one, which has learned from all ranks' samples.
    Different,
    /// Each rank has another one that has learned alone.
    Worthless,
}

/// What kind of advice about communication is right for a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Its buckets could have other sizes.
    ChooseBuckets,
    /// It could do without compression.
    CompareWithDdp,
    /// Averages could be rarer.
    AverageLess,
    /// Buckets during the backward pass could hide communication.
    UseBuckets,
}

/// A strategy without settings of its own, from its constructor.
pub(super) struct Plain<S>(pub fn() -> S);

impl<S> Debug for Plain<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(std::any::type_name::<S>())
    }
}

impl<S: Strategy + 'static> StrategySettings for Plain<S> {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new((self.0)()))
    }
}

/// Bytes of a flag's MB, which are binary, as PyTorch's are.
fn bytes(mb: f64) -> usize {
    (mb * 1024.0 * 1024.0) as usize
}
