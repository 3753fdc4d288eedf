//! Makes batches one after the other, in memory that is reused.
//!
//! Input: a data set, a sampler and an allocator. Output: [`Batch`]es in order. This module knows nothing of
//! threads: the loader decides where it runs.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_memory::{Allocator, Category, DType, MemoryError, Tensor, WriteGuard};

use crate::{DataError, Dataset, EpochPlan, Sampler, TargetMut, TargetSpec};

/// One rank's share of one global batch. Dropping it returns its memory for a later batch.
#[derive(Debug)]
pub struct Batch {
    /// The batch's position in the data.
    pub position: Position,
    /// f32, (local, input extents...), where `local` is this rank's number of samples and may be 0.
    pub inputs: Tensor,
    /// Classes: i64, (local). Values: f32, (local, dim).
    pub targets: Tensor,
    /// Samples of all ranks together. The loss must be weighted by this number.
    pub global_count: usize,
}

/// A position in the data, between two batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The epoch, counted from zero, which is also the number of complete epochs.
    pub epoch: u64,
    /// The next batch of the epoch, counted from zero, which is also the number of batches of this epoch that
    /// are complete.
    pub batch: usize,
}

/// Makes the batches from a position up to the start of an epoch.
pub(crate) struct Producer {
    dataset: Arc<dyn Dataset>,
    sampler: Sampler,
    allocator: Allocator,
    next: Position,
    end_epoch: u64,
    plan: EpochPlan,
    input_shape: Vec<usize>,
    target: TargetSpec,
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Producer {
    pub(crate) fn new(
        dataset: Arc<dyn Dataset>,
        sampler: Sampler,
        allocator: Allocator,
        start: Position,
        end_epoch: u64,
    ) -> Result<Self, DataError> {
        let setting = |setting, needs, got| Err(DataError::Setting { setting, needs, got });
        let (len, batches) = (dataset.len(), sampler.batches_per_epoch());
        if sampler.len() != len {
            let needs = format!("the data set's length {len}");
            return setting("the sampler's number of samples", needs, sampler.len());
        }
        if start.batch > batches {
            return setting("the first batch", format!("at most {batches}"), start.batch);
        }
        let (input_shape, target) = (dataset.input_shape().to_vec(), dataset.target());
        if input_shape.len() > 3 {
            let needs = "at most 3".to_owned();
            return setting("the number of extents of an input", needs, input_shape.len());
        }
        let plan = sampler.epoch(start.epoch);
        let next = start;
        Ok(Self { dataset, sampler, allocator, next, end_epoch, plan, input_shape, target })
    }

    /// Allocates the memory of `count` batches and returns it, so that the pool has it from now on.
    pub(crate) fn reserve(&self, count: usize) -> Result<(), DataError> {
        let batches: Result<Vec<_>, MemoryError> = (0..count).map(|_| self.tensors(0)).collect();
        batches?;
        Ok(())
    }

    /// The next batch. `None` after the last one, or once `stop` is set.
    pub(crate) fn next_batch(&mut self, stop: &AtomicBool) -> Option<Result<Batch, DataError>> {
        if self.next.batch >= self.sampler.batches_per_epoch() {
            self.next = Position { epoch: self.next.epoch + 1, batch: 0 };
        }
        let position = self.next;
        if position.epoch >= self.end_epoch {
            return None;
        }
        self.next.batch += 1;
        if self.plan.epoch() != position.epoch {
            self.plan = self.sampler.epoch(position.epoch);
        }
        self.batch(position, stop).transpose()
    }

    fn batch(&self, position: Position, stop: &AtomicBool) -> Result<Option<Batch>, DataError> {
        let Some(share) = self.plan.batch(position.batch) else { return Ok(None) };
        let epoch = position.epoch;
        let (inputs, targets) = self.tensors(share.indices.len())?;
        let input_elems: usize = self.input_shape.iter().product();
        let mut input_rows = inputs.write::<f32>()?;
        let mut target_rows = TargetRows::new(&targets, self.target)?;
        for (row, &index) in share.indices.iter().enumerate() {
            // Checked before each sample: reading one may be slow, and the end of a run should not wait
            // for a whole batch.
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let index = index as usize;
            let input = &mut input_rows[row * input_elems..][..input_elems];
            let target = target_rows.row(row);
            // Unwind safety: the half-written sample is never used after a panic.
            let read = AssertUnwindSafe(|| self.dataset.read(epoch, index, input, target));
            catch_unwind(read).map_err(|panic| DataError::Panicked {
                epoch,
                index,
                message: panic_message(&*panic),
            })?;
            target_rows.check(row, epoch, index)?;
        }
        drop((input_rows, target_rows));
        Ok(Some(Batch { position, inputs, targets, global_count: share.global_count }))
    }

    /// Inputs and targets of `rows` samples. Their buffers always have room for the largest batch, so that
    /// the pool can give the same blocks to full batches and to a short last one.
    fn tensors(&self, rows: usize) -> Result<(Tensor, Tensor), MemoryError> {
        let inputs = self.tensor(DType::F32, rows, &self.input_shape)?;
        let targets = match self.target {
            TargetSpec::Class { .. } => self.tensor(DType::I64, rows, &[])?,
            TargetSpec::Values { dim } => self.tensor(DType::F32, rows, &[dim])?,
        };
        Ok((inputs, targets))
    }

    fn tensor(&self, dtype: DType, rows: usize, row: &[usize]) -> Result<Tensor, MemoryError> {
        let row_bytes = row.iter().product::<usize>() * dtype.size_bytes();
        let capacity_bytes = self.sampler.local_batch_max() * row_bytes;
        let buffer = self.allocator.host(capacity_bytes, Category::Data)?;
        let shape = [&[rows], row].concat();
        Tensor::new(buffer, 0, dtype, shape.as_slice())
    }
}

/// The targets of a batch, while they are written.
enum TargetRows {
    Classes { rows: WriteGuard<i64>, num_classes: usize },
    Values { rows: WriteGuard<f32>, dim: usize },
}

impl TargetRows {
    fn new(targets: &Tensor, spec: TargetSpec) -> Result<Self, MemoryError> {
        Ok(match spec {
            TargetSpec::Class { num_classes } => {
                Self::Classes { rows: targets.write()?, num_classes }
            }
            TargetSpec::Values { dim } => Self::Values { rows: targets.write()?, dim },
        })
    }

    fn row(&mut self, row: usize) -> TargetMut<'_> {
        match self {
            Self::Classes { rows, .. } => TargetMut::Class(&mut rows[row]),
            Self::Values { rows, dim } => TargetMut::Values(&mut rows[row * *dim..][..*dim]),
        }
    }

    /// Checks the class. This is done here rather than in a loss kernel, so that the error can name the
    /// sample.
    fn check(&self, row: usize, epoch: u64, index: usize) -> Result<(), DataError> {
        match self {
            &Self::Classes { ref rows, num_classes }
                if usize::try_from(rows[row]).map_or(true, |class| class >= num_classes) =>
            {
                Err(DataError::Class { epoch, index, class: rows[row], num_classes })
            }
            _ => Ok(()),
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}
