//! Flags by which `paceline train` runs one strategy after the other and compares them.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use crate::choices::strategies::STRATEGIES;

/// The value of `--ddp-choice` that stands for every strategy.
pub const ALL: &str = "all";

/// Flags of the comparison.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub struct CompareFlags {
    /// The same as --strategy, or all: run one after the other, and compare them in a table
    #[arg(long, value_parser = choices(), value_name = "NAME", hide_possible_values = true)]
    pub ddp_choice: Option<String>,
    /// Every strategy adds up as many batches before a step (--accumulate); this is the default
    #[arg(long, conflicts_with = "as_published")]
    pub like_for_like: bool,
    /// simple_ddp and ddp make a step of every batch, the others of --accumulate batches [default: 4]
    #[arg(long)]
    pub as_published: bool,
    /// What an hour of this machine costs, for a column of what each run costs
    #[arg(long, value_name = "X")]
    pub price_per_hour: Option<f64>,
}

fn choices() -> PossibleValuesParser {
    PossibleValuesParser::new(std::iter::once(PossibleValue::new(ALL)).chain(STRATEGIES.values()))
}
