//! Makes batches one after the other, in memory that is reused.
//!
//! Input: a data set, a sampler and an allocator. Output: [`Batch`]es in order. This module knows nothing of threads.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_memory::{Allocator, Category, DType, MemoryError, Tensor};
use paceline_trace::Track;
use serde::{Deserialize, Serialize};

use crate::field::TensorShape;
use crate::sample::{FieldMemory, Values};
use crate::sampler::{Share, ShareIter};
use crate::{BatchShape, DataError, Dataset, Field, Sample};

/// One rank's share of one global batch. Dropping it returns its memory for a later batch.
#[derive(Debug)]
pub struct Batch {
    /// The batch's position in the data.
    pub position: Position,
    /// The tensors by name: all fields of the data set in their order, each (local, extents...), where `local` is
    /// this rank's number of samples and may be 0. A ragged field is (local, longest, extents...), padded at the end, where
    /// `longest` is the largest length of this rank's samples and at least 1. Then the last tensor is
    /// `lengths`, i64 (local).
    pub tensors: Vec<(&'static str, Tensor)>,
    /// Samples of all ranks together. The loss must be weighted by this number.
    pub global_count: usize,
}

impl Batch {
    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|(own, _)| *own == name).map(|(_, tensor)| tensor)
    }

    /// The number of this rank's samples.
    pub fn num_samples(&self) -> usize {
        self.tensors.first().map_or(0, |(_, tensor)| tensor.dims()[0])
    }
}

/// A position in the data, between two batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The epoch, counted from zero: the number of complete epochs.
    pub epoch: u64,
    /// The next batch of the epoch, counted from zero: the number of complete batches of this epoch.
    pub batch: usize,
}

/// Makes the batches of a rank in memory of the host.
#[derive(Debug)]
pub(crate) struct Producer {
    shares: ShareIter,
    maker: Maker,
    /// Where a span is recorded for each batch.
    track: Option<Arc<Track>>,
}

impl Producer {
    pub(crate) fn new(
        dataset: Arc<dyn Dataset>,
        shares: ShareIter,
        allocator: Allocator,
        track: Option<Arc<Track>>,
    ) -> Result<Self, DataError> {
        let (len, sampler) = (dataset.len(), shares.sampler());
        if sampler.len() != len {
            let setting = "the sampler's number of samples";
            let needs = format!("the data set's length {len}");
            return Err(DataError::Setting { setting, needs, got: sampler.len() });
        }
        let shape = BatchShape::of(&*dataset);
        shape.check()?;
        let max_rows = sampler.local_batch_max();
        Ok(Self { shares, maker: Maker { dataset, allocator, shape, max_rows }, track })
    }

    /// Allocates the memory of `count` batches and returns it to the pool.
    pub(crate) fn reserve(&self, count: usize) -> Result<(), DataError> {
        (0..count).map(|_| self.maker.tensors()).collect::<Result<Vec<_>, MemoryError>>()?;
        Ok(())
    }

    /// The next batch. `None` after the last one, or once `stop` is set.
    pub(crate) fn next_batch(&mut self, stop: &AtomicBool) -> Option<Result<Batch, DataError>> {
        let mut make = || {
            let (position, share) = self.shares.next()?;
            self.maker.batch(position, share, stop).transpose()
        };
        match &self.track {
            Some(track) => track.span("make batch", make),
            None => make(),
        }
    }
}

/// Reads the samples of a batch.
struct Maker {
    dataset: Arc<dyn Dataset>,
    allocator: Allocator,
    shape: BatchShape,
    /// The most samples of a batch.
    max_rows: usize,
}

impl fmt::Debug for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maker").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Maker {
    fn batch(
        &self,
        position: Position,
        share: Share<'_>,
        stop: &AtomicBool,
    ) -> Result<Option<Batch>, DataError> {
        let epoch = position.epoch;
        let rows = share.indices.len();
        let memory = self.tensors()?;
        let mut columns = self.columns(&memory, rows)?;
        let mut lengths = Vec::new();
        for (row, &index) in share.indices.iter().enumerate() {
            // Checked before each sample: reading one may be slow, and the end of a run should not wait for a whole batch.
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let length = self.read(&mut columns, row, (epoch, index as usize))?;
            lengths.extend(length.map(|length| length as i64));
        }
        let longest = lengths.iter().max().map_or(1, |longest| *longest as usize);
        columns.iter_mut().for_each(|column| column.pad(&lengths, longest));
        drop(columns);
        let tensors = self.shape.tensors(rows, longest);
        let tensors = tensors.iter().zip(&memory).map(|(shape, memory)| {
            Ok((
                shape.name,
                Tensor::new(memory.buffer().clone(), 0, shape.dtype, shape.dims.as_slice())?,
            ))
        });
        let tensors = tensors.collect::<Result<Vec<_>, MemoryError>>()?;
        if self.shape.max_length().is_some()
            && let Some((_, tensor)) = tensors.last()
        {
            tensor.write::<i64>()?.copy_from_slice(&lengths);
        }
        Ok(Some(Batch { position, tensors, global_count: share.global_count }))
    }

    /// Reads a sample into a row and checks it. Returns its length if a field is ragged.
    fn read(
        &self,
        columns: &mut [FieldMemory],
        row: usize,
        (epoch, index): (u64, usize),
    ) -> Result<Option<usize>, DataError> {
        let is_ragged = self.shape.max_length().is_some();
        // Unwind safety: the half-written sample is never used after a panic.
        let read = AssertUnwindSafe(|| {
            let mut sample = Sample::new(columns, row);
            self.dataset.read(epoch, index, &mut sample);
            assert!(!is_ragged || sample.length().is_some(), "it set no length");
            sample.length()
        });
        let length = catch_unwind(read).map_err(|panic| DataError::Panicked {
            epoch,
            index,
            message: panic_message(&*panic),
        })?;
        columns.iter().try_for_each(|column| column.check(row, length, (epoch, index)))?;
        Ok(length)
    }

    /// The tensors of the largest batch. All batches use memory of these sizes, so that the pool can reuse the
    /// blocks.
    fn tensors(&self) -> Result<Vec<Tensor>, MemoryError> {
        let shapes = self.shape.largest(self.max_rows);
        let tensor = |TensorShape { dtype, dims, .. }: TensorShape| {
            let num_bytes = dims.iter().fold(dtype.size_bytes(), |n, dim| n.saturating_mul(*dim));
            let buffer = self.allocator.allocate(num_bytes, Category::Data)?;
            Tensor::new(buffer, 0, dtype, dims.as_slice())
        };
        shapes.into_iter().map(tensor).collect()
    }

    /// The fields' memory for `rows` samples.
    fn columns(&self, tensors: &[Tensor], rows: usize) -> Result<Vec<FieldMemory>, MemoryError> {
        let column = |(field, tensor): (&Field, &Tensor)| {
            let tensor = tensor.slice(0..rows * field.max_elems())?;
            let values = match field.dtype() {
                DType::I64 => Values::I64(Box::new(tensor.write::<i64>()?)),
                _ => Values::F32(Box::new(tensor.write::<f32>()?)),
            };
            Ok(FieldMemory { field: field.clone(), values })
        };
        self.shape.fields().iter().zip(tensors).map(column).collect()
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}
