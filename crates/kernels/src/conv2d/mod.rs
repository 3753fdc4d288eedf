//! Two-dimensional convolution of NHWC images.
//!
//! `y[n, i, j, o] = b[o] + sum over u, v, c of x[n, i*s + u - p, j*s + v - p, c] * w[u, v, c, o]`
//!
//! with stride `s` and padding `p`, zeros outside the image. This is the cross-correlation that
//! deep-learning frameworks call convolution.
//!
//! Images are convolved directly, without a matrix of patches: positions are the rows and output
//! channels the columns of register tiles (see `tile`), and the order of loops keeps a panel of weights
//! in the first-level cache (see `direct`).
//!
//! Element types: all f32, all f64, or mixed with bf16. The mixed form is chosen by the output (or its gradient): if it is
//! bf16, the input (or its gradient) is bf16 or f32, as the first layer of a network has it, and weight, bias and their
//! gradients are f32. Operands are rounded to bf16 while images and weights are prepared. Products and sums are those of
//! f32 with the same instructions, so they take the time of f32: dot products of bf16, which some processors have, are not
//! used here.

pub(crate) mod direct;
mod geometry;
pub(crate) mod input_gradient;
pub(crate) mod meta;
pub(crate) mod prepare;
mod tile;
pub(crate) mod weight_gradient;

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::MetaScratch;
use crate::simd::multiversion;
use crate::stored::{SinglePrecision, for_images};
use crate::{Compute, Result, elementwise, reference, stored};
use direct::{Columns, Product};
pub use geometry::Conv2d;
use input_gradient::InputGradient;
use prepare::PaddedImage;
use weight_gradient::WeightGradient;

/// Writes the convolution of `input` (n, h, w, c_in) with `weight` and `bias` into `output` (n, h',
/// w', c_out). f32, f64, or mixed with bf16; overwrites.
pub fn forward(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("conv2d_forward", [input, weight]);
    let op = "conv2d";
    let batch = conv.check_operands(op, input, weight, bias)?;
    expect_shape(op, "output", output.shape(), conv.output_shape(batch))?;
    match compute.device_of(op, [input, weight, bias, output])? {
        Device::Cpu => match input.dtype() {
            DType::F64 => {
                let (x, w, b) = (input.read()?, weight.read()?, bias.read()?);
                reference::conv2d_forward::<f64>(conv, &x, &w, &b, &mut output.write()?);
                Ok(())
            }
            _ => for_images!(op, (input, output), (X, S) => {
                let operands = (input, weight, bias);
                forward_of::<X, S>(compute, conv, batch, operands, output)
            }),
        },
        Device::Meta => {
            compute.count_products(conv.products(batch));
            let (outer, inner, params) = stored::image_types(op, input, output)?;
            let mut pretended = MetaScratch::new(compute, op)
                .reads(outer, [input])?
                .reads(params, [weight, bias])?
                .writes(inner, [output])?;
            if params == DType::F32 {
                let grid = (conv.out_height(), conv.out_width());
                self::meta::forward(&mut pretended, compute, conv, grid, batch)?;
            }
            Ok(())
        }
    }
}

fn forward_of<X: SinglePrecision, S: SinglePrecision>(
    compute: &Compute,
    conv: &Conv2d,
    batch: usize,
    (input, weight, bias): (&Tensor, &Tensor, &Tensor),
    output: &Tensor,
) -> Result<()> {
    let (x, b) = (input.read::<X>()?, bias.read::<f32>()?);
    let product = Product::forward::<S>(compute, conv, &weight.read()?)?;
    let mut y = output.write::<S>()?;
    let (in_elems, out_elems) = (conv.input_elems(), conv.output_elems());
    let items = batches(compute, &mut y, out_elems, batch);
    compute.threads.for_each(items, |(first, y)| {
        let mut padded = PaddedImage::new(compute, conv)?;
        let mut raw = compute.scratch(product.output_elems())?;
        for (n, y) in y.chunks_exact_mut(out_elems).enumerate() {
            let at = (first + n) * in_elems;
            padded.fill::<X, S>(compute.simd, &x[at..at + in_elems]);
            product.run(compute.simd, padded.elems(), &mut raw);
            add_bias::<S>(compute.simd, &raw, product.columns.padded, &b, y);
        }
        Ok(())
    })
}

multiversion! {
    /// `y[i, o] = raw[i, o] + bias[o]`. The rows of `raw` begin `stride` elements after each other.
    fn add_bias<S: SinglePrecision>(raw: &[f32], stride: usize, bias: &[f32], y: &mut [S]) = add_bias_body
}

#[inline(always)]
fn add_bias_body<S: SinglePrecision>(raw: &[f32], stride: usize, bias: &[f32], y: &mut [S]) {
    for (y, raw) in y.chunks_exact_mut(bias.len()).zip(raw.chunks_exact(stride)) {
        for ((y, raw), b) in y.iter_mut().zip(raw).zip(bias) {
            *y = S::store(raw + b);
        }
    }
}

