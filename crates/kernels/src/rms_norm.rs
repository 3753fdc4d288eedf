//! Normalization of rows by their root mean square.
//!
//! Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), as in PyTorch's `RMSNorm`.

use half::bf16;
use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::{self, MetaScratch};
use crate::simd::multiversion;
use crate::stored::{Stored, expected, is_rounded};
use crate::{Compute, KernelError, Real, Result, SimdLevel, lanes};

const OP: &str = "rms_norm";

/// Rows and columns of x.
fn sizes(x: &Tensor) -> Result<(usize, usize)> {
    match *x.dims() {
        [rows, columns] => Ok((rows, columns)),
        _ => {
            let (expected, got) = ([0, 0].into(), x.shape());
            Err(KernelError::Shape { op: OP, operand: "input", expected, got })
        }
    }
}

/// `y = x * r * w` with `r = 1 / sqrt(mean(x^2) + eps)` of the row. Shapes: x and y (n, columns), w (columns), r (n),
/// which the backward passes need. f32 and f64; a y of bf16 is computed in f32. Overwrites y and r.
pub fn forward(
    compute: &Compute,
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    y: &Tensor,
    r: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("rms_norm_forward", [x]);
    let (rows, columns) = sizes(x)?;
    expect_shape(OP, "weight", w.shape(), [columns])?;
    expect_shape(OP, "output", y.shape(), x.shape())?;
    expect_shape(OP, "r", r.shape(), [rows])?;
    match compute.device_of(OP, [x, w, y, r])? {
        Device::Cpu => match x.dtype() {
            dtype @ DType::F32 if is_rounded(dtype, y) => {
                forward_rows(compute, (rows, columns), (x, w, y, r), eps, forward_bf16)
            }
            DType::F32 => forward_rows(compute, (rows, columns), (x, w, y, r), eps, forward_f32),
            DType::F64 => {
                let (x, w) = (x.read()?, w.read()?);
                forward_body::<f64, f64>(&x, &w, eps, &mut y.write()?, &mut r.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, x)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [x, w])?;
            pretended.writes(expected(dtype, y), [y])?.writes(dtype, [r])?;
            Ok(())
        }
    }
}

/// x, w, eps, y and r of some rows.
type Forward<Y> = fn(SimdLevel, &[f32], &[f32], f64, &mut [Y], &mut [f32]);

fn forward_rows<Y: Stored>(
    compute: &Compute,
    (rows, columns): (usize, usize),
    (x, w, y, r): (&Tensor, &Tensor, &Tensor, &Tensor),
    eps: f64,
    kernel: Forward<Y>,
) -> Result<()> {
    let (x, w) = (x.read::<f32>()?, w.read::<f32>()?);
    let (mut y, mut r) = (y.write::<Y>()?, r.write::<f32>()?);
    let items = batches(compute, &mut y, columns, rows);
    let items = items.into_iter().zip(batches(compute, &mut r, 1, rows)).collect();
    compute.threads.for_each(items, |((first, y), (_, r))| {
        let x = &x[columns * first..][..y.len()];
        kernel(compute.simd, x, &w, eps, y, r);
        Ok(())
    })
}

multiversion! {
    fn forward_f32(x: &[f32], w: &[f32], eps: f64, y: &mut [f32], r: &mut [f32]) = forward_body
}

multiversion! {
    fn forward_bf16(x: &[f32], w: &[f32], eps: f64, y: &mut [bf16], r: &mut [f32]) = forward_body
}

#[inline(always)]
fn forward_body<T: Real, Y: Stored<Real = T>>(
    x: &[T],
    w: &[T],
    eps: f64,
    y: &mut [Y],
    r: &mut [T],
) {
    let columns = w.len();
    let (one, eps, count) = (T::from_f64(1.0), T::from_f64(eps), T::from_f64(columns as f64));
    let rows = x.chunks_exact(columns.max(1)).zip(y.chunks_exact_mut(columns.max(1)));
    for ((x, y), r) in rows.zip(r) {
        *r = one / (lanes::sum(columns, |j| x[j] * x[j]) / count + eps).sqrt();
        for j in 0..columns {
            y[j] = Y::store(x[j] * *r * w[j]);
        }
    }
}

/// `dx = r * w * dy - x * r^3 * mean(w * dy * x)`. Shapes as in [`forward`]. f32 and f64; dy may be bf16 if the others
/// are f32. Overwrites.
pub fn backward_input(
    compute: &Compute,
    x: &Tensor,
    w: &Tensor,
    r: &Tensor,
    dy: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("rms_norm_backward_input", [x]);
    let (rows, columns) = sizes(x)?;
    expect_shape(OP, "weight", w.shape(), [columns])?;
    expect_shape(OP, "r", r.shape(), [rows])?;
    expect_shape(OP, "d_output", dy.shape(), x.shape())?;
    expect_shape(OP, "d_input", dx.shape(), x.shape())?;
    match compute.device_of(OP, [x, w, r, dy, dx])? {
        Device::Cpu => match x.dtype() {
            dtype @ DType::F32 if is_rounded(dtype, dy) => {
                input_rows(compute, (rows, columns), (x, w, r), dy, dx, input_bf16)
            }
            DType::F32 => input_rows(compute, (rows, columns), (x, w, r), dy, dx, input_f32),
            DType::F64 => {
                let (x, w, r, dy) = (x.read()?, w.read()?, r.read()?, dy.read()?);
                input_body::<f64, f64>(&x, &w, &r, &dy, &mut dx.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, x)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [x, w, r])?;
            pretended.reads(expected(dtype, dy), [dy])?.writes(dtype, [dx])?;
            Ok(())
        }
    }
}

