//! Convolution, bias, ReLU and 2x2 max-pool as one operation.
//!
//! `y[n, i, j, o] = max(0, b[o] + max over the 2x2 window at (2i, 2j) of conv(x, w)[n, ., ., o])`
//!
//! This is faster than its parts for two reasons. Each image is pooled while its convolution is still
//! in the second-level cache. Positions that no window covers (the last row or column of an odd size)
//! are never computed. The backward pass needs one byte per pooled value: the *winner*, which is the
//! position of the largest of the four values. A NaN in a window becomes the result.
//!
//! Element types are those of [`conv2d`]: all f32, all f64, or mixed with bf16. The largest value is chosen
//! before it is rounded to bf16.

mod windows;

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::conv2d::direct::Product;
use crate::conv2d::input_gradient::InputGradient;
use crate::conv2d::prepare::PaddedImage;
use crate::conv2d::weight_gradient::WeightGradient;
use crate::conv2d::{self, Conv2d};
use crate::error::expect_shape;
use crate::meta::MetaScratch;
use crate::stored::{SinglePrecision, for_images};
use crate::{Compute, KernelError, Result, reference, stored};
use windows::{add_won, pool, unpool_into};

const OP: &str = "conv_relu_pool";

/// Shape of a batch of outputs: (n, h' / 2, w' / 2, c_out), rounded down.
pub fn output_shape(conv: &Conv2d, batch: usize) -> [usize; 4] {
    [batch, conv.out_height() / 2, conv.out_width() / 2, conv.c_out]
}

/// Checks the geometry: a valid convolution, and at least one window.
pub fn check(conv: &Conv2d) -> Result<()> {
    conv.check()?;
    if conv.out_height() < 2 || conv.out_width() < 2 {
        let (h, w) = (conv.out_height(), conv.out_width());
        let reason = format!("the {h}x{w} image is too small for a 2x2 pool");
        return Err(KernelError::Geometry { op: OP, reason });
    }
    Ok(())
}

