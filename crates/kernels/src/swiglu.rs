//! The gated activation of a Llama's feed-forward layer.
//!
//! Source: Shazeer, GLU Variants Improve Transformer (2020).

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::{self, Pretended};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Real, Result};

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
/// output (n, columns). f32 and f64; overwrites.
pub fn forward(compute: &Compute, gate_up: &Tensor, output: &Tensor) -> Result<()> {
    let _time = compute.time("swiglu_forward", [gate_up]);
    let (rows, columns) = sizes(gate_up, output, "output")?;
    match compute.device_of(OP, [gate_up, output])? {
        Device::Cpu => match output.dtype() {
            DType::F32 => {
                let (x, mut y) = (gate_up.read::<f32>()?, output.write::<f32>()?);
                let items = batches(compute, &mut y, columns, rows);
                compute.threads.for_each(items, |(first, y)| {
                    let x = &x[2 * columns * first..][..2 * y.len()];
                    forward_f32(compute.simd, columns, x, y);
                    Ok(())
                })
            }
            DType::F64 => {
                forward_body::<f64>(columns, &gate_up.read()?, &mut output.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, output)?;
            Pretended::new(compute, OP).reads(dtype, [gate_up])?.writes(dtype, [output])?;
            Ok(())
        }
    }
}

multiversion! {
    fn forward_f32(columns: usize, gate_up: &[f32], y: &mut [f32]) = forward_body
}

#[inline(always)]
fn forward_body<T: Real>(columns: usize, gate_up: &[T], y: &mut [T]) {
    let one = T::from_f64(1.0);
    for (row, y) in gate_up.chunks_exact(2 * columns.max(1)).zip(y.chunks_exact_mut(columns.max(1)))
    {
        let (gate, up) = row.split_at(columns);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = *g / (one + (-*g).fast_exp()) * *u;
        }
    }
}

/// `d_gate = d_output * up * s * (1 + gate * (1 - s))` and `d_up = d_output * gate * s`, with `s = 1 / (1 + exp(-gate))`. Shapes:
/// gate_up and d_gate_up (n, 2 * columns), d_output (n, columns). f32 and f64; overwrites.
pub fn backward(
    compute: &Compute,
    gate_up: &Tensor,
    d_output: &Tensor,
    d_gate_up: &Tensor,
) -> Result<()> {
    let _time = compute.time("swiglu_backward", [gate_up]);
    let (rows, columns) = sizes(gate_up, d_output, "d_output")?;
    expect_shape(OP, "d_gate_up", d_gate_up.shape(), gate_up.shape())?;
    match compute.device_of(OP, [gate_up, d_output, d_gate_up])? {
        Device::Cpu => match d_output.dtype() {
            DType::F32 => {
                let (x, dy) = (gate_up.read::<f32>()?, d_output.read::<f32>()?);
                let mut dx = d_gate_up.write::<f32>()?;
                let items = batches(compute, &mut dx, 2 * columns, rows);
                compute.threads.for_each(items, |(first, dx)| {
                    let x = &x[2 * columns * first..][..dx.len()];
                    let dy = &dy[columns * first..][..dx.len() / 2];
                    backward_f32(compute.simd, columns, x, dy, dx);
                    Ok(())
                })
            }
            DType::F64 => {
                let (x, dy) = (gate_up.read()?, d_output.read()?);
                backward_body::<f64>(columns, &x, &dy, &mut d_gate_up.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, d_output)?;
            let pretended = Pretended::new(compute, OP).reads(dtype, [gate_up, d_output])?;
            pretended.writes(dtype, [d_gate_up])?;
            Ok(())
        }
    }
}

multiversion! {
    fn backward_f32(columns: usize, gate_up: &[f32], dy: &[f32], dx: &mut [f32]) = backward_body
}

#[inline(always)]
fn backward_body<T: Real>(columns: usize, gate_up: &[T], dy: &[T], dx: &mut [T]) {
    let one = T::from_f64(1.0);
    let (whole, half) = (2 * columns.max(1), columns.max(1));
    let rows = gate_up.chunks_exact(whole).zip(dy.chunks_exact(half));
    for ((row, dy), dx) in rows.zip(dx.chunks_exact_mut(whole)) {
        let ((gate, up), (d_gate, d_up)) = (row.split_at(columns), dx.split_at_mut(columns));
        for j in 0..columns {
            let (g, u, d) = (gate[j], up[j], dy[j]);
            let s = one / (one + (-g).fast_exp());
            d_gate[j] = d * u * s * (one + g * (one - s));
            d_up[j] = d * g * s;
        }
    }
}
