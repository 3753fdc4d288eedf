//! The guarantee of a strategy about the weights at the end of training.
//!
//! Every strategy and every communication hook must state its guarantee. There is no default, so a new
//! strategy cannot count as exact by mistake. Checkpoints and comparisons of runs rely on it. The
//! test `exactness.rs` trains with every strategy and checks its guarantee.

/// How the weights of a strategy's replicas relate to each other, and to the weights of exact data
/// parallelism.
///
/// ```
/// use paceline_strategies::Exactness;
///
/// assert!(Exactness::Exact.keeps_replicas_equal());
/// assert!(!Exactness::Unsynchronized("each rank alone".into()).keeps_replicas_equal());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// After every step all ranks hold the same weights, with the same bits as any other exact strategy.
    Exact,
    /// After every step all ranks hold the same weights, but not those of the exact strategies. The text
    /// names the strategy with all settings on which the weights depend.
    Lossy(String),
    /// Ranks hold different weights between two averages; [`crate::Strategy::sync_replicas`] averages early. The
    /// text is as for [`Exactness::Lossy`].
    Periodic(String),
    /// The weights of the ranks diverge and never become equal again. The text is as for [`Exactness::Lossy`].
    Unsynchronized(String),
}

impl Exactness {
    /// Whether all ranks hold the same weights after every step.
    pub fn keeps_replicas_equal(&self) -> bool {
        matches!(self, Exactness::Exact | Exactness::Lossy(_))
    }

    /// The strategies and settings that give these weights, in words. Strategies with the same words may
    /// continue each other's runs.
    pub fn words(&self) -> &str {
        match self {
            Exactness::Exact => "any of the exact ones",
            Exactness::Lossy(what)
            | Exactness::Periodic(what)
            | Exactness::Unsynchronized(what) => what,
        }
    }
}