/// Gradients of weight and bias from `d_output` (n, h', w', c_out). Overwrites, or adds to what is
/// there if `accumulate`. f32, f64, or mixed with bf16.
pub fn backward_weight(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    d_output: &Tensor,
    d_weight: &Tensor,
    d_bias: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time_old("conv2d_backward_weight", [input, d_output]);
    let op = "conv2d backward";
    let batch = conv.check_operands(op, input, d_weight, d_bias)?;
    expect_shape(op, "d_output", d_output.shape(), conv.output_shape(batch))?;
    match compute.device_of(op, [input, d_output, d_weight, d_bias])? {
        Device::Cpu => match input.dtype() {
            DType::F64 => {
                let (x, dy) = (input.read()?, d_output.read()?);
                let (mut dw, mut db) = (d_weight.write()?, d_bias.write()?);
                if !accumulate {
                    dw.fill(0.0);
                    db.fill(0.0);
                }
                reference::conv2d_backward_weight::<f64>(conv, &x, &dy, &mut dw, &mut db);
                Ok(())
            }
            _ => for_images!(op, (input, d_output), (X, S) => {
                let (x, dy) = (input.read::<X>()?, d_output.read::<S>()?);
                let (in_elems, out_elems) = (conv.input_elems(), conv.output_elems());
                let gradient =
                    WeightGradient::new(compute, conv, conv.out_height(), conv.out_width());
                gradient.run::<X, S>(
                    compute,
                    batch,
                    |n| &x[n * in_elems..(n + 1) * in_elems],
                    |n, mut grid| {
                        let dy = &dy[n * out_elems..(n + 1) * out_elems];
                        grid.copy_from(dy, conv.out_width(), conv.c_out);
                    },
                    &mut d_weight.write()?,
                    accumulate,
                )?;
                let mut db = d_bias.write::<f32>()?;
                elementwise::add_rows(compute.simd, &dy, &mut db, accumulate);
                Ok(())
            }),
        },
        Device::Meta => {
            compute.count_backward(conv.products(batch));
            let (outer, inner, params) = stored::image_types(op, input, d_output)?;
            let mut pretended = MetaScratch::new(compute, op)
                .reads(outer, [input])?
                .reads(inner, [d_output])?
                .writes(params, [d_weight, d_bias])?;
            if params == DType::F32 {
                let grid = (conv.out_height(), conv.out_width());
                self::meta::backward_weight(&mut pretended, compute, conv, grid, (batch, inner))?;
            }
            Ok(())
        }
    }
}

/// Gradient of the input (n, h, w, c_in) from `d_output` (n, h', w', c_out). f32, f64, or mixed with bf16;
/// overwrites.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("conv2d_backward_input", [weight, d_output]);
    let op = "conv2d backward";
    conv.check()?;
    let batch = d_output.dims().first().copied().unwrap_or(0);
    expect_shape(op, "weight", weight.shape(), conv.weight_shape())?;
    expect_shape(op, "d_output", d_output.shape(), conv.output_shape(batch))?;
    expect_shape(op, "d_input", d_input.shape(), conv.input_shape(batch))?;
    match compute.device_of(op, [weight, d_output, d_input])? {
        Device::Cpu => match d_output.dtype() {
            DType::F64 => {
                let (w, dy) = (weight.read()?, d_output.read()?);
                reference::conv2d_backward_input::<f64>(conv, &w, &dy, &mut d_input.write()?);
                Ok(())
            }
            _ => for_images!(op, (d_input, d_output), (X, S) => {
                let dy = d_output.read::<S>()?;
                let out_elems = conv.output_elems();
                let (live_rows, weight) = (conv.out_height(), weight.read()?);
                InputGradient::new::<S>(compute, conv, live_rows, &weight)?.run::<X>(
                    compute,
                    |n, mut grid| {
                        let dy = &dy[n * out_elems..(n + 1) * out_elems];
                        grid.copy_from(dy, conv.out_width(), conv.c_out);
                    },
                    &mut d_input.write()?,
                )
            }),
        },
        Device::Meta => {
            compute.count_backward(conv.products(batch));
            let (outer, inner, params) = stored::image_types(op, d_input, d_output)?;
            let mut pretended = MetaScratch::new(compute, op)
                .reads(params, [weight])?
                .reads(inner, [d_output])?
                .writes(outer, [d_input])?;
            if params == DType::F32 {
                let live_rows = conv.out_height();
                self::meta::backward_input(
                    &mut pretended,
                    compute,
                    conv,
                    live_rows,
                    (batch, outer),
                )?;
            }
            Ok(())
        }
    }
}

/// How the output channels of a product are distributed over vector registers at this level.
pub(crate) fn columns_for(compute: &Compute, channels: usize) -> Columns {
    Columns::new(compute.simd, channels)
}
