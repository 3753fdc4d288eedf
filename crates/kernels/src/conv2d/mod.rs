//! Two-dimensional convolution of images.
//!
//! `y[n, i, j, o] = b[o] + sum over u, v, c of x[n, i*s + u - p, j*s + v - p, c] * w[u, v, c, o]`
//!
//! with stride `s` and padding `p`, zeros outside the image. This is the cross-correlation that
//! deep-learning frameworks call convolution.
//!
//! Images of either [layout](crate::ImageLayout) are convolved, with the same bits: while an image is prepared, its channels
//! come to lie next to each other, and results go into planes while they are still in the cache.
//!
//! Images are convolved directly, without a matrix of patches: positions are the rows and output
//! channels the columns of register tiles (see `tile`), and the order of loops keeps a panel of weights
//! in the first-level cache (see `direct`). In f32, convolutions of 3x3 with stride 1 and 16 channels or more on both sides, and
//! their gradients of weights with 32 or more, have 16 products instead of 36, by Winograd's minimal filtering F(2x2, 3x3)
//! (see `winograd`), unless [`Conv2d::direct`] is set or the image is small. Only sizes decide, so the bits are those of every
//! processor with fused multiply-add. With numbers between -1 and 1, up to 128 channels and 64 images of 14x14, no result of
//! either form is off by more than 4e-6 of the largest result. The root mean square error is smaller than the direct form's for
//! outputs and gradients of inputs, and up to 2.6 times as large for gradients of weights. Where a number is infinite or NaN, the other results of its
//! squares of 2x2 may become NaN too, and for gradients of weights all those of its channels.
//!
//! Element types: all f32, all f64, or mixed with bf16. The mixed form is chosen by the output (or its gradient): if it is bf16,
//! the input (or its gradient) is bf16 or f32, as the first layer of a network has it, and weight, bias and their gradients are
//! f32. Operands are rounded to bf16 while images and weights are prepared. With AMX their products are computed in its tiles
//! (see `in_tiles`); for gradients of weights, if the stride is 1 and 16 divides the number of input channels, or the kernel has
//! up to 64 weights for an output channel. Otherwise products and sums are those of f32, and take its time: dot products of bf16
//! are not used here. In tiles denormal numbers count as zero, and where an image has infinite numbers or NaN, more gradients of
//! weights than those that it takes part in may become NaN.
//!
//! A card convolves in tiles too, and adds in another order: a result differs from the processor's by at most 1e-6 of the sum
//! of the absolute values of its products (1e-14 in f64), and by one rounding more if it is bf16 or f16. Images of 16 bits are
//! multiplied on tensor cores: their products are exact, and NVIDIA does not say how they round sums. Images of f32 are
//! so too with [`Compute::with_tf32`], if their channels come by vectors; then a result is off by 1e-3 of that sum at most.

pub(crate) mod direct;
mod geometry;
mod in_tiles;
pub(crate) mod input_gradient;
pub(crate) mod prepare;
mod tile;
mod transform;
pub(crate) mod weight_gradient;
mod winograd;

use paceline_memory::Tensor;

use crate::card::conv::CardConv;
use crate::launch::for_images;
use crate::layout::square::{add_positions, positions_to_planes};
use crate::operands::write_or_update;
use crate::simd::vectorized;
use crate::stored::SinglePrecision;
use crate::{Compute, ImageLayout, Op, Result, elementwise, read, reference, scratch, write};
use direct::{ConvProduct, Memory, image_parts};
pub use geometry::Conv2d;
use input_gradient::{InputGradient, copy_images};
use weight_gradient::WeightGradient;

/// Writes the convolution of `input` ([`Conv2d::input_shape`]) with `weight` and `bias` into `output`
/// ([`Conv2d::output_shape`]). f32, f64, or mixed with bf16; overwrites.
pub fn forward(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
) -> Result<()> {
    conv.check()?;
    let (conv, batch) = (*conv, input.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv2d_forward").forward_product(conv.products(batch));
    let product = ConvProduct::new(
        compute.processor().ways(output.dtype()),
        &conv,
        conv.out_height(),
        conv.out_width(),
    );
    let on_card = CardConv::new(compute, op.name, &conv, false, batch)?;
    for_images!(
        compute, op, (input, output),
        (X, S, P) => (
            read::<X>("input", input, conv.input_shape(batch)),
            read::<P>("weight", weight, conv.weight_shape()),
            read::<P>("bias", bias, [conv.c_out]),
            write::<S>("output", output, conv.output_shape(batch)),
        ),
        memory: memory_of(compute, || product.memory(compute.threads(), batch, false)),
        f64: move |_, ((x, w, b, y), _)| {
            reference::conv2d_forward(&conv, x, w, b, y);
            Ok(())
        },
        f32: move |cpu, ((x, w, b, y), memory)| {
            let outputs = image_parts(cpu, y, conv.output_elems());
            let (simd, stride) = (cpu.simd, product.columns.padded);
            let sizes = [conv.output_elems() / conv.c_out, conv.c_out];
            product.forward::<X, S, _>(cpu, (x, w), memory, outputs, |sums, y| {
                match conv.layout {
                    ImageLayout::Nhwc => vectorized!(simd, add_bias::<S>, sums, stride, b, y),
                    ImageLayout::Nchw => {
                        vectorized!(simd, positions_to_planes::<S>, simd, sums, stride, sizes, Some(b), y)
                    }
                }
            });
            Ok(())
        },
        card: move |card, ((x, w, b, y), _)| {
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.forward::<X, S>(card, (x, w, b), y, None) }
        },
    )
}

