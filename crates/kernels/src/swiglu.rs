//! The gated activation of a Llama's feed-forward layer.
//!
//! Source: Shazeer, GLU Variants Improve Transformer (2020).

use half::bf16;
use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::MetaScratch;
use crate::simd::multiversion;
use crate::stored::{self, Stored};
use crate::{Compute, KernelError, Real, Result, SimdLevel};

const OP: &str = "swiglu";

/// The sizes of the output: rows, columns. Checks that the input has twice the columns.
fn sizes(gate_up: &Tensor, output: &Tensor, operand: &'static str) -> Result<(usize, usize)> {
    let &[rows, columns] = output.dims() else {
        let (expected, got) = ([0, 0].into(), output.shape());
        return Err(KernelError::Shape { op: OP, operand, expected, got });
    };
    expect_shape(OP, "gate_up", gate_up.shape(), [rows, 2 * columns])?;
    Ok((rows, columns))
}

/// `y = silu(gate) * up`, with `silu(x) = x / (1 + exp(-x))`. Shapes: gate_up (n, 2 * columns), the gate's columns first;
/// output (n, columns). f32, f64 and bf16, which is computed in f32; overwrites.
pub fn forward(compute: &Compute, gate_up: &Tensor, output: &Tensor) -> Result<()> {
    let _time = compute.time_old("swiglu_forward", [gate_up]);
    let (rows, columns) = sizes(gate_up, output, "output")?;
    match compute.device_of(OP, [gate_up, output])? {
        Device::Cpu => match output.dtype() {
            DType::F32 => forward_rows(compute, (rows, columns), gate_up, output, forward_f32),
            DType::BF16 => forward_rows(compute, (rows, columns), gate_up, output, forward_bf16),
            DType::F64 => {
                forward_body::<f64>(columns, &gate_up.read()?, &mut output.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let (dtype, _) = stored::types(OP, output)?;
            MetaScratch::new(compute, OP).reads(dtype, [gate_up])?.writes(dtype, [output])?;
            Ok(())
        }
    }
}

fn forward_rows<S: Stored>(
    compute: &Compute,
    (rows, columns): (usize, usize),
    gate_up: &Tensor,
    output: &Tensor,
    kernel: fn(SimdLevel, usize, &[S], &mut [S]),
) -> Result<()> {
    let (x, mut y) = (gate_up.read::<S>()?, output.write::<S>()?);
    let items = batches(compute, &mut y, columns, rows);
    compute.threads.for_each(items, |(first, y)| {
        let x = &x[2 * columns * first..][..2 * y.len()];
        kernel(compute.simd, columns, x, y);
        Ok(())
    })
}

multiversion! {
    fn forward_f32(columns: usize, gate_up: &[f32], y: &mut [f32]) = forward_body
}

multiversion! {
    fn forward_bf16(columns: usize, gate_up: &[bf16], y: &mut [bf16]) = forward_body
}

#[inline(always)]
fn forward_body<S: Stored>(columns: usize, gate_up: &[S], y: &mut [S]) {
    let one = S::Real::from_f64(1.0);
    for (row, y) in gate_up.chunks_exact(2 * columns.max(1)).zip(y.chunks_exact_mut(columns.max(1)))
    {
        let (gate, up) = row.split_at(columns);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            let (g, u) = (g.load(), u.load());
            *y = S::store(g / (one + (-g).fast_exp()) * u);
        }
    }
}

/// `d_gate = d_output * up * s * (1 + gate * (1 - s))` and `d_up = d_output * gate * s`, with `s = 1 / (1 + exp(-gate))`.
/// Shapes: gate_up and d_gate_up (n, 2 * columns), d_output (n, columns). Types as in [`forward`]; overwrites.
pub fn backward(
    compute: &Compute,
    gate_up: &Tensor,
    d_output: &Tensor,
    d_gate_up: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("swiglu_backward", [gate_up]);
    let (rows, columns) = sizes(gate_up, d_output, "d_output")?;
    expect_shape(OP, "d_gate_up", d_gate_up.shape(), gate_up.shape())?;
    match compute.device_of(OP, [gate_up, d_output, d_gate_up])? {
        Device::Cpu => match d_output.dtype() {
            DType::F32 => {
                let tensors = (gate_up, d_output, d_gate_up);
                backward_rows(compute, (rows, columns), tensors, backward_f32)
            }
            DType::BF16 => {
                let tensors = (gate_up, d_output, d_gate_up);
                backward_rows(compute, (rows, columns), tensors, backward_bf16)
            }
            DType::F64 => {
                let (x, dy) = (gate_up.read()?, d_output.read()?);
                backward_body::<f64>(columns, &x, &dy, &mut d_gate_up.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let (dtype, _) = stored::types(OP, d_output)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [gate_up, d_output])?;
            pretended.writes(dtype, [d_gate_up])?;
            Ok(())
        }
    }
}

fn backward_rows<S: Stored>(
    compute: &Compute,
    (rows, columns): (usize, usize),
    (gate_up, d_output, d_gate_up): (&Tensor, &Tensor, &Tensor),
    kernel: fn(SimdLevel, usize, &[S], &[S], &mut [S]),
) -> Result<()> {
    let (x, dy) = (gate_up.read::<S>()?, d_output.read::<S>()?);
    let mut dx = d_gate_up.write::<S>()?;
    let items = batches(compute, &mut dx, 2 * columns, rows);
    compute.threads.for_each(items, |(first, dx)| {
        let x = &x[2 * columns * first..][..dx.len()];
        let dy = &dy[columns * first..][..dx.len() / 2];
        kernel(compute.simd, columns, x, dy, dx);
        Ok(())
    })
}

multiversion! {
    fn backward_f32(columns: usize, gate_up: &[f32], dy: &[f32], dx: &mut [f32]) = backward_body
}

multiversion! {
    fn backward_bf16(columns: usize, gate_up: &[bf16], dy: &[bf16], dx: &mut [bf16]) = backward_body
}

#[inline(always)]
fn backward_body<S: Stored>(columns: usize, gate_up: &[S], dy: &[S], dx: &mut [S]) {
    let one = S::Real::from_f64(1.0);
    let (whole, half) = (2 * columns.max(1), columns.max(1));
    let rows = gate_up.chunks_exact(whole).zip(dy.chunks_exact(half));
    for ((row, dy), dx) in rows.zip(dx.chunks_exact_mut(whole)) {
        let ((gate, up), (d_gate, d_up)) = (row.split_at(columns), dx.split_at_mut(columns));
        for j in 0..columns {
            let (g, u, d) = (gate[j].load(), up[j].load(), dy[j].load());
            let s = one / (one + (-g).fast_exp());
            d_gate[j] = S::store(d * u * s * (one + g * (one - s)));
            d_up[j] = S::store(d * g * s);
        }
    }
}
