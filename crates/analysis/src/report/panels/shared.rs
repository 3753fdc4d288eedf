//! What several panels share: labels, units and columns.

use crate::hta::RankAnalysis;
use crate::report::Note;

/// What a report says of where its numbers come from.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// What was analysed, in a few words.
    pub title: String,
    /// Where it was read from.
    pub subtitle: String,
    /// What was found while reading.
    pub notes: Vec<Note>,
}

/// Ranks that have bars of their own: a page of thousands could not be read, nor be small.
pub(super) const RANKS: usize = 48;

/// Unit and decimals of columns that several tables have.
pub(super) const COUNT: (&str, usize) = ("", 0);
pub(super) const US: (&str, usize) = ("us", 1);
pub(super) const PERCENT: (&str, usize) = ("%", 2);
/// What the first column of most tables says.
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
