//! Element-wise operations: ReLU, bias, sums over rows.

use half::bf16;
use paceline_memory::{DType, Device, Tensor};

use crate::bf16::widen;
use crate::error::expect_shape;
use crate::meta::{self, Pretended};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Real, Result, SimdLevel};

/// `y = max(0, x)`; NaN stays NaN. f32 and f64; overwrites.
pub fn relu(compute: &Compute, input: &Tensor, output: &Tensor) -> Result<()> {
    let _time = compute.time("relu_forward", [input]);
    expect_shape("relu", "output", output.shape(), input.shape())?;
    match compute.device_of("relu", [input, output])? {
        Device::Cpu => match input.dtype() {
            DType::F32 => relu_f32(compute.simd, &input.read()?, &mut output.write()?),
            DType::F64 => relu_body::<f64>(&input.read()?, &mut output.write()?),
            dtype => return Err(KernelError::DType { op: "relu", dtype }),
        },
        Device::Meta => {
            let dtype = meta::float("relu", input)?;
            Pretended::new(compute, "relu").reads(dtype, [input])?.writes(dtype, [output])?;
        }
    }
    Ok(())
}

/// `dx = dy` where the output was not zero, and 0 elsewhere. f32, f64 and bf16; overwrites.
pub fn relu_backward(
    compute: &Compute,
    output: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time("relu_backward", [output, d_output]);
    let op = "relu backward";
    expect_shape(op, "d_output", d_output.shape(), output.shape())?;
    expect_shape(op, "d_input", d_input.shape(), output.shape())?;
    match compute.device_of(op, [output, d_output, d_input])? {
        Device::Cpu => match output.dtype() {
            DType::F32 => {
                let (y, dy) = (output.read()?, d_output.read()?);
                relu_backward_f32(compute.simd, &y, &dy, &mut d_input.write()?);
            }
            DType::F64 => {
                let (y, dy) = (output.read()?, d_output.read()?);
                relu_backward_body::<f64>(&y, &dy, &mut d_input.write()?);
            }
            DType::BF16 => {
                let (y, dy) = (output.read()?, d_output.read()?);
                relu_backward_bf16(compute.simd, &y, &dy, &mut d_input.write()?);
            }
            dtype => return Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => {
            let dtype = match output.dtype() {
                DType::BF16 => DType::BF16,
                _ => meta::float(op, output)?,
            };
            let pretended = Pretended::new(compute, op).reads(dtype, [output, d_output])?;
            pretended.writes(dtype, [d_input])?;
        }
    }
    Ok(())
}

multiversion! {
    fn relu_f32(x: &[f32], y: &mut [f32]) = relu_body
}

#[inline(always)]
fn relu_body<T: Real>(x: &[T], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = if *x > T::default() || x.is_nan() { *x } else { T::default() };
    }
}

multiversion! {
    fn relu_backward_f32(y: &[f32], dy: &[f32], dx: &mut [f32]) = relu_backward_body
}

multiversion! {
    fn relu_backward_bf16(y: &[bf16], dy: &[bf16], dx: &mut [bf16]) = relu_backward_body
}

#[inline(always)]
fn relu_backward_body<T: Copy + Default + PartialEq>(y: &[T], dy: &[T], dx: &mut [T]) {
    for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
        *dx = if *y == T::default() { T::default() } else { *dy };
    }
}

multiversion! {
    /// `y[i, j] = turned[j, first + i] + bias[j]`, optionally followed by ReLU. `turned` is transposed: it is
    /// (columns of y, `rows`), row-major.
    pub(crate) fn turn_add_bias(
        turned: &[f32],
        rows: usize,
        first: usize,
        bias: &[f32],
        with_relu: bool,
        y: &mut [f32],
    ) = turn_add_bias_body
}