/// x, w, r, dy and dx of some rows.
type Input<D> = fn(SimdLevel, &[f32], &[f32], &[f32], &[D], &mut [f32]);

fn input_rows<D: Stored>(
    compute: &Compute,
    (rows, columns): (usize, usize),
    (x, w, r): (&Tensor, &Tensor, &Tensor),
    dy: &Tensor,
    dx: &Tensor,
    kernel: Input<D>,
) -> Result<()> {
    let (x, w) = (x.read::<f32>()?, w.read::<f32>()?);
    let (r, dy) = (r.read::<f32>()?, dy.read::<D>()?);
    let mut dx = dx.write::<f32>()?;
    let items = batches(compute, &mut dx, columns, rows);
    compute.threads.for_each(items, |(first, dx)| {
        let part = columns * first..columns * first + dx.len();
        kernel(compute.simd, &x[part.clone()], &w, &r[first..], &dy[part], dx);
        Ok(())
    })
}

multiversion! {
    fn input_f32(x: &[f32], w: &[f32], r: &[f32], dy: &[f32], dx: &mut [f32]) = input_body
}

multiversion! {
    fn input_bf16(x: &[f32], w: &[f32], r: &[f32], dy: &[bf16], dx: &mut [f32]) = input_body
}

#[inline(always)]
fn input_body<T: Real, D: Stored<Real = T>>(x: &[T], w: &[T], r: &[T], dy: &[D], dx: &mut [T]) {
    let columns = w.len();
    let count = T::from_f64(columns as f64);
    let rows = x.chunks_exact(columns.max(1)).zip(dy.chunks_exact(columns.max(1)));
    for (((x, dy), dx), r) in rows.zip(dx.chunks_exact_mut(columns.max(1))).zip(r) {
        let mean = lanes::sum(columns, |j| w[j] * dy[j].load() * x[j]) / count;
        let factor = mean * *r * *r * *r;
        for j in 0..columns {
            dx[j] = *r * w[j] * dy[j].load() - x[j] * factor;
        }
    }
}

/// `dw[j] = sum over rows of dy[i, j] * x[i, j] * r[i]`, row by row. Shapes as in [`forward`]. f32 and f64; dy may be
/// bf16 if the others are f32. Overwrites, or adds to what is there if `accumulate`.
pub fn backward_weight(
    compute: &Compute,
    x: &Tensor,
    r: &Tensor,
    dy: &Tensor,
    dw: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time_old("rms_norm_backward_weight", [x]);
    let (rows, columns) = sizes(x)?;
    expect_shape(OP, "r", r.shape(), [rows])?;
    expect_shape(OP, "d_output", dy.shape(), x.shape())?;
    expect_shape(OP, "d_weight", dw.shape(), [columns])?;
    match compute.device_of(OP, [x, r, dy, dw])? {
        Device::Cpu => match x.dtype() {
            dtype @ DType::F32 => {
                let (x, r, mut dw) = (x.read::<f32>()?, r.read::<f32>()?, dw.write::<f32>()?);
                if !accumulate {
                    dw.fill(0.0);
                }
                match is_rounded(dtype, dy) {
                    true => weight_bf16(compute.simd, &x, &r, &dy.read()?, &mut dw),
                    false => weight_f32(compute.simd, &x, &r, &dy.read()?, &mut dw),
                }
            }
            DType::F64 => {
                let (x, r, dy) = (x.read::<f64>()?, r.read::<f64>()?, dy.read::<f64>()?);
                let mut dw = dw.write::<f64>()?;
                if !accumulate {
                    dw.fill(0.0);
                }
                weight_body::<f64, f64>(&x, &r, &dy, &mut dw);
            }
            dtype => return Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, x)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [x, r])?;
            pretended.reads(expected(dtype, dy), [dy])?.writes(dtype, [dw])?;
        }
    }
    Ok(())
}

multiversion! {
    fn weight_f32(x: &[f32], r: &[f32], dy: &[f32], dw: &mut [f32]) = weight_body
}

multiversion! {
    fn weight_bf16(x: &[f32], r: &[f32], dy: &[bf16], dw: &mut [f32]) = weight_body
}

#[inline(always)]
fn weight_body<T: Real, D: Stored<Real = T>>(x: &[T], r: &[T], dy: &[D], dw: &mut [T]) {
    let columns = dw.len().max(1);
    for ((x, dy), r) in x.chunks_exact(columns).zip(dy.chunks_exact(columns)).zip(r) {
        for ((sum, x), dy) in dw.iter_mut().zip(x).zip(dy) {
            *sum += dy.load() * *x * *r;
        }
    }
}
