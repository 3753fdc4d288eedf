//! Synthetic regression: vectors to keep a network busy while its speed is measured.
//!
//! Input: dimensions and a seed. Output: the same numbers on every machine. Nothing is stored.

use crate::random::{RandomPurpose, fill_normal, generator};
use crate::{DataError, Dataset, Field, Sample};

/// Standard normal inputs and unrelated standard normal targets, new ones in each epoch.
///
/// There is nothing to learn in them: they keep a network of any width busy while its speed is measured.
/// Nothing is stored. Each sample is made when it is read, from its own random stream.
#[derive(Clone, Debug)]
pub struct SyntheticRegression {
    input_dim: usize,
    output_dim: usize,
    len: usize,
    seed: u64,
}

impl SyntheticRegression {
    /// `len` samples per epoch, each with `input_dim` inputs and `output_dim` targets. Errors if any of the
    /// three is zero.
    pub fn new(
        input_dim: usize,
        output_dim: usize,
        len: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        DataError::at_least_one("the input dimension", input_dim)?;
        DataError::at_least_one("the output dimension", output_dim)?;
        DataError::at_least_one("the number of samples", len)?;
        Ok(Self { input_dim, output_dim, len, seed })
    }
}

impl Dataset for SyntheticRegression {
    fn len(&self) -> usize {
        self.len
    }

    fn fields(&self) -> Vec<Field> {
        let Self { input_dim, output_dim, .. } = *self;
        vec![Field::f32("inputs", [input_dim]), Field::f32("targets", [output_dim])]
    }

    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let mut generator = generator(self.seed, RandomPurpose::Regression, epoch, index as u64);
        fill_normal(&mut generator, sample.f32("inputs"));
        fill_normal(&mut generator, sample.f32("targets"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnedSample;

    #[test]
    fn an_empty_dimension_is_refused() {
        let error = SyntheticRegression::new(1, 0, 1, 0).unwrap_err();
        assert_eq!(error.to_string(), "the output dimension must be at least 1, got 0");
    }

    #[test]
    fn regression_is_normal_and_new_for_each_epoch_and_index() {
        let data = SyntheticRegression::new(4096, 2048, 100, 42).unwrap();
        let read = |epoch, index| {
            let mut sample = OwnedSample::read(&data, epoch, index).unwrap();
            [sample.f32("inputs"), sample.f32("targets")].concat()
        };
        assert_eq!(read(1, 2), read(1, 2));
        for other in [read(2, 1), read(1, 1), read(2, 2)] {
            assert_ne!(read(1, 2)[..8], other[..8]);
        }
        let sample = read(0, 0);
        let mean = sample.iter().sum::<f32>() / 6144.0;
        let variance = sample.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 6144.0;
        // The bounds are five standard errors: 5 / sqrt(6144) and 5 * sqrt(2 / 6144).
        assert!(mean.abs() < 0.064, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.09, "variance {variance}");
    }
}