#[inline(always)]
fn turn_add_bias_body(
    turned: &[f32],
    rows: usize,
    first: usize,
    bias: &[f32],
    with_relu: bool,
    y: &mut [f32],
) {
    // A square of this side length stays in the first-level cache in both matrices.
    const SIDE: usize = 32;
    let columns = bias.len();
    for (block, y) in y.chunks_mut(SIDE * columns).enumerate() {
        for j0 in (0..columns).step_by(SIDE) {
            let js = j0..columns.min(j0 + SIDE);
            for (i, y) in y.chunks_exact_mut(columns).enumerate() {
                let i = first + block * SIDE + i;
                for j in js.clone() {
                    let sum = turned[j * rows + i] + bias[j];
                    let is_cut = with_relu && !(sum > 0.0 || sum.is_nan());
                    y[j] = if is_cut { 0.0 } else { sum };
                }
            }
        }
    }
}

/// `sums[j] (+)= sum over rows of rows[i, j]`, row by row.
pub(crate) fn add_rows(level: SimdLevel, rows: &[f32], sums: &mut [f32], accumulate: bool) {
    if !accumulate {
        sums.fill(0.0);
    }
    add_rows_f32(level, rows, sums);
}

multiversion! {
    fn add_rows_f32(rows: &[f32], sums: &mut [f32]) = add_rows_body
}

#[inline(always)]
pub(crate) fn add_rows_body<T: Real>(rows: &[T], sums: &mut [T]) {
    for row in rows.chunks_exact(sums.len()) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += *x;
        }
    }
}

/// The same for rows of bf16, with sums in f32.
pub(crate) fn add_rows_of_bf16(
    level: SimdLevel,
    rows: &[bf16],
    sums: &mut [f32],
    accumulate: bool,
) {
    if !accumulate {
        sums.fill(0.0);
    }
    add_rows_bf16(level, rows, sums);
}

multiversion! {
    fn add_rows_bf16(rows: &[bf16], sums: &mut [f32]) = add_rows_of_bf16_body
}

#[inline(always)]
fn add_rows_of_bf16_body(rows: &[bf16], sums: &mut [f32]) {
    for row in rows.chunks_exact(sums.len()) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += widen(*x);
        }
    }
}

/// `y = x + y`, in place. Shapes: the same. f32 and f64.
pub fn add(compute: &Compute, x: &Tensor, y: &Tensor) -> Result<()> {
    let _time = compute.time("add", [x, y]);
    expect_shape("add", "x", x.shape(), y.shape())?;
    match compute.device_of("add", [x, y])? {
        Device::Cpu => match y.dtype() {
            DType::F32 => add_f32(compute.simd, &x.read()?, &mut y.write()?),
            DType::F64 => add_body::<f64>(&x.read()?, &mut y.write()?),
            dtype => return Err(KernelError::DType { op: "add", dtype }),
        },
        Device::Meta => {
            let dtype = meta::float("add", y)?;
            Pretended::new(compute, "add").reads(dtype, [x])?.writes(dtype, [y])?;
        }
    }
    Ok(())
}

multiversion! {
    fn add_f32(x: &[f32], y: &mut [f32]) = add_body
}

#[inline(always)]
fn add_body<T: Real>(x: &[T], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = *x + *y;
    }
}

/// `x = x / divisor`, in place. f32 and f64.
pub fn divide(compute: &Compute, tensor: &Tensor, divisor: f64) -> Result<()> {
    let _time = compute.time("divide", [tensor]);
    match compute.device_of("divide", [tensor])? {
        Device::Cpu => match tensor.dtype() {
            DType::F32 => divide_f32(compute.simd, &mut tensor.write()?, divisor),
            DType::F64 => divide_body::<f64>(&mut tensor.write()?, divisor),
            dtype => return Err(KernelError::DType { op: "divide", dtype }),
        },
        Device::Meta => {
            let dtype = meta::float("divide", tensor)?;
            Pretended::new(compute, "divide").writes(dtype, [tensor])?;
        }
    }
    Ok(())
}

multiversion! {
    fn divide_f32(x: &mut [f32], divisor: f64) = divide_body
}

#[inline(always)]
fn divide_body<T: Real>(x: &mut [T], divisor: f64) {
    let divisor = T::from_f64(divisor);
    for x in x {
        *x = *x / divisor;
    }
}
