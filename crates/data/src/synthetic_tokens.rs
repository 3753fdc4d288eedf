//! Synthetic tokens: sequences of numbers to keep a language model busy while its speed is measured.
//!
//! Input: sizes and a seed. Output: the same numbers on every machine. Nothing is stored.

use rand::RngExt;

use crate::random::{RandomPurpose, generator};
use crate::{DataError, Dataset, Field, Sample};

/// Tokens that are drawn uniformly, with as many unrelated ones as targets, new ones in each epoch.
///
/// There is nothing to learn in them: the loss of any model stays above `ln(vocab)` on average. Each sample is made when it
/// is read, from its own random stream.
#[derive(Clone, Debug)]
pub struct SyntheticTokens {
    vocab: usize,
    seq_len: usize,
    samples: usize,
    seed: u64,
}

impl SyntheticTokens {
    /// `samples` sequences per epoch, each of `seq_len` tokens out of `vocab`. Errors if any of the three is zero.
    pub fn new(vocab: usize, seq_len: usize, samples: usize, seed: u64) -> Result<Self, DataError> {
        DataError::at_least_one("the size of the vocabulary", vocab)?;
        DataError::at_least_one("the length of a sequence", seq_len)?;
        DataError::at_least_one("the number of samples", samples)?;
        Ok(Self { vocab, seq_len, samples, seed })
    }
}

impl Dataset for SyntheticTokens {
    fn len(&self) -> usize {
        self.samples
    }

    fn fields(&self) -> Vec<Field> {
        let tokens = |name| Field::i64(name, [self.seq_len]).below(self.vocab);
        vec![tokens("inputs"), tokens("targets")]
    }

    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let mut generator = generator(self.seed, RandomPurpose::Tokens, epoch, index as u64);
        for name in ["inputs", "targets"] {
            for token in sample.i64(name) {
                *token = generator.random_range(0..self.vocab as i64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnedSample;

    #[test]
    fn tokens_are_uniform_and_new_for_each_epoch_and_index() {
        let data = SyntheticTokens::new(8, 4000, 100, 42).unwrap();
        let read = |epoch, index| {
            let mut sample = OwnedSample::read(&data, epoch, index).unwrap();
            [sample.i64("inputs"), sample.i64("targets")].concat()
        };
        assert_eq!(read(1, 2), read(1, 2));
        for other in [read(2, 1), read(1, 1), read(2, 2)] {
            assert_ne!(read(1, 2)[..32], other[..32]);
        }
        let sample = read(0, 0);
        assert_ne!(sample[..4000], sample[4000..]);
        for token in 0..8 {
            let count = sample.iter().filter(|other| **other == token).count();
            // The expected count is 1000, with a standard deviation of 30. The seed is fixed.
            assert!((850..=1150).contains(&count), "token {token}: {count}");
        }
        assert!(sample.iter().all(|token| (0..8).contains(token)));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let error = SyntheticTokens::new(0, 1, 1, 0).unwrap_err();
        assert_eq!(error.to_string(), "the size of the vocabulary must be at least 1, got 0");
    }
}