/// Writes `output` and `winners` (u8), both (n, h'/2, w'/2, c_out), from `input` (n, h, w, c_in).
/// f32, f64, or mixed with bf16; overwrites.
pub fn forward(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
    winners: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("conv_relu_pool_forward", [input, weight]);
    check(conv)?;
    let batch = conv.check_operands(OP, input, weight, bias)?;
    expect_shape(OP, "output", output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    match compute.device_of(OP, [input, weight, bias, output, winners])? {
        Device::Cpu => match input.dtype() {
            DType::F64 => {
                let (x, w, b) = (input.read()?, weight.read()?, bias.read()?);
                let (mut y, mut winners) = (output.write()?, winners.write()?);
                reference::conv_relu_pool_forward::<f64>(conv, &x, &w, &b, &mut y, &mut winners);
                Ok(())
            }
            _ => for_images!(OP, (input, output), (X, S) => {
                let operands = (input, weight, bias);
                forward_of::<X, S>(compute, conv, batch, operands, (output, winners))
            }),
        },
        Device::Meta => {
            compute.count_products(conv.products(batch));
            let (outer, inner, params) = stored::image_types(OP, input, output)?;
            let mut pretended = MetaScratch::new(compute, OP)
                .reads(outer, [input])?
                .reads(params, [weight, bias])?
                .writes(inner, [output])?
                .writes(DType::U8, [winners])?;
            if params == DType::F32 {
                let [_, rows, columns, _] = output_shape(conv, batch);
                let grid = (2 * rows, 2 * columns);
                conv2d::meta::forward(&mut pretended, compute, conv, grid, batch)?;
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
    (output, winners): (&Tensor, &Tensor),
) -> Result<()> {
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    let (x, b) = (input.read::<X>()?, bias.read::<f32>()?);
    let product =
        Product::forward_part::<S>(compute, conv, &weight.read()?, 2 * rows, 2 * columns)?;
    let (in_elems, out_elems) = (conv.input_elems(), rows * columns * c_out);
    let (mut y, mut winners) = (output.write::<S>()?, winners.write::<u8>()?);
    let outputs = batches(compute, &mut y, out_elems, batch);
    let winners = batches(compute, &mut winners, out_elems, batch);
    let items = outputs.into_iter().zip(winners).collect();
    compute.threads.for_each(items, |((first, y), (_, winners))| {
        let mut padded = PaddedImage::new(compute, conv)?;
        let mut raw = compute.scratch(product.output_elems())?;
        let images = y.chunks_exact_mut(out_elems).zip(winners.chunks_exact_mut(out_elems));
        for (n, (y, winners)) in images.enumerate() {
            let at = (first + n) * in_elems;
            padded.fill::<X, S>(compute.simd, &x[at..at + in_elems]);
            product.run(compute.simd, padded.elems(), &mut raw);
            let stride = product.columns.padded;
            pool::<S>(compute.simd, &raw, stride, columns, &b, y, winners);
        }
        Ok(())
    })
}

/// Gradients of weight and bias from `d_output` (n, h'/2, w'/2, c_out). Overwrites, or adds to what
/// is there if `accumulate`. f32, f64, or mixed with bf16.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn backward_weight(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    winners: &Tensor,
    d_output: &Tensor,
    d_weight: &Tensor,
    d_bias: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time_old("conv_relu_pool_backward_weight", [input, d_output]);
    check(conv)?;
    let batch = conv.check_operands(OP, input, d_weight, d_bias)?;
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    expect_shape(OP, "d_output", d_output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    match compute.device_of(OP, [input, winners, d_output, d_weight, d_bias])? {
        Device::Cpu => match input.dtype() {
            DType::F64 => {
                let (x, dy, winners) = (input.read()?, d_output.read()?, winners.read()?);
                let (mut dw, mut db) = (d_weight.write()?, d_bias.write()?);
                if !accumulate {
                    dw.fill(0.0);
                    db.fill(0.0);
                }
                let full = reference::unpool::<f64>(conv, &dy, &winners);
                reference::conv2d_backward_weight::<f64>(conv, &x, &full, &mut dw, &mut db);
                Ok(())
            }
            _ => for_images!(OP, (input, d_output), (X, S) => {
                let (x, dy) = (input.read::<X>()?, d_output.read::<S>()?);
                let winners = winners.read::<u8>()?;
                let (in_elems, out_elems) = (conv.input_elems(), rows * columns * c_out);
                WeightGradient::new(compute, conv, 2 * rows, 2 * columns).run::<X, S>(
                    compute,
                    batch,
                    |n| &x[n * in_elems..(n + 1) * in_elems],
                    |n, grid| {
                        let image = n * out_elems..(n + 1) * out_elems;
                        let (dy, winners) = (&dy[image.clone()], &winners[image]);
                        unpool_into(compute, grid, columns, c_out, dy, winners);
                    },
                    &mut d_weight.write()?,
                    accumulate,
                )?;
                let mut db = d_bias.write::<f32>()?;
                if !accumulate {
                    db.fill(0.0);
                }
                add_won::<S>(compute.simd, &dy, &winners, &mut db);
                Ok(())
            }),
        },
        Device::Meta => {
            compute.count_backward(conv.products(batch));
            let (outer, inner, params) = stored::image_types(OP, input, d_output)?;
            let mut pretended = MetaScratch::new(compute, OP)
                .reads(outer, [input])?
                .reads(inner, [d_output])?
                .reads(DType::U8, [winners])?
                .writes(params, [d_weight])?;
            if params == DType::F32 {
                let grid = (2 * rows, 2 * columns);
                conv2d::meta::backward_weight(&mut pretended, compute, conv, grid, (batch, inner))?;
            }
            pretended.writes(params, [d_bias])?;
            Ok(())
        }
    }
}

/// Gradient of the input (n, h, w, c_in) from `d_output` (n, h'/2, w'/2, c_out). f32, f64, or mixed with bf16;
/// overwrites.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    winners: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("conv_relu_pool_backward_input", [weight, d_output]);
    check(conv)?;
    let batch = d_output.dims().first().copied().unwrap_or(0);
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    expect_shape(OP, "weight", weight.shape(), conv.weight_shape())?;
    expect_shape(OP, "d_output", d_output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "d_input", d_input.shape(), conv.input_shape(batch))?;
    match compute.device_of(OP, [weight, winners, d_output, d_input])? {
        Device::Cpu => match d_output.dtype() {
            DType::F64 => {
                let (w, dy, winners) = (weight.read()?, d_output.read()?, winners.read()?);
                let full = reference::unpool::<f64>(conv, &dy, &winners);
                reference::conv2d_backward_input::<f64>(conv, &w, &full, &mut d_input.write()?);
                Ok(())
            }
            _ => for_images!(OP, (d_input, d_output), (X, S) => {
                let (dy, winners) = (d_output.read::<S>()?, winners.read::<u8>()?);
                let out_elems = rows * columns * c_out;
                InputGradient::new::<S>(compute, conv, 2 * rows, &weight.read()?)?.run::<X>(
                    compute,
                    |n, grid| {
                        let image = n * out_elems..(n + 1) * out_elems;
                        let (dy, winners) = (&dy[image.clone()], &winners[image]);
                        unpool_into(compute, grid, columns, c_out, dy, winners);
                    },
                    &mut d_input.write()?,
                )
            }),
        },
        Device::Meta => {
            compute.count_backward(conv.products(batch));
            let (outer, inner, params) = stored::image_types(OP, d_input, d_output)?;
            let mut pretended = MetaScratch::new(compute, OP)
                .reads(params, [weight])?
                .reads(inner, [d_output])?
                .reads(DType::U8, [winners])?
                .writes(outer, [d_input])?;
            if params == DType::F32 {
                let live_rows = 2 * rows;
                conv2d::meta::backward_input(
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
