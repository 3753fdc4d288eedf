//! A part of a data set, as a data set.
//!
//! Input: a data set and a range of its samples. Output: a data set of these samples. This module knows
//! nothing of why the others are left out.

use std::ops::Range;
use std::sync::Arc;

use crate::{DataError, Dataset, Field, Sample};

/// A range of consecutive samples of another data set.
pub struct Subset {
    dataset: Arc<dyn Dataset>,
    range: Range<usize>,
}

impl Subset {
    /// The samples of `range`. Errors if the range reaches past the end of the data set.
    pub fn new(dataset: Arc<dyn Dataset>, range: Range<usize>) -> Result<Self, DataError> {
        if range.end > dataset.len() {
            let needs = format!("at most the number of samples, {}", dataset.len());
            let setting = "the end of a part of a data set";
            return Err(DataError::Setting { setting, needs, got: range.end });
        }
        Ok(Self { dataset, range })
    }
}

impl Dataset for Subset {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn fields(&self) -> Vec<Field> {
        self.dataset.fields()
    }

    fn lengths(&self) -> Option<Vec<u32>> {
        Some(self.dataset.lengths()?[self.range.clone()].to_vec())
    }

    fn class_names(&self) -> Vec<String> {
        self.dataset.class_names()
    }

    fn digest(&self) -> Option<String> {
        Some(format!("{} {:?}", self.dataset.digest()?, self.range))
    }

    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>) {
        self.dataset.read(epoch, self.range.start + index, sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OwnedSample, SyntheticRegression};

    #[test]
    fn a_subset_reads_what_the_whole_has_there() {
        let whole: Arc<dyn Dataset> = Arc::new(SyntheticRegression::new(3, 2, 10, 42).unwrap());
        let subset = Subset::new(whole.clone(), 4..7).unwrap();
        assert_eq!((subset.len(), subset.is_empty()), (3, false));
        assert_eq!(subset.fields(), whole.fields());
        let sample = |dataset: &dyn Dataset, index| {
            let mut sample = OwnedSample::read(dataset, 5, index).unwrap();
            (sample.f32("inputs"), sample.f32("targets"))
        };
        for index in 0..3 {
            assert_eq!(sample(&subset, index), sample(whole.as_ref(), 4 + index));
        }
        assert_ne!(sample(&subset, 0), sample(whole.as_ref(), 0));
        let error = Subset::new(whole, 4..11).err().unwrap().to_string();
        assert!(error.contains("10, got 11"), "{error}");
    }
}
