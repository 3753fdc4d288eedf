//! Convolution, bias, ReLU and 2x2 max-pool as one operation.
//!
//! `y[n, i, j, o] = max(0, b[o] + max over the 2x2 window at (2i, 2j) of conv(x, w)[n, ., ., o])`
//!
//! This is faster than its parts: each image is pooled while its convolution is still in the second-level cache, and
//! positions that no window covers (the last row or column of an odd size) are never computed. The backward pass needs one
//! byte per pooled value: the *winner*, which is the position of the largest of the four values. A NaN in a window becomes
//! the result.
//!
//! Element types are those of [`conv2d`](crate::conv2d): all f32, all f64, or mixed with bf16. The largest value is chosen
//! before it is rounded to bf16.
//!
//! A card is off as for [`conv2d`](crate::conv2d), so among values that are almost equal another one may win.

mod planes;
mod windows;

use paceline_memory::Tensor;

use crate::card::conv::CardConv;
use crate::conv2d::direct::{ConvProduct, image_parts};
use crate::conv2d::input_gradient::InputGradient;
use crate::conv2d::weight_gradient::WeightGradient;
use crate::conv2d::{Conv2d, memory_of};
use crate::launch::for_images;
use crate::layout::square::add_positions;
use crate::operands::write_or_update;
use crate::simd::vectorized;
use crate::{Compute, ImageLayout, KernelError, Op, Result, read, reference, scratch, write};
use windows::{NOTHING, add_won, pool, unpool_images};

/// Shape of a batch of outputs: (n, h' / 2, w' / 2, c_out), rounded down, or (n, c_out, h' / 2, w' / 2).
pub fn output_shape(conv: &Conv2d, batch: usize) -> [usize; 4] {
    conv.layout.shape(batch, pooled_image(conv))
}

/// Height, width and channels of an output image.
fn pooled_image(conv: &Conv2d) -> [usize; 3] {
    [conv.out_height() / 2, conv.out_width() / 2, conv.c_out]
}

/// Checks the geometry: a valid convolution, and at least one window.
pub fn check(conv: &Conv2d) -> Result<()> {
    conv.check()?;
    if conv.out_height() < 2 || conv.out_width() < 2 {
        let (h, w) = (conv.out_height(), conv.out_width());
        let reason = format!("the {h}x{w} image is too small for a 2x2 pool");
        return Err(KernelError::Geometry { op: "conv_relu_pool", reason });
    }
    Ok(())
}

/// Writes `output` and `winners` (u8), both of [`output_shape`], from `input` ([`Conv2d::input_shape`]).
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
    check(conv)?;
    let (conv, batch) = (*conv, input.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv_relu_pool_forward").forward_product(conv.products(batch));
    let [rows, columns, c_out] = pooled_image(&conv);
    let product =
        ConvProduct::new(compute.processor().ways(output.dtype()), &conv, 2 * rows, 2 * columns);
    let on_card = CardConv::new(compute, op.name, &conv, true, batch)?;
    for_images!(
        compute, op, (input, output),
        (X, S, P) => (
            read::<X>("input", input, conv.input_shape(batch)),
            read::<P>("weight", weight, conv.weight_shape()),
            read::<P>("bias", bias, [c_out]),
            write::<S>("output", output, output_shape(&conv, batch)),
            write::<u8>("winners", winners, output_shape(&conv, batch)),
        ),
        memory: memory_of(compute, || product.memory(compute.threads(), batch, false)),
        f64: move |_, ((x, w, b, y, winners), _)| {
            reference::conv_relu_pool_forward(&conv, x, w, b, y, winners);
            Ok(())
        },
        f32: move |cpu, ((x, w, b, y, winners), memory)| {
            let out_elems = rows * columns * c_out;
            let outputs = image_parts(cpu, y, out_elems).into_iter();
            let outputs = outputs.zip(image_parts(cpu, winners, out_elems));
            let outputs = outputs.map(|((first, y), (_, winners))| (first, y.zip(winners)));
            let stride = product.columns.padded;
            let finish = |sums: &[f32], (y, winners): (&mut [S], &mut [u8])| {
                let simd = cpu.simd;
                match conv.layout {
                    ImageLayout::Nhwc => vectorized!(simd, pool::<S>, sums, stride, columns, b, y, winners),
                    ImageLayout::Nchw => {
                        vectorized!(simd, planes::pool::<S>, simd, sums, stride, columns, b, y, winners)
                    }
                }
            };
            product.forward::<X, S, _>(cpu, (x, w), memory, outputs.collect(), finish);
            Ok(())
        },
        card: move |card, ((x, w, b, y, winners), _)| {
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.forward::<X, S>(card, (x, w, b), y, Some(winners)) }
        },
    )
}

