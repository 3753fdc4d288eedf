//! Convolution, bias, ReLU and 2x2 max-pool as one operation.
//!
//! `y[n, i, j, o] = max(0, b[o] + max over the 2x2 window at (2i, 2j) of conv(x, w)[n, ., ., o])`
//!
//! This is faster than its parts for two reasons. Each image is pooled while its convolution is still
//! in the second-level cache. Positions that no window covers (the last row or column of an odd size)
//! are never computed. The backward pass needs one byte per pooled value: the *winner*, which is the
//! position of the largest of the four values. A NaN in a window becomes the result.

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::conv2d::direct::{Grid, InputGradient, Product, WeightGradient};
use crate::conv2d::prepare::PaddedImage;
use crate::conv2d::{self, Conv2d};
use crate::error::expect_shape;
use crate::meta::{self, Pretended};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Result, reference};

const OP: &str = "conv_relu_pool";

/// The value of a winner if ReLU has set the result to zero.
const NOTHING: u8 = 4;

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
/// f32 and f64; overwrites.
pub fn forward(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
    winners: &Tensor,
) -> Result<()> {
    let _time = compute.time("conv_relu_pool_forward", [input, weight]);
    check(conv)?;
    let batch = conv.check_operands(OP, input, weight, bias)?;
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    expect_shape(OP, "output", output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    match compute.device_of(OP, [input, weight, bias, output, winners])? {
        Device::Cpu => match input.dtype() {
            DType::F32 => {
                let (x, b) = (input.read::<f32>()?, bias.read::<f32>()?);
                let w = weight.read()?;
                let product = Product::forward_part(compute, conv, &w, 2 * rows, 2 * columns)?;
                let (in_elems, out_elems) = (conv.input_elems(), rows * columns * c_out);
                let (mut y, mut winners) = (output.write::<f32>()?, winners.write::<u8>()?);
                let outputs = batches(compute, &mut y, out_elems, batch);
                let winners = batches(compute, &mut winners, out_elems, batch);
                let items = outputs.into_iter().zip(winners).collect();
                compute.threads.for_each(items, |((first, y), (_, winners))| {
                    let mut padded = PaddedImage::new(compute, conv)?;
                    let mut raw = compute.scratch(product.output_elems())?;
                    let images =
                        y.chunks_exact_mut(out_elems).zip(winners.chunks_exact_mut(out_elems));
                    for (n, (y, winners)) in images.enumerate() {
                        let at = (first + n) * in_elems;
                        padded.fill(compute.simd, &x[at..at + in_elems]);
                        product.run(compute.simd, padded.elems(), &mut raw);
                        let stride = product.columns.padded;
                        pool(compute.simd, &raw, stride, columns, &b, y, winners);
                    }
                    Ok(())
                })
            }
            DType::F64 => {
                let (x, w, b) = (input.read()?, weight.read()?, bias.read()?);
                let (mut y, mut winners) = (output.write()?, winners.write()?);
                reference::conv_relu_pool_forward::<f64>(conv, &x, &w, &b, &mut y, &mut winners);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, input)?;
            let mut pretended = Pretended::new(compute, OP)
                .reads(dtype, [input, weight, bias])?
                .writes(dtype, [output])?;
            pretended = pretended.writes(DType::U8, [winners])?;
            if dtype == DType::F32 {
                conv2d::meta::forward(
                    &mut pretended,
                    compute,
                    conv,
                    (2 * rows, 2 * columns),
                    batch,
                )?;
            }
            Ok(())
        }
    }
}

/// Gradients of weight and bias from `d_output` (n, h'/2, w'/2, c_out). Overwrites, or adds to what
/// is there if `accumulate`. f32 and f64.
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
    let _time = compute.time("conv_relu_pool_backward_weight", [input, d_output]);
    check(conv)?;
    let batch = conv.check_operands(OP, input, d_weight, d_bias)?;
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    expect_shape(OP, "d_output", d_output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    match compute.device_of(OP, [input, winners, d_output, d_weight, d_bias])? {
        Device::Cpu => match input.dtype() {
            DType::F32 => {
                let (x, dy) = (input.read::<f32>()?, d_output.read::<f32>()?);
                let winners = winners.read::<u8>()?;
                let (in_elems, out_elems) = (conv.input_elems(), rows * columns * c_out);
                WeightGradient::new(compute, conv, 2 * rows, 2 * columns).run(
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
                add_won(compute.simd, &dy, &winners, &mut db);
                Ok(())
            }
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
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, input)?;
            let mut pretended = Pretended::new(compute, OP)
                .reads(dtype, [input, d_output])?
                .writes(dtype, [d_weight])?;
            pretended = pretended.reads(DType::U8, [winners])?;
            if dtype == DType::F32 {
                let grid = (2 * rows, 2 * columns);
                conv2d::meta::backward_weight(&mut pretended, compute, conv, grid, batch)?;
            }
            pretended.writes(dtype, [d_bias])?;
            Ok(())
        }
    }
}

/// Gradient of the input (n, h, w, c_in) from `d_output` (n, h'/2, w'/2, c_out). Overwrites. f32
/// and f64.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    winners: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time("conv_relu_pool_backward_input", [weight, d_output]);
    check(conv)?;
    let batch = d_output.dims().first().copied().unwrap_or(0);
    let [_, rows, columns, c_out] = output_shape(conv, batch);
    expect_shape(OP, "weight", weight.shape(), conv.weight_shape())?;
    expect_shape(OP, "d_output", d_output.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "winners", winners.shape(), output_shape(conv, batch))?;
    expect_shape(OP, "d_input", d_input.shape(), conv.input_shape(batch))?;
    match compute.device_of(OP, [weight, winners, d_output, d_input])? {
        Device::Cpu => match d_output.dtype() {
            DType::F32 => {
                let (dy, winners) = (d_output.read::<f32>()?, winners.read::<u8>()?);
                let out_elems = rows * columns * c_out;
                InputGradient::new(compute, conv, 2 * rows, &weight.read()?)?.run(
                    compute,
                    |n, grid| {
                        let image = n * out_elems..(n + 1) * out_elems;
                        let (dy, winners) = (&dy[image.clone()], &winners[image]);
                        unpool_into(compute, grid, columns, c_out, dy, winners);
                    },
                    &mut d_input.write()?,
                )
            }
            DType::F64 => {
                let (w, dy, winners) = (weight.read()?, d_output.read()?, winners.read()?);
                let full = reference::unpool::<f64>(conv, &dy, &winners);
                reference::conv2d_backward_input::<f64>(conv, &w, &full, &mut d_input.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, d_output)?;
            let mut pretended = Pretended::new(compute, OP)
                .reads(dtype, [weight, d_output])?
                .writes(dtype, [d_input])?;
            pretended = pretended.reads(DType::U8, [winners])?;
            if dtype == DType::F32 {
                conv2d::meta::backward_input(&mut pretended, compute, conv, 2 * rows, batch)?;
            }
            Ok(())
        }
    }
}

fn unpool_into(
    compute: &Compute,
    grid: Grid<'_>,
    columns: usize,
    channels: usize,
    dy: &[f32],
    winners: &[u8],
) {
    let Grid { elems, row_stride, position_stride } = grid;
    unpool(compute.simd, dy, winners, columns, channels, elems, row_stride, position_stride);
}

multiversion! {
    /// Pools `raw` (2 rows, 2 columns, stride), adds the bias and applies ReLU.
    fn pool(
        raw: &[f32],
        stride: usize,
        columns: usize,
        bias: &[f32],
        y: &mut [f32],
        winners: &mut [u8],
    ) = pool_body
}

#[inline(always)]
fn pool_body(
    raw: &[f32],
    stride: usize,
    columns: usize,
    bias: &[f32],
    y: &mut [f32],
    winners: &mut [u8],
) {
    let channels = bias.len();
    let positions = y.chunks_exact_mut(channels).zip(winners.chunks_exact_mut(channels));
    for (position, (y, winners)) in positions.enumerate() {
        let (i, j) = (position / columns, position % columns);
        let top = &raw[(2 * i * 2 * columns + 2 * j) * stride..];
        let bottom = &raw[((2 * i + 1) * 2 * columns + 2 * j) * stride..];
        let (a, b) = (&top[..channels], &top[stride..stride + channels]);
        let (c, d) = (&bottom[..channels], &bottom[stride..stride + channels]);
        for o in 0..channels {
            let (mut most, mut winner) = (a[o], 0u8);
            for (candidate, at) in [(b[o], 1u8), (c[o], 2), (d[o], 3)] {
                let wins = candidate > most || candidate.is_nan();
                most = if wins { candidate } else { most };
                winner = if wins { at } else { winner };
            }
            let sum = most + bias[o];
            let passes = sum > 0.0 || sum.is_nan();
            y[o] = if passes { sum } else { 0.0 };
            winners[o] = if passes { winner } else { NOTHING };
        }
    }
}

multiversion! {
    /// Writes all four positions of every window: the gradient for the winner, zero for the others.
    fn unpool(
        dy: &[f32],
        winners: &[u8],
        columns: usize,
        channels: usize,
        elems: &mut [f32],
        row_stride: usize,
        position_stride: usize,
    ) = unpool_body
}

#[inline(always)]
fn unpool_body(
    dy: &[f32],
    winners: &[u8],
    columns: usize,
    channels: usize,
    elems: &mut [f32],
    row_stride: usize,
    position_stride: usize,
) {
    let positions = dy.chunks_exact(channels).zip(winners.chunks_exact(channels));
    for (position, (dy, winners)) in positions.enumerate() {
        let (i, j) = (position / columns, position % columns);
        for at in 0..4u8 {
            let (row, column) = (2 * i + usize::from(at / 2), 2 * j + usize::from(at % 2));
            let to = &mut elems[row * row_stride + column * position_stride..][..channels];
            for ((to, dy), winner) in to.iter_mut().zip(dy).zip(winners) {
                *to = if *winner == at { *dy } else { 0.0 };
            }
        }
    }
}

multiversion! {
    /// Adds to `db` the gradients of positive outputs, position by position.
    fn add_won(dy: &[f32], winners: &[u8], db: &mut [f32]) = add_won_body
}

#[inline(always)]
fn add_won_body(dy: &[f32], winners: &[u8], db: &mut [f32]) {
    let channels = db.len();
    for (dy, winners) in dy.chunks_exact(channels).zip(winners.chunks_exact(channels)) {
        for ((db, dy), winner) in db.iter_mut().zip(dy).zip(winners) {
            *db += if *winner == NOTHING { 0.0 } else { *dy };
        }
    }
}
