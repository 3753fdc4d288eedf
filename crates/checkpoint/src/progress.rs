//! The state of a run between two optimizer steps, as plain values that the trainer advances and a checkpoint stores.

use paceline_data::Position;
use paceline_strategies::StepLoss;
use serde::{Deserialize, Serialize};

/// The state of a run, without its weights. Whatever decides about later steps or the end of the run is here, so a resumed
/// run decides as an uninterrupted one does. It counts the samples that steps have consumed, not those read ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The next batch: complete epochs, and consumed batches of the next one.
    pub position: Position,
    /// Optimizer steps made, over all epochs, those with a skipped update included.
    pub steps: u64,
    /// Samples that these steps trained on, on all ranks together.
    pub samples: u64,
    /// Sums over the steps so far of the current epoch.
    pub epoch: EpochSums,
    /// The scale of the loss, if it is scaled.
    pub scaling: Option<LossScaling>,
    /// The evaluations so far.
    pub best: Best,
}

/// The scale by which the loss is multiplied before its backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// The scale of the next step.
    pub scale: f64,
    /// Steps since the scale changed or gradients overflowed.
    pub good_steps: u64,
    /// Steps whose update was left out because their gradients overflowed.
    pub skipped_steps: u64,
    /// Those of them since the last update.
    pub skipped_in_a_row: u64,
}

/// The lowest evaluation loss of a run, and whether the loss still falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The loss, and the optimizer steps before its evaluation.
    pub lowest: Option<(f64, u64)>,
    /// Evaluations since then.
    pub since: u64,
}

impl Best {
    /// Notes the loss of an evaluation after `steps` steps.
    pub fn note(&mut self, loss: f64, steps: u64) {
        if self.lowest.is_none_or(|(lowest, _)| loss < lowest) {
            *self = Self { lowest: Some((loss, steps)), since: 0 };
        } else {
            self.since = self.since.saturating_add(1);
        }
    }

    /// The lowest loss and its steps, if as many evaluations in a row as `patience` were not lower.
    pub fn no_longer_falls(&self, patience: Option<u64>) -> Option<(f64, u64)> {
        self.lowest.filter(|_| patience.is_some_and(|patience| self.since >= patience))
    }
}

impl Progress {
    /// The epoch, from 0, of the last step that was made.
    pub fn last_epoch(&self) -> u64 {
        let Position { epoch, batch } = self.position;
        // Between two epochs the position is that of the start of the next epoch.
        epoch.saturating_sub(u64::from(batch == 0))
    }

    /// The steps up to the last one that was not skipped. Later ones have not tried the weights.
    pub fn steps_with_update(&self) -> u64 {
        self.steps.saturating_sub(self.scaling.map_or(0, |of| of.skipped_in_a_row))
    }

    /// Advances by an optimizer step over `num_batches` batches, with `samples` samples of all ranks. Returns the sums of an
    /// epoch at its end.
    pub fn advance(
        &mut self,
        num_batches: usize,
        batches_per_epoch: usize,
        samples: usize,
        loss: &StepLoss,
    ) -> Option<EpochSums> {
        self.steps += 1;
        self.samples += samples as u64;
        self.epoch.add(loss);
        self.position.batch += num_batches;
        (self.position.batch >= batches_per_epoch).then(|| self.end_epoch())
    }

    /// Advances to the start of the next epoch, and returns the sums of this one.
    pub fn end_epoch(&mut self) -> EpochSums {
        self.position = Position { epoch: self.position.epoch + 1, batch: 0 };
        std::mem::take(&mut self.epoch)
    }
}

/// Sums over the samples of an epoch or of the test set, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochSums {
    /// Sum of the samples' losses.
    pub loss: f64,
    /// Number of samples that were classified correctly.
    pub correct: f64,
    /// Number of samples.
    pub count: f64,
}

impl EpochSums {
    fn add(&mut self, step: &StepLoss) {
        self.loss += step.loss * step.count as f64;
        self.correct += step.correct;
        self.count += step.count as f64;
    }

    /// Mean loss of a sample.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.count
    }

    /// The fraction of the samples that were classified correctly.
    pub fn accuracy(&self) -> f64 {
        self.correct / self.count
    }
}

/// The result of evaluating a test set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TestResult {
    /// Samples of the test set.
    pub samples: usize,
    /// The sums over them, whose count is that of samples or, for a language model, of tokens.
    pub sums: EpochSums,
    /// Whether the model classifies.
    pub has_classes: bool,
}

impl TestResult {
    /// The number of tokens that have a target, if the means are over tokens.
    pub fn tokens(&self) -> Option<f64> {
        Some(self.sums.count).filter(|count| *count != self.samples as f64)
    }

    /// The perplexity, if the means are over tokens: `exp(loss)`, the number of equally likely tokens to choose from at this
    /// loss.
    pub fn perplexity(&self) -> Option<f64> {
        self.tokens().map(|_| self.sums.mean_loss().exp())
    }

    /// The fraction that was classified correctly, if the model classifies.
    pub fn accuracy(&self) -> Option<f64> {
        self.has_classes.then(|| self.sums.accuracy())
    }
}

/// An evaluation of the test set.
#[derive(Clone, Copy, Debug)]
pub struct Evaluation {
    /// Optimizer steps before it.
    pub steps: u64,
    /// The epoch of the last of these steps, from 0.
    pub epoch: u64,
    /// The result.
    pub result: TestResult,
    /// Whether it is the one at the end of the run.
    pub is_final: bool,
    /// Whether the same result was reported before, because `--eval-every` fell on the last step.
    pub is_repeated: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_loss_begins_the_count_again() {
        let mut best = Best::default();
        for (at, loss) in (1..).zip([2.0, 1.5, 1.5, 1.4, 1.6, 1.4]) {
            best.note(loss, at);
            assert_eq!(best.no_longer_falls(None), None);
            let expected = (at == 6).then_some((1.4, 4));
            assert_eq!(best.no_longer_falls(Some(2)), expected, "after {at}");
        }
    }

    #[test]
    fn an_epoch_ends_with_its_last_batch() {
        let loss = StepLoss {
            loss: 0.5,
            correct: 3.0,
            count: 4,
            samples: 4,
            own_tokens: 0,
            is_shared: true,
            local_sum: 2.0,
            stops: false,
            regroups: false,
        };
        let mut progress = Progress::default();
        // Five batches, two to a step: the last step has one.
        assert_eq!(progress.advance(2, 5, 8, &loss), None);
        assert_eq!(progress.advance(2, 5, 8, &loss), None);
        assert_eq!(progress.last_epoch(), 0);
        assert_eq!(progress.position, Position { epoch: 0, batch: 4 });
        assert_eq!(progress.epoch, EpochSums { loss: 4.0, correct: 6.0, count: 8.0 });
        let whole = EpochSums { loss: 6.0, correct: 9.0, count: 12.0 };
        assert_eq!(progress.advance(1, 5, 4, &loss), Some(whole));
        let expected = Progress {
            position: Position { epoch: 1, batch: 0 },
            steps: 3,
            samples: 20,
            ..Progress::default()
        };
        assert_eq!(progress, expected);
        assert_eq!(progress.last_epoch(), 0, "none of the next one's is made");
    }
}
