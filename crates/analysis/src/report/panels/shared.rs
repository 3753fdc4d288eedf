//! Labels, units and columns that several panels share.

use crate::hta::{Analysis, RankAnalysis};

/// The most ranks that have bars of their own. A page of thousands of ranks would be large and unreadable.
pub(super) const RANKS: usize = 48;

/// Units and decimals of columns in several tables.
pub(crate) const COUNT: (&str, usize) = ("", 0);
pub(super) const US: (&str, usize) = ("us", 1);
/// Bytes per MiB, the unit in which PyTorch's own tools count.
pub(crate) const MIB: f64 = (1 << 20) as f64;
/// Milliseconds per step.
pub(super) const MS: (&str, usize) = ("ms/step", 3);
pub(super) const PERCENT: (&str, usize) = ("%", 2);
/// The definition of the first column of most tables.
pub(super) const RANK: &str = "The rank of the process.";

pub(super) fn label(rank: &RankAnalysis) -> String {
    format!("rank {}", rank.rank)
}

/// Nanoseconds as milliseconds.
pub(super) fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// Nanoseconds as microseconds.
pub(super) fn us(ns: i64) -> f64 {
    ns as f64 / 1e3
}

/// How times are shown that are sums over the analyzed steps: as means per step, or as they are if some trace
/// names no steps.
#[derive(Clone, Copy)]
pub(super) struct PerStep {
    has_steps: bool,
}

impl PerStep {
    pub(super) fn of(analysis: &Analysis) -> Self {
        Self { has_steps: analysis.ranks.iter().all(|rank| !rank.steps.chosen.is_empty()) }
    }

    /// The unit of these times.
    pub(super) fn unit(self) -> &'static str {
        if self.has_steps { "ms/step" } else { "ms" }
    }

    /// In words, for definitions.
    pub(super) fn words(self) -> &'static str {
        if self.has_steps { "as a mean over steps" } else { "over the whole trace" }
    }

    /// Divides a sum over the steps of a rank by their number.
    pub(super) fn mean(self, rank: &RankAnalysis, sum: f64) -> f64 {
        if self.has_steps { sum / rank.steps.chosen.len() as f64 } else { sum }
    }

    /// The mean of a number of nanoseconds, in milliseconds.
    pub(super) fn ms(self, rank: &RankAnalysis, ns: i64) -> f64 {
        self.mean(rank, ms(ns))
    }
}
