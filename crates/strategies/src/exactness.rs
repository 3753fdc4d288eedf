//! What a strategy promises about the weights that training ends with.
//!
//! Every strategy and every communication hook states its promise; there is no default, so a new one
//! cannot pass for exact by saying nothing. Checkpoints and comparisons of runs rely on it. The test
//! `exactness.rs` trains with every strategy and holds it to its word.

/// How the weights of a strategy's replicas relate to each other and to those of data parallelism
/// without any loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// After every step all ranks hold the same weights, and the same bits as with any other exact
    /// strategy.
    Exact,
    /// After every step all ranks hold the same weights, but not those of the exact strategies. The
    /// text names the strategy with all settings that these weights depend on.
    Lossy(String),
    /// Ranks hold different weights between two averages; [`crate::Strategy::settle`] averages early.
    /// The text names the strategy with all settings that the weights depend on.
    Periodic(String),
    /// Ranks drift apart and stay so. The text names the strategy with all settings that the weights
    /// depend on.
    Unsynchronised(String),
}

impl Exactness {
    /// Whether all ranks hold the same weights after every step.
    pub fn keeps_replicas_equal(&self) -> bool {
        matches!(self, Exactness::Exact | Exactness::Lossy(_))
    }

    /// What decides the weights that training ends with, in words: two strategies with the same
    /// answer may continue each other's runs.
    pub fn words(&self) -> &str {
        match self {
            Exactness::Exact => "any of the exact ones",
            Exactness::Lossy(what)
            | Exactness::Periodic(what)
            | Exactness::Unsynchronised(what) => what,
        }
    }
}
