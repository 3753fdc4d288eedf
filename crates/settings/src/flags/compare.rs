//! Flags with which `paceline train` runs one strategy after the other and compares them.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use paceline_choices::registry::Choice;
use paceline_choices::strategies::{OfStrategy, STRATEGIES};
use paceline_failure::numbers::within;
use paceline_failure::{Failure, Result};

/// A value that means several strategies of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Several {
    /// Every strategy.
    All,
    /// Those of the published comparison, with the accumulation of each.
    Published,
}

impl Several {
    const EACH: [Several; 2] = [Several::All, Several::Published];

    /// The word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Several::All => "all",
            Several::Published => "published",
        }
    }

    /// The meaning of this word; `None` for the name of a strategy.
    pub fn named(word: &str) -> Option<Self> {
        Self::EACH.into_iter().find(|several| several.word() == word)
    }
}

/// The name of `simple_ddp` in a comparison of strategies that shard.
pub const BASELINE: &str = "baseline";

/// Strategies that are compared with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Those that keep replicas.
    DataParallel,
    /// Those that divide the model among the ranks, and the plainest one that does not.
    Sharding,
}

impl Comparison {
    /// Both comparisons.
    pub const EACH: [Comparison; 2] = [Comparison::DataParallel, Comparison::Sharding];

    /// The flag that names one of the strategies, or several, without dashes.
    pub fn key(self) -> &'static str {
        match self {
            Comparison::DataParallel => "ddp-choice",
            Comparison::Sharding => "shard-choice",
        }
    }

    /// The strategies, each with its name in the comparison.
    pub fn strategies(self) -> Vec<(&'static str, &'static Choice<OfStrategy>)> {
        let all = STRATEGIES.all().into_iter();
        match self {
            Comparison::DataParallel => {
                all.filter(|of| !of.of.is_sharded).map(|of| (of.name, of)).collect()
            }
            Comparison::Sharding => {
                let baseline = STRATEGIES.get("simple_ddp").into_iter().map(|of| (BASELINE, of));
                baseline.chain(all.filter(|of| of.of.is_sharded).map(|of| (of.name, of))).collect()
            }
        }
    }

    /// The strategy of this name. Fails if it does not belong to the comparison.
    pub fn strategy(self, name: &str) -> Result<&'static Choice<OfStrategy>> {
        let is_meant = |(own, choice): &(&str, &Choice<OfStrategy>)| {
            *own == name || choice.name == name || choice.aliases.contains(&name)
        };
        let found = self.strategies().into_iter().find(is_meant).map(|(_, choice)| choice);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.strategies().iter().map(|(own, _)| *own).collect();
            Failure::Usage(format!("--{} {name}: pass one of {}", self.key(), names.join(", ")))
        })
    }

    fn parser(self) -> PossibleValuesParser {
        let value = |(name, choice): (&'static str, &Choice<OfStrategy>)| {
            PossibleValue::new(name).aliases(choice.aliases).help(choice.about)
        };
        let several = Several::EACH.into_iter().map(|several| PossibleValue::new(several.word()));
        PossibleValuesParser::new(several.chain(self.strategies().into_iter().map(value)))
    }
}

/// More than any computer costs in an hour, so a higher price is taken for a mistake.
pub const MAX_PRICE: f64 = 1e6;

/// Flags of the comparison.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub struct CompareFlags {
    /// The same as --strategy, or all: compare those that keep replicas in a table. published runs the six of a published
    /// comparison as it did: simple_ddp and ddp make a step of every batch, the others of --accumulate batches, by default 4;
    /// it needs --nproc
    #[arg(long, value_parser = Comparison::DataParallel.parser(), value_name = "NAME", hide_possible_values = true)]
    pub ddp_choice: Option<String>,
    /// The same as --strategy, or all: compare those that shard in a table. The baseline simple_ddp runs first. published runs
    /// the seven of a published comparison, as above: only baseline makes a step of every batch
    #[arg(
        long,
        value_parser = Comparison::Sharding.parser(),
        value_name = "NAME",
        hide_possible_values = true,
        conflicts_with = "ddp_choice"
    )]
    pub shard_choice: Option<String>,
    /// Price of this machine per hour, which adds a column with the cost of each run
    #[arg(long, value_name = "X", value_parser = within(0.0, MAX_PRICE))]
    pub price_per_hour: Option<f64>,
}