/// The processor's scratch memory. A card needs none of it.
pub(crate) fn memory_of(compute: &Compute, of_processor: impl FnOnce() -> Memory) -> Memory {
    if compute.is_card() { (scratch(0), scratch(0), scratch(0)) } else { of_processor() }
}

/// `y[i, o] = raw[i, o] + bias[o]`. The rows of `raw` begin `stride` elements after each other.
#[inline(always)]
fn add_bias<S: SinglePrecision>(raw: &[f32], stride: usize, bias: &[f32], y: &mut [S]) {
    for (y, raw) in y.chunks_exact_mut(bias.len()).zip(raw.chunks_exact(stride)) {
        for ((y, raw), b) in y.iter_mut().zip(raw).zip(bias) {
            *y = S::store(raw + b);
        }
    }
}

/// Gradients of weight and bias from `d_output` ([`Conv2d::output_shape`]). Overwrites, or adds to what is
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
    conv.check()?;
    let (conv, batch) = (*conv, input.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv2d_backward_weight").backward_product(conv.products(batch));
    let (rows, positions) = (conv.out_height(), conv.out_width());
    let gradient =
        WeightGradient::new(compute.processor().ways(d_output.dtype()), &conv, rows, positions);
    let on_card = CardConv::new(compute, op.name, &conv, false, batch)?;
    for_images!(
        compute, op, (input, d_output),
        (X, S, P) => (
            read::<X>("input", input, conv.input_shape(batch)),
            read::<S>("d_output", d_output, conv.output_shape(batch)),
            write_or_update::<P>(accumulate, "d_weight", d_weight, conv.weight_shape()),
            write_or_update::<P>(accumulate, "d_bias", d_bias, [conv.c_out]),
            compute.is_card().then(|| scratch::<P>(on_card.scratch_len::<X, S>())),
        ),
        memory: memory_of(compute, || gradient.memory(compute.threads(), batch)),
        f64: move |_, ((x, dy, dw, db, _), _)| {
            if !accumulate {
                dw.fill(0.0);
                db.fill(0.0);
            }
            reference::conv2d_backward_weight(&conv, x, dy, dw, db);
            Ok(())
        },
        f32: move |cpu, ((x, dy, dw, db, _), memory)| {
            let fill = copy_images(cpu.simd, &conv, dy);
            gradient.run::<X, S>(cpu, x, memory, &fill, dw, accumulate);
            if !accumulate {
                db.fill(0.0);
            }
            match conv.layout {
                ImageLayout::Nhwc => elementwise::add_rows(cpu, dy, db, true),
                ImageLayout::Nchw => {
                    let positions = conv.output_elems() / conv.c_out;
                    vectorized!(cpu.simd, add_positions, cpu.simd, dy, None, positions, db);
                }
            }
            Ok(())
        },
        card: move |card, ((x, dy, dw, db, partials), _)| {
            let partials = partials.expect("a card has partial sums");
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.backward_weight::<X, S>(card, (x, dy, None), (dw, db), accumulate, partials) }
        },
    )
}

/// Gradient of the input ([`Conv2d::input_shape`]) from `d_output` ([`Conv2d::output_shape`]). f32, f64, or mixed with
/// bf16; overwrites.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    conv.check()?;
    let (conv, batch) = (*conv, d_output.dims().first().copied().unwrap_or(0));
    let op = Op::new("conv2d_backward_input").backward_product(conv.products(batch));
    let gradient =
        InputGradient::new(compute.processor().ways(d_output.dtype()), &conv, conv.out_height());
    let on_card = CardConv::new(compute, op.name, &conv, false, batch)?;
    for_images!(
        compute, op, (d_input, d_output),
        (X, S, P) => (
            read::<P>("weight", weight, conv.weight_shape()),
            read::<S>("d_output", d_output, conv.output_shape(batch)),
            write::<X>("d_input", d_input, conv.input_shape(batch)),
        ),
        memory: memory_of(compute, || gradient.memory::<X>(compute.threads(), batch)),
        f64: move |_, ((w, dy, dx), _)| {
            reference::conv2d_backward_input(&conv, w, dy, dx);
            Ok(())
        },
        f32: move |cpu, ((w, dy, dx), memory)| {
            gradient.run::<X, S>(cpu, w, memory, &copy_images(cpu.simd, &conv, dy), dx);
            Ok(())
        },
        card: move |card, ((w, dy, dx), _)| {
            // SAFETY: the operands are those of this convolution.
            unsafe { on_card.backward_input::<X, S>(card, (w, dy, None), dx) }
        },
    )
}
