//! Flags by which `paceline train` runs one strategy after the other and compares them.

use std::sync::OnceLock;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::StrategyName;
use crate::{Failure, Result};

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

impl CompareArgs {
    /// The strategy that `--strategy` and `--ddp-choice` ask for together, in a run of one.
    pub fn chosen(&self, strategy: Option<StrategyName>) -> Result<Option<StrategyName>> {
        let needs_all = [
            ("--like-for-like", self.like_for_like),
            ("--as-published", self.as_published),
            ("--price-per-hour", self.price_per_hour.is_some()),
        ];
        if let Some((flag, _)) = needs_all.iter().find(|(_, is_given)| *is_given) {
            return usage(format!("{flag} is about a comparison; it needs --ddp-choice all"));
        }
        match (self.ddp_choice, strategy) {
            (None, strategy) => Ok(strategy),
            (Some(DdpChoice::One(choice)), None) => Ok(Some(choice)),
            (Some(DdpChoice::One(choice)), Some(strategy)) if choice == strategy => {
                Ok(Some(choice))
            }
            (Some(DdpChoice::One(choice)), Some(strategy)) => usage(format!(
                "--ddp-choice {} and --strategy {} are two names of one flag; pass one of them",
                choice.name(),
                strategy.name()
            )),
            (Some(DdpChoice::All), _) => {
                usage("--ddp-choice all makes several runs, and this is one of them".into())
            }
        }
    }
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_choice_is_a_strategy() {
        let args = |ddp_choice| CompareArgs {
            ddp_choice,
            like_for_like: false,
            as_published: false,
            price_per_hour: None,
        };
        let ddp = StrategyName::Ddp;
        assert_eq!(args(None).chosen(Some(ddp)).unwrap(), Some(ddp));
        let one = args(Some(DdpChoice::One(ddp)));
        assert_eq!(one.chosen(None).unwrap(), Some(ddp));
        assert_eq!(one.chosen(Some(ddp)).unwrap(), Some(ddp));
        assert!(one.chosen(Some(StrategyName::SimpleDdp)).is_err());
        assert!(CompareArgs { as_published: true, ..one }.chosen(None).is_err());
    }
}
