//! The gradient of a convolution's input, and how gradients of the output are laid out for the register tiles.
//!
//! In: gradients of the output, and weights. Out: the gradient of the input. Order of summation: kernel row, then kernel
//! column, then channel of the output.

use paceline_memory::DType;

use super::direct::{Columns, Product};
use super::prepare::Reading;
use super::{Conv2d, columns_for};
use crate::compute::batches;
use crate::simd::multiversion;
use crate::stored::{SinglePrecision, operand};
use crate::{Compute, Result};

/// A rectangle of positions in a larger array, `channels` contiguous values at each.
pub(crate) struct Grid<'a> {
    /// The memory, which begins with the first position.
    pub(crate) elems: &'a mut [f32],
    /// Elements from one row to the next.
    pub(crate) row_stride: usize,
    /// Elements from one position of a row to the next.
    pub(crate) position_stride: usize,
}

impl Grid<'_> {
    /// Copies `d_output` (h', w', channels) into the rectangle.
    pub(crate) fn copy_from<S: SinglePrecision>(
        &mut self,
        d_output: &[S],
        width: usize,
        channels: usize,
    ) {
        for (position, from) in d_output.chunks_exact(channels).enumerate() {
            let (i, j) = (position / width, position % width);
            let at = i * self.row_stride + j * self.position_stride;
            let to = &mut self.elems[at..at + channels];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.load());
        }
    }
}

/// The gradient of the input: a convolution of the output's gradient, spread out by the stride and with
/// a border of zeros, with the weights rotated by 180 degrees.
pub(crate) struct InputGradient<'a> {
    conv: &'a Conv2d,
    product: Product,
}

impl<'a> InputGradient<'a> {
    /// For output gradients whose rows from `live_rows` on are zero. Rounds the weights to `S`.
    pub(crate) fn new<S: SinglePrecision>(
        compute: &Compute,
        conv: &'a Conv2d,
        live_rows: usize,
        weight: &[f32],
    ) -> Result<Self> {
        let Conv2d { height, width, c_in, c_out, kernel: (kh, kw), .. } = *conv;
        let (reading, columns) = Self::plan(compute, conv, live_rows);
        let turned = |k: usize, c: usize| {
            let (u, v, o) = (k / c_out / kw, k / c_out % kw, k % c_out);
            let at = (((kh - 1 - u) * kw + (kw - 1 - v)) * c_in + c) * c_out + o;
            operand::<f32, S>(weight[at])
        };
        let product = Product::new(compute, reading, columns, height, width, turned)?;
        Ok(Self { conv, product })
    }

    /// How the output's gradient is read and the input's gradient is written.
    pub(crate) fn plan(compute: &Compute, conv: &Conv2d, live_rows: usize) -> (Reading, Columns) {
        let Conv2d { height, width, c_in, c_out, kernel: (kh, kw), .. } = *conv;
        let first = kh - 1 - conv.padding;
        let live = (first, first + (live_rows - 1) * conv.stride + 1);
        let (rows, columns) = (height + kh - 1, width + kw - 1);
        let reading = Reading::padded(rows, columns, c_out, conv.kernel, 1, live);
        (reading, columns_for(compute, c_in))
    }

    /// Elements of one image's result if its columns are padded or it is rounded; zero if the result is written in place.
    pub(crate) fn raw_elems(conv: &Conv2d, columns: &Columns, d_input: DType) -> usize {
        match columns.padded == conv.c_in && d_input == DType::F32 {
            true => 0,
            false => conv.height * conv.width * columns.padded,
        }
    }

    /// Writes `d_input` (n, h, w, c_in). `fill(n, grid)` writes the gradients of image `n` into a grid of
    /// (h', w', c_out). The grid starts as zeros; elements that `fill` does not write keep their values.
    pub(crate) fn run<X: SinglePrecision>(
        &self,
        compute: &Compute,
        fill: impl Fn(usize, Grid<'_>) + Send + Sync,
        d_input: &mut [X],
    ) -> Result<()> {
        let Self { conv, product } = self;
        let Conv2d { kernel: (kh, kw), padding, stride, c_in, c_out, .. } = **conv;
        let reading = product.reading;
        let origin = (kh - 1 - padding) * reading.kernel_row_stride + (kw - 1 - padding) * c_out;
        let in_elems = conv.input_elems();
        let batch = d_input.len() / in_elems;
        compute.threads.for_each(batches(compute, d_input, in_elems, batch), |(first, part)| {
            let mut framed = compute.scratch(reading.elems)?;
            framed.fill(0.0);
            let raw_elems = Self::raw_elems(conv, &product.columns, X::DTYPE);
            let mut raw = compute.scratch(raw_elems)?;
            for (n, d_input) in part.chunks_exact_mut(in_elems).enumerate() {
                let grid = Grid {
                    elems: &mut framed[origin..],
                    row_stride: stride * reading.kernel_row_stride,
                    position_stride: stride * c_out,
                };
                fill(first + n, grid);
                if raw_elems == 0 {
                    let d_input = X::as_reals(d_input).expect("only f32 is written in place");
                    product.run(compute.simd, &framed, d_input);
                    continue;
                }
                product.run(compute.simd, &framed, &mut raw);
                crop::<X>(compute.simd, &raw, product.columns.padded, c_in, d_input);
            }
            Ok(())
        })
    }
}

multiversion! {
    /// Writes the first `channels` columns of `raw`, whose rows begin `stride` elements after each other.
    fn crop<X: SinglePrecision>(raw: &[f32], stride: usize, channels: usize, to: &mut [X]) = crop_body
}

#[inline(always)]
fn crop_body<X: SinglePrecision>(raw: &[f32], stride: usize, channels: usize, to: &mut [X]) {
    for (to, from) in to.chunks_exact_mut(channels).zip(raw.chunks_exact(stride)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = X::store(*from));
    }
}
