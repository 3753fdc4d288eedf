//! Where a run stands, and what its epoch came to so far.
//!
//! Plain values: they know nothing of models, files or ranks.

use paceline_strategies::StepLoss;

/// Where a run stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Epochs that are complete.
    pub epochs: u64,
    /// Steps made, over all epochs.
    pub steps: u64,
}

/// Sums over the samples of an epoch or of the test set, over all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochSums {
    /// Sum of the samples' losses.
    pub loss: f64,
    /// Samples classified correctly.
    pub correct: f64,
    /// Samples.
    pub count: f64,
}

impl EpochSums {
    /// Adds what a step came to.
    pub fn add(&mut self, step: &StepLoss) {
        self.loss += step.loss * step.count as f64;
        self.correct += step.correct;
        self.count += step.count as f64;
    }

    /// Mean loss of a sample.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.count
    }

    /// The part of the samples that is classified correctly.
    pub fn accuracy(&self) -> f64 {
        self.correct / self.count
    }
}
