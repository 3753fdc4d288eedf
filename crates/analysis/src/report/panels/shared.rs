//! What several panels share: labels, units and columns.

use crate::hta::RankAnalysis;
use crate::report::Note;

/// Where the numbers of a report come from.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// What was analyzed, in a few words.
    pub title: String,
    /// Where it was read from.
    pub subtitle: String,
    /// Notes from reading the traces.
    pub notes: Vec<Note>,
}

/// The most ranks that have bars of their own. A page of thousands of ranks would be large and unreadable.
pub(super) const RANKS: usize = 48;

/// Units and decimals of columns in several tables.
pub(super) const COUNT: (&str, usize) = ("", 0);
pub(super) const US: (&str, usize) = ("us", 1);
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