/// Gradients of weight and bias from `d_output` ([`output_shape`]). Overwrites, or adds to what
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
    check(conv)?;
    let (conv, batch) = (*conv, input.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv_relu_pool_backward_weight").backward_product(conv.products(batch));
    let [rows, columns, c_out] = pooled_image(&conv);
    let ways = compute.processor().ways(d_output.dtype());
    let gradient = WeightGradient::new(ways, &conv, 2 * rows, 2 * columns);
    let on_card = CardConv::new(compute, op.name, &conv, true, batch)?;
    for_images!(
        compute, op, (input, d_output),
        (X, S, P) => (
            read::<X>("input", input, conv.input_shape(batch)),
            read::<S>("d_output", d_output, output_shape(&conv, batch)),
            read::<u8>("winners", winners, output_shape(&conv, batch)),
            write_or_update::<P>(accumulate, "d_weight", d_weight, conv.weight_shape()),
            write_or_update::<P>(accumulate, "d_bias", d_bias, [c_out]),
            compute.is_card().then(|| scratch::<P>(on_card.scratch_len::<X, S>())),
        ),
        memory: memory_of(compute, || gradient.memory(compute.threads(), batch)),
        f64: move |_, ((x, dy, winners, dw, db, _), _)| {
            if !accumulate {
                dw.fill(0.0);
                db.fill(0.0);
            }
            let full = reference::unpool(&conv, dy, winners);
            reference::conv2d_backward_weight(&conv, x, &full, dw, db);
            Ok(())
        },
        f32: move |cpu, ((x, dy, winners, dw, db, _), memory)| {
            let fill = unpool_images(cpu.simd, &conv, dy, winners);
            gradient.run::<X, S>(cpu, x, memory, &fill, dw, accumulate);
            if !accumulate {
                db.fill(0.0);
            }
            match conv.layout {
                ImageLayout::Nhwc => vectorized!(cpu.simd, add_won::<S>, dy, winners, db),
                ImageLayout::Nchw => {
                    let (cut, windows) = (Some((winners, NOTHING)), rows * columns);
                    vectorized!(cpu.simd, add_positions, cpu.simd, dy, cut, windows, db);
                }
            }
            Ok(())
        },
        card: move |card, ((x, dy, winners, dw, db, partials), _)| {
            let (read, partials) = ((x, dy, Some(winners)), partials.expect("a card has them"));
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.backward_weight::<X, S>(card, read, (dw, db), accumulate, partials) }
        },
    )
}

/// Gradient of the input ([`Conv2d::input_shape`]) from `d_output` ([`output_shape`]). f32, f64, or mixed with bf16;
/// overwrites.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    winners: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    check(conv)?;
    let (conv, batch) = (*conv, d_output.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv_relu_pool_backward_input").backward_product(conv.products(batch));
    let [rows, ..] = pooled_image(&conv);
    let gradient = InputGradient::new(compute.processor().ways(d_output.dtype()), &conv, 2 * rows);
    let on_card = CardConv::new(compute, op.name, &conv, true, batch)?;
    for_images!(
        compute, op, (d_input, d_output),
        (X, S, P) => (
            read::<P>("weight", weight, conv.weight_shape()),
            read::<S>("d_output", d_output, output_shape(&conv, batch)),
            read::<u8>("winners", winners, output_shape(&conv, batch)),
            write::<X>("d_input", d_input, conv.input_shape(batch)),
        ),
        memory: memory_of(compute, || gradient.memory::<X>(compute.threads(), batch)),
        f64: move |_, ((w, dy, winners, dx), _)| {
            let full = reference::unpool(&conv, dy, winners);
            reference::conv2d_backward_input(&conv, w, &full, dx);
            Ok(())
        },
        f32: move |cpu, ((w, dy, winners, dx), memory)| {
            let fill = unpool_images(cpu.simd, &conv, dy, winners);
            gradient.run::<X, S>(cpu, w, memory, &fill, dx);
            Ok(())
        },
        card: move |card, ((w, dy, winners, dx), _)| {
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.backward_input::<X, S>(card, (w, dy, Some(winners)), dx) }
        },
    )
}
