//! Flags with which `paceline train` runs one strategy after the other and compares them.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use crate::choices::strategies::STRATEGIES;

/// The value of `--ddp-choice` that means every strategy.
pub const ALL: &str = "all";

/// Flags of the comparison.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub struct CompareFlags {
    /// The same as --strategy, or all: run one after the other, and compare them in a table
    #[arg(long, value_parser = choices(), value_name = "NAME", hide_possible_values = true)]
    pub ddp_choice: Option<String>,
    /// Every strategy accumulates the same number of batches (--accumulate) before a step; this is the
    /// default
    #[arg(long, conflicts_with = "as_published")]
    pub like_for_like: bool,
    /// simple_ddp and ddp make a step of every batch, the others of --accumulate batches [default: 4]
    #[arg(long)]
    pub as_published: bool,
    /// Price of this machine per hour, which adds a column with the cost of each run
    #[arg(long, value_name = "X")]
    pub price_per_hour: Option<f64>,
}

fn choices() -> PossibleValuesParser {
    PossibleValuesParser::new(std::iter::once(PossibleValue::new(ALL)).chain(STRATEGIES.values()))
}
