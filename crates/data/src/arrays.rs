//! Samples as two arrays in memory: the inputs, and a class or values for each.
//!
//! Input: arrays that another module has read and checked. Output: a data set. This module knows nothing of files.

use crate::digest::ContentDigest;
use crate::{DataError, Dataset, Field, Sample, files};

/// Inputs of one shape, each with a class or with values as its target.
#[derive(Debug)]
pub struct Arrays {
    pub(crate) inputs: ArrayInputs,
    /// Of one input.
    pub(crate) extents: Vec<usize>,
    pub(crate) targets: Targets,
    /// The names of the classes, if they have names.
    pub(crate) class_names: Vec<String>,
}

/// The inputs, one after the other: (count, extents...).
#[derive(Debug)]
pub(crate) enum ArrayInputs {
    /// Pixels. When they are read they become numbers from -1 to 1, `x / 127.5 - 1`.
    Bytes(Vec<u8>),
    /// Numbers that are read unchanged.
    Reals(Vec<f32>),
}

#[derive(Debug)]
pub(crate) enum Targets {
    /// A class for each input.
    Classes { labels: Vec<u32>, num_classes: usize },
    /// Values for each input: (count, len).
    Values { values: Vec<f32>, len: usize },
}

/// An empty vector with memory for all elements of a data set. Errors if it does not fit.
pub(crate) fn reserved<T>(num_elems: u128) -> Result<Vec<T>, DataError> {
    let mut all = Vec::new();
    match usize::try_from(num_elems).map(|len| all.try_reserve_exact(len)) {
        Ok(Ok(())) => Ok(all),
        _ => Err(DataError::TooLarge { num_elems }),
    }
}

impl Dataset for Arrays {
    fn len(&self) -> usize {
        match &self.targets {
            Targets::Classes { labels, .. } => labels.len(),
            Targets::Values { values, len } => values.len() / len,
        }
    }

    fn fields(&self) -> Vec<Field> {
        let targets = match self.targets {
            Targets::Classes { num_classes, .. } => Field::class(num_classes),
            Targets::Values { len, .. } => Field::f32(Field::TARGETS, [len]),
        };
        vec![Field::f32(Field::INPUTS, self.extents.clone()), targets]
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names.clone()
    }

    fn digest(&self) -> Option<String> {
        let extents: Vec<u64> = self.extents.iter().map(|extent| *extent as u64).collect();
        let contents = ContentDigest::default().numbers(&extents, u64::to_le_bytes);
        let contents = match &self.inputs {
            ArrayInputs::Bytes(bytes) => contents.bytes(bytes),
            ArrayInputs::Reals(reals) => contents.numbers(reals, f32::to_le_bytes),
        };
        let contents = match &self.targets {
            Targets::Classes { labels, .. } => contents.numbers(labels, u32::to_le_bytes),
            Targets::Values { values, .. } => contents.numbers(values, f32::to_le_bytes),
        };
        Some(contents.finish())
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let to = sample.f32(Field::INPUTS);
        let range = index * to.len()..(index + 1) * to.len();
        match &self.inputs {
            ArrayInputs::Bytes(bytes) => {
                for (value, pixel) in to.iter_mut().zip(&bytes[range]) {
                    *value = files::centered(*pixel);
                }
            }
            ArrayInputs::Reals(reals) => to.copy_from_slice(&reals[range]),
        }
        match &self.targets {
            Targets::Classes { labels, .. } => sample.set_class(i64::from(labels[index])),
            Targets::Values { values, len } => {
                let values = &values[index * len..(index + 1) * len];
                sample.f32(Field::TARGETS).copy_from_slice(values);
            }
        }
    }
}
