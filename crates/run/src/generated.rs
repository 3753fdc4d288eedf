//! Synthetic batches, made on the device that computes.
//!
//! Input: the shares of a rank. Output: the batches that the loader would make on the host, with the same bits, but in the
//! memory of the device: nothing is copied. Each batch is an operation of the device, like those of the model.

use std::sync::Arc;

use paceline_data::{Batch, BatchShape, Dataset, OwnedSample, Position, Share, ShareIter};
use paceline_failure::Result;
use paceline_kernels::{Compute, Either, Op, write};
use paceline_memory::{Category, DType};

/// Makes the batches of a rank. It is done with each when it gives it away, so that making it is part of no step.
pub struct Generated {
    pub dataset: Arc<dyn Dataset>,
    pub shares: ShareIter,
    pub compute: Compute,
}

impl Iterator for Generated {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let Self { dataset, shares, compute } = self;
        shares.next().map(|(position, share)| make(dataset, compute, position, share))
    }
}

/// Makes a batch of a data set whose samples all have the same size.
fn make(
    dataset: &Arc<dyn Dataset>,
    compute: &Compute,
    position: Position,
    Share { indices, global_count }: Share<'_>,
) -> Result<Batch> {
    let shape = BatchShape::of(dataset.as_ref());
    let tensor = |of: paceline_data::TensorShape| {
        let dims = of.dims.as_slice();
        Ok((of.name, compute.allocator.tensor(of.dtype, dims, Category::Data)?))
    };
    let tensors = shape.tensors(indices.len(), 1).into_iter().map(tensor);
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let columns = tensors.iter().map(|(name, tensor)| match tensor.dtype() {
        DType::I64 => Either::A(write::<i64>(name, tensor, tensor.shape())),
        _ => Either::B(write::<f32>(name, tensor, tensor.shape())),
    });
    let (dataset, indices) = (dataset.clone(), indices.to_vec());
    compute.launch(Op::new("make_batch"), columns.collect::<Vec<_>>(), move |_, mut columns| {
        for (row, index) in indices.iter().enumerate() {
            let sample = OwnedSample::read(dataset.as_ref(), position.epoch, *index as usize);
            let mut sample = sample.expect("a batch has been shaped of the same fields");
            for (field, column) in shape.fields().iter().zip(&mut columns) {
                let len = field.extents().iter().product::<usize>();
                let row = row * len..(row + 1) * len;
                match column {
                    Either::A(column) => column[row].copy_from_slice(&sample.i64(field.name())),
                    Either::B(column) => column[row].copy_from_slice(&sample.f32(field.name())),
                }
            }
        }
        Ok(())
    })?;
    compute.synchronize()?;
    Ok(Batch { position, tensors, global_count })
}
