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
mod prepare;
mod tile;
pub(crate) mod weight_gradient;

use paceline_memory::{Shape, Tensor};

use crate::layout::square::{add_positions, positions_to_planes};
use crate::simd::multiversion;
use crate::stored::{SinglePrecision, for_images};
use crate::{Compute, ImageLayout, Op, Result, elementwise, read, reference, update, write};
use direct::{Product, image_parts};
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
    let product = Product::new(compute.simd(), &conv, conv.out_height(), conv.out_width());
    for_images!(
        op.name, (input, output),
        (X, S, P) => (
            read::<X>("input", input, conv.input_shape(batch)),
            read::<P>("weight", weight, conv.weight_shape()),
            read::<P>("bias", bias, [conv.c_out]),
            write::<S>("output", output, conv.output_shape(batch)),
        ),
        f64: |operands| compute.launch(op, operands, move |_, (x, w, b, y)| {
            reference::conv2d_forward(&conv, x, w, b, y);
            Ok(())
        }),
        f32: |operands| {
            let operands = (operands, product.memory(compute.threads(), batch, false));
            compute.launch(op, operands, move |cpu, ((x, w, b, y), memory)| {
                let outputs = image_parts(cpu, y, conv.output_elems());
                let (simd, stride) = (cpu.simd, product.columns.padded);
                let sizes = [conv.output_elems() / conv.c_out, conv.c_out];
                product.forward::<X, S, _>(cpu, (x, w), memory, outputs, |sums, y| {
                    match conv.layout {
                        ImageLayout::Nhwc => add_bias::<S>(simd, sums, stride, b, y),
                        ImageLayout::Nchw => {
                            positions_to_planes::<S>(simd, simd, sums, stride, sizes, Some(b), y)
                        }
                    }
                });
                Ok(())
            })
        },
    )
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
    let gradient = WeightGradient::new(compute.simd(), &conv, rows, positions);
    for_images!(
        op.name, (input, d_output),
        (X, S, P) => {
            let result = if accumulate { update::<P> } else { write::<P> };
            (
                read::<X>("input", input, conv.input_shape(batch)),
                read::<S>("d_output", d_output, conv.output_shape(batch)),
                result("d_weight", d_weight, Shape::from(conv.weight_shape())),
                result("d_bias", d_bias, Shape::from([conv.c_out])),
            )
        },
        f64: |operands| compute.launch(op, operands, move |_, (x, dy, dw, db)| {
            if !accumulate {
                dw.fill(0.0);
                db.fill(0.0);
            }
            reference::conv2d_backward_weight(&conv, x, dy, dw, db);
            Ok(())
        }),
        f32: |operands| {
            let operands = (operands, gradient.memory::<S>(compute.threads(), batch));
            compute.launch(op, operands, move |cpu, ((x, dy, dw, db), memory)| {
                let fill = copy_images(cpu.simd, &conv, dy);
                gradient.run::<X, S>(cpu, x, memory, fill, dw, accumulate);
                if !accumulate {
                    db.fill(0.0);
                }
                match conv.layout {
                    ImageLayout::Nhwc => elementwise::add_rows(cpu.simd, dy, db, true),
                    ImageLayout::Nchw => {
                        let positions = conv.output_elems() / conv.c_out;
                        add_positions(cpu.simd, cpu.simd, dy, None, positions, db);
                    }
                }
                Ok(())
            })
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
    let gradient = InputGradient::new(compute.simd(), &conv, conv.out_height());
    for_images!(
        op.name, (d_input, d_output),
        (X, S, P) => (
            read::<P>("weight", weight, conv.weight_shape()),
            read::<S>("d_output", d_output, conv.output_shape(batch)),
            write::<X>("d_input", d_input, conv.input_shape(batch)),
        ),
        f64: |operands| compute.launch(op, operands, move |_, (w, dy, dx)| {
            reference::conv2d_backward_input(&conv, w, dy, dx);
            Ok(())
        }),
        f32: |operands| {
            let operands = (operands, gradient.memory::<X>(compute.threads(), batch));
            compute.launch(op, operands, move |cpu, ((w, dy, dx), memory)| {
                gradient.run::<X, S>(cpu, w, memory, copy_images(cpu.simd, &conv, dy), dx);
                Ok(())
            })
        },
    )
}
