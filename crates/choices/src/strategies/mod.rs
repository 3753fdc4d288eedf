//! The strategies that `--strategy` can name, one row each in `rows.rs`.
//!
//! The strategies themselves, with their promise about the final weights, are in the crate `paceline-strategies`. The
//! files here have names, flags, and facts that are needed before a strategy is built. Settings of more than a few lines
//! have a file each.

mod bucket_ddp_async;
mod buckets;
mod local_sgd;
mod rows;
mod sharding;
mod top_k;

use std::fmt::Debug;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_collectives::Axis;
use paceline_failure::Result;
use paceline_model::Model;
use paceline_strategies::{BucketCaps, Strategy};
use serde_json::Value;

use super::models::Defaults;
use super::registry::Registry;

pub use buckets::default_caps;

/// The strategies, in the order in which they are compared.
pub static STRATEGIES: Registry<OfStrategy> = Registry::new("strategy", "Strategy", rows::ROWS);

/// The default strategy of a single rank.
pub const ALONE: &str = "single";
/// The default strategy of several ranks.
pub const TOGETHER: &str = "ddp";

type Resolve = fn(&ArgMatches, &Defaults) -> Result<Arc<dyn StrategySettings>>;

/// The part of a [choice](super::registry::Choice) that only strategies have.
pub struct OfStrategy {
    /// How often the ranks' models are made equal.
    pub synchronizes: Synchronizes,
    /// The default number of batches per optimizer step.
    pub accumulate: usize,
    /// The axes of a mesh along which it can place the ranks (`--mesh`).
    pub axes: &'static [Axis],
    /// Whether it divides the model among the ranks (`--shard-choice`).
    pub is_sharded: bool,
    /// Reads the flags, checks them and fills in the defaults.
    pub resolve: Resolve,
}

impl OfStrategy {
    /// A strategy that keeps replicas equal.
    pub(crate) const fn read_by(resolve: Resolve) -> Self {
        Self {
            synchronizes: Synchronizes::EveryStep,
            accumulate: 1,
            axes: &[Axis::Dp],
            is_sharded: false,
            resolve,
        }
    }
}

/// How often a strategy makes the ranks' models equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synchronizes {
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

    /// Checks the settings against a model that `world_size` ranks train. Returns warnings.
    fn check(&self, _model: &Model, _world_size: usize) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// The settings in `config.json`; `null` for the values of the flags.
    fn to_json(&self) -> Value {
        Value::Null
    }

    /// The sizes of the buckets in which gradients live, if any.
    fn caps(&self) -> Option<BucketCaps> {
        None
    }

    /// Whether weights, and the strategy's state between steps, depend on the buckets.
    fn weights_follow_from_buckets(&self) -> bool {
        false
    }

    /// How the ranks' models relate between two steps.
    fn models(&self) -> Models {
        Models::Equal
    }

    /// Whether it keeps gradients for later steps. Then the loss is not scaled, because they would have another scale.
    fn keeps_gradients(&self) -> bool {
        false
    }

    /// The kind of advice about communication that fits.
    fn advice(&self) -> Advice {
        Advice::UseBuckets
    }
}

/// A strategy without settings of its own is a copy of itself.
impl<S: Strategy + Clone + Debug + Sync + 'static> StrategySettings for S {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(self.clone()))
    }
}

/// How the ranks' models relate when one of them is evaluated or saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Models {
    /// All are equal, or are made equal before.
    Equal,
    /// All are made equal before, and training continues with the result.
    EqualAfterAverage,
    /// The models differ, and each has learned from its own rank's samples only.
    Worthless,
}

/// The kind of advice about communication that fits a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Try other bucket sizes.
    ChooseBuckets,
    /// Try without compression.
    CompareWithDdp,
    /// Average less often.
    AverageLess {
        /// The steps from one average to the next.
        every: usize,
    },
    /// Hide communication with buckets during the backward pass.
    UseBuckets,
    /// Gather more or fewer units ahead.
    ChooseGathers {
        /// The units that are gathered ahead. `None` if all are gathered at the end of a step.
        prefetch: Option<usize>,
    },
    /// Divide the model with another strategy, which communicates while the ranks compute.
    ShardWith(&'static str),
}

/// A strategy without settings of its own, which need not be `Clone`.
#[derive(Debug)]
struct Plain {
    make: fn() -> Box<dyn Strategy>,
    models: Models,
}

impl StrategySettings for Plain {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        Ok((self.make)())
    }

    fn models(&self) -> Models {
        self.models
    }
}

/// Bytes of a flag's size in MiB. The flags are named `-mb`, as in PyTorch.
fn bytes(mib: f64) -> usize {
    (mib * 1024.0 * 1024.0) as usize
}
