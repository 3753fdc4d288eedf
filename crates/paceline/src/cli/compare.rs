//! Flags by which `paceline train` runs one strategy after the other and compares them.

use std::sync::OnceLock;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::StrategyName;

/// Flags of the comparison.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub struct CompareArgs {
    /// The same as --strategy, or all: run one after the other, and compare them in a table
    #[arg(long, value_enum, value_name = "NAME", hide_possible_values = true)]
    pub ddp_choice: Option<DdpChoice>,
    /// Every strategy adds up as many batches before a step (--accumulate); so it is by default
    #[arg(long, conflicts_with = "as_published")]
    pub like_for_like: bool,
    /// simple_ddp and ddp make a step of every batch, the others of --accumulate batches [default: 4]
    #[arg(long)]
    pub as_published: bool,
    /// What an hour of this machine costs, for a column of what each run costs
    #[arg(long, value_name = "X")]
    pub price_per_hour: Option<f64>,
}

/// A strategy, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DdpChoice {
    /// All of them.
    All,
    /// This one.
    One(StrategyName),
}

impl ValueEnum for DdpChoice {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: OnceLock<Vec<DdpChoice>> = OnceLock::new();
        ALL.get_or_init(|| {
            let each = StrategyName::value_variants().iter().map(|&name| DdpChoice::One(name));
            std::iter::once(DdpChoice::All).chain(each).collect()
        })
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            DdpChoice::All => Some(PossibleValue::new("all")),
            DdpChoice::One(name) => name.to_possible_value(),
        }
    }
}
