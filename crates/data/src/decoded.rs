//! A data set whose samples take longer, as if they had to be decoded.
//!
//! Input: a data set, and the time of a core that each of its samples takes more. Output: the same samples. For experiments
//! with loaders: images and texts of real tasks are often decoded, and these files are not.

use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::{Dataset, Field, Sample};

/// Samples of another data set, each after some work.
pub struct Decoded {
    dataset: Arc<dyn Dataset>,
    work: Duration,
}

impl Decoded {
    /// The same samples, each of which keeps a core busy for `work` longer. What counts is the time in which the thread runs: two
    /// threads that share a core take twice as long.
    pub fn new(dataset: Arc<dyn Dataset>, work: Duration) -> Self {
        Self { dataset, work }
    }
}

impl Dataset for Decoded {
    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn fields(&self) -> Vec<Field> {
        self.dataset.fields()
    }

    fn lengths(&self) -> Option<Vec<u32>> {
        self.dataset.lengths()
    }

    fn class_names(&self) -> Vec<String> {
        self.dataset.class_names()
    }

    fn digest(&self) -> Option<String> {
        self.dataset.digest()
    }

    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>) {
        self.dataset.read(epoch, index, sample);
        let start = thread_time();
        while thread_time().saturating_sub(start) < self.work {
            std::hint::spin_loop();
        }
    }
}

/// The time for which this thread has run.
fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataError, OwnedSample, SyntheticRegression};

    #[test]
    fn samples_stay_what_they_are_and_take_the_time() -> Result<(), DataError> {
        let plain: Arc<dyn Dataset> = Arc::new(SyntheticRegression::new(3, 2, 10, 42)?);
        let decoded = Decoded::new(plain.clone(), Duration::from_millis(2));
        assert_eq!((decoded.len(), decoded.fields()), (plain.len(), plain.fields()));
        let start = thread_time();
        let (mut of, mut other) =
            (OwnedSample::read(&decoded, 5, 7)?, OwnedSample::read(&*plain, 5, 7)?);
        assert!(thread_time() - start >= Duration::from_millis(2));
        assert_eq!(of.f32("inputs"), other.f32("inputs"));
        Ok(())
    }
}
