//! The norm of a flat tensor, and scaling of a tensor, for gradient clipping.

use paceline_memory::{Category, DType, Tensor};

use crate::compute::batches;
use crate::simd::multiversion;
use crate::{Compute, KernelError, Real, Result};

/// Number of elements in a block. Each block is summed by one thread, so the sum does not depend on the
/// number of threads.
const BLOCK_ELEMS: usize = 4096;

/// Number of running sums within a block. They fill whole vector registers at every level. Element `i`
/// of a block always goes to sum `i % LANES`.
const LANES: usize = 16;

/// The sum of the squares of all elements. f32 and f64, squared and summed in f64: by lane within a
/// block, then over the lanes, then over the blocks, each in order. Neither the number of threads nor
/// the vector instructions change a bit of the result.
pub fn sum_of_squares(compute: &Compute, tensor: &Tensor) -> Result<f64> {
    let _time = compute.time("sum_of_squares", [tensor]);
    match tensor.dtype() {
        DType::F32 => of_blocks(compute, &tensor.read::<f32>()?, |x, sums| {
            block_sums_f32(compute.simd, x, sums);
        }),
        DType::F64 => of_blocks(compute, &tensor.read::<f64>()?, block_sums_body::<f64>),
        dtype => Err(KernelError::DType { op: "sum of squares", dtype }),
    }
}

fn of_blocks<T: Real>(
    compute: &Compute,
    x: &[T],
    block_sums: impl Fn(&[T], &mut [f64]) + Send + Sync,
) -> Result<f64> {
    let num_blocks = x.len().div_ceil(BLOCK_ELEMS);
    let sums = compute.allocator.tensor(DType::F64, [num_blocks], Category::Workspace)?;
    let mut sums = sums.write::<f64>()?;
    let items = batches(compute, &mut sums, 1, num_blocks);
    compute.threads.for_each(items, |(first, sums)| {
        let end = x.len().min((first + sums.len()) * BLOCK_ELEMS);
        block_sums(&x[first * BLOCK_ELEMS..end], sums);
        Ok::<(), KernelError>(())
    })?;
    Ok(sums.iter().sum())
}

multiversion! {
    fn block_sums_f32(x: &[f32], sums: &mut [f64]) = block_sums_body
}

/// One sum per block of `x`.
#[inline(always)]
fn block_sums_body<T: Real>(x: &[T], sums: &mut [f64]) {
    for (x, sum) in x.chunks(BLOCK_ELEMS).zip(sums) {
        let mut lanes = [0.0; LANES];
        let (rows, rest) = x.as_chunks::<LANES>();
        for row in rows {
            for (lane, x) in lanes.iter_mut().zip(row) {
                *lane += x.to_f64() * x.to_f64();
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x.to_f64() * x.to_f64();
        }
        *sum = lanes.iter().sum();
    }
}

/// `x = factor * x`, in place. f32, with the factor rounded to f32, and f64.
pub fn scale(compute: &Compute, tensor: &Tensor, factor: f64) -> Result<()> {
    let _time = compute.time("scale", [tensor]);
    match tensor.dtype() {
        DType::F32 => {
            let mut x = tensor.write::<f32>()?;
            let len = x.len();
            let items = batches(compute, &mut x, 1, len);
            compute.threads.for_each(items, |(_, x)| {
                scale_f32(compute.simd, x, factor);
                Ok(())
            })
        }
        DType::F64 => {
            scale_body::<f64>(&mut tensor.write()?, factor);
            Ok(())
        }
        dtype => Err(KernelError::DType { op: "scale", dtype }),
    }
}

multiversion! {
    fn scale_f32(x: &mut [f32], factor: f64) = scale_body
}

#[inline(always)]
fn scale_body<T: Real>(x: &mut [T], factor: f64) {
    let factor = T::from_f64(factor);
    for x in x {
        *x = factor * *x;
    }
}
