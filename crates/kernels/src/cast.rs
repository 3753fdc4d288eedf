//! Conversions between f32 and the two 16-bit float types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use paceline_memory::{DType, Device, Tensor};

use crate::error::expect_shape;
use crate::meta::MetaScratch;
use crate::{Compute, KernelError, Result};

/// Number of elements that a thread converts at a time.
const BLOCK_ELEMS: usize = 1 << 16;

/// `rounded = x`, rounded to nearest, ties to even: f32 to f16 or bf16, of the same shape. Overwrites. Values
/// beyond the range of f16 become infinity.
pub fn narrow(compute: &Compute, x: &Tensor, rounded: &Tensor) -> Result<()> {
    let _time = compute.time_old("cast_narrow", [x]);
    let op = "narrow";
    expect_shape(op, "rounded", rounded.shape(), x.shape())?;
    expect_f32(op, x)?;
    match compute.device_of(op, [x, rounded])? {
        Device::Cpu => match rounded.dtype() {
            DType::F16 => in_blocks(compute, &x.read()?, &mut rounded.write::<f16>()?, |x, y| {
                y.convert_from_f32_slice(x);
            }),
            DType::BF16 => in_blocks(compute, &x.read()?, &mut rounded.write::<bf16>()?, |x, y| {
                y.convert_from_f32_slice(x);
            }),
            dtype => return Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => match rounded.dtype() {
            dtype @ (DType::F16 | DType::BF16) => {
                MetaScratch::new(compute, op).reads(DType::F32, [x])?.writes(dtype, [rounded])?;
            }
            dtype => return Err(KernelError::DType { op, dtype }),
        },
    }
    Ok(())
}

/// `x = rounded`, exactly: f16 or bf16 to f32, of the same shape. Overwrites.
pub fn widen(compute: &Compute, rounded: &Tensor, x: &Tensor) -> Result<()> {
    let _time = compute.time_old("cast_widen", [rounded]);
    let op = "widen";
    expect_shape(op, "x", x.shape(), rounded.shape())?;
    expect_f32(op, x)?;
    match compute.device_of(op, [rounded, x])? {
        Device::Cpu => match rounded.dtype() {
            DType::F16 => in_blocks(compute, &rounded.read::<f16>()?, &mut x.write()?, |y, x| {
                y.convert_to_f32_slice(x);
            }),
            DType::BF16 => in_blocks(compute, &rounded.read::<bf16>()?, &mut x.write()?, |y, x| {
                y.convert_to_f32_slice(x);
            }),
            dtype => return Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => match rounded.dtype() {
            dtype @ (DType::F16 | DType::BF16) => {
                MetaScratch::new(compute, op).reads(dtype, [rounded])?.writes(DType::F32, [x])?;
            }
            dtype => return Err(KernelError::DType { op, dtype }),
        },
    }
    Ok(())
}

fn in_blocks<A: Sync, B: Send>(
    compute: &Compute,
    from: &[A],
    to: &mut [B],
    convert: impl Fn(&[A], &mut [B]) + Send + Sync,
) {
    let blocks = from.chunks(BLOCK_ELEMS).zip(to.chunks_mut(BLOCK_ELEMS)).collect();
    let Ok(()) = compute.threads.for_each(blocks, |(from, to)| {
        convert(from, to);
        Ok::<(), std::convert::Infallible>(())
    });
}

fn expect_f32(op: &'static str, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 => Ok(()),
        dtype => Err(KernelError::DType { op, dtype }),
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, Category};

    use super::*;

    #[test]
    fn what_fits_comes_back_and_the_rest_is_rounded() {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let tensor = |dtype| compute.allocator.tensor(dtype, [6], Category::Communication).unwrap();
        let x = tensor(DType::F32);
        let there_and_back = |dtype| {
            let values = [1.0, -0.375, 0.0, 1.0 + 1.0 / 1024.0, 1.0 + 1.0 / 4096.0, 1e6];
            x.write::<f32>().unwrap().copy_from_slice(&values);
            let rounded = tensor(dtype);
            narrow(&compute, &x, &rounded).unwrap();
            widen(&compute, &rounded, &x).unwrap();
            x.read::<f32>().unwrap().to_vec()
        };
        let ours = there_and_back(DType::F16);
        assert_eq!(ours, [1.0, -0.375, 0.0, 1.0 + 1.0 / 1024.0, 1.0, f32::INFINITY]);
        assert_eq!(there_and_back(DType::BF16), [1.0, -0.375, 0.0, 1.0, 1.0, 999_424.0]);
        assert!(narrow(&compute, &x, &tensor(DType::I32)).is_err());
    }
}
