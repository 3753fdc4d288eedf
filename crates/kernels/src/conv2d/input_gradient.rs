//! The gradient of a convolution's input, and how gradients of the output are laid out for the register tiles.
//!
//! In: gradients of the output, and weights. Out: the gradient of the input. Order of summation: kernel row, then kernel
//! column, then channel of the output.

use paceline_memory::DType;

use super::Conv2d;
use super::direct::{ConvProduct, Memory, Slices, image_parts};
use super::prepare::{Fill, PositionGrid, Reading};
use crate::layout::square::{planes_to_positions, positions_to_planes};
use crate::simd::vectorized;
use crate::stored::SinglePrecision;
use crate::tiles::Ways;
use crate::{ImageLayout, Processor, SimdLevel, Threads};

/// Copies gradients `d_output` of a batch into grids, image by image.
pub(super) fn copy_images<S: SinglePrecision>(
    level: SimdLevel,
    conv: &Conv2d,
    d_output: &[S],
) -> impl Fn(usize, PositionGrid<'_>) + Send + Sync {
    let (elems, width, channels) = (conv.output_elems(), conv.out_width(), conv.c_out);
    let layout = conv.layout;
    move |n, grid| {
        let d_output = &d_output[n * elems..(n + 1) * elems];
        if layout == ImageLayout::Nchw {
            let sizes = [channels, elems / channels];
            let strides = [grid.row_stride, grid.position_stride];
            let to = grid.elems;
            return vectorized!(
                level,
                planes_to_positions::<S, S>,
                level,
                d_output,
                sizes,
                width,
                strides,
                to
            );
        }
        for (position, from) in d_output.chunks_exact(channels).enumerate() {
            let (i, j) = (position / width, position % width);
            let at = i * grid.row_stride + j * grid.position_stride;
            let to = &mut grid.elems[at..at + channels];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.load());
        }
    }
}

/// The gradient of the input: a convolution of the output's gradient, spread out by the stride and with
/// a border of zeros, with the weights rotated by 180 degrees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InputGradient(ConvProduct);

impl InputGradient {
    /// For output gradients whose rows from `live_rows` on are zero.
    pub(crate) fn new(ways: Ways, conv: &Conv2d, live_rows: usize) -> Self {
        let Conv2d { height, width, c_in, c_out, kernel: (kh, kw), .. } = *conv;
        let first = kh - 1 - conv.padding;
        let live = (first, first + (live_rows - 1) * conv.stride + 1);
        let (rows, columns) = (height + kh - 1, width + kw - 1);
        let reading = Reading::padded(rows, columns, c_out, conv.kernel, 1, live);
        Self(ConvProduct::reading(ways, conv, reading, c_in, height, width))
    }

    /// The scratch memory for a batch whose input gradients are `X`. A result whose columns are not padded, that is not
    /// rounded, and whose channels lie next to each other is computed in place.
    pub(crate) fn memory<X: SinglePrecision>(&self, threads: &Threads, batch: usize) -> Memory {
        self.0.memory(threads, batch, self.is_in_place::<X>())
    }

    fn is_in_place<X: SinglePrecision>(&self) -> bool {
        let Self(ConvProduct { conv, columns, .. }) = self;
        let is_padded = columns.padded != conv.c_in;
        !is_padded && X::DTYPE == DType::F32 && conv.layout == ImageLayout::Nhwc
    }

    /// Writes `d_input` from the weight, which is rounded to `S`. `fill(n, grid)` writes the gradients of
    /// image `n` into a grid of (h', w', c_out). The grid starts as zeros; elements that `fill` does not write keep their
    /// values.
    pub(crate) fn run<X: SinglePrecision, S: SinglePrecision>(
        &self,
        cpu: &Processor,
        weight: &[f32],
        (panels, images, sums): Slices<'_>,
        fill: Fill<'_>,
        d_input: &mut [X],
    ) {
        let Self(product) = self;
        let Conv2d { kernel: (kh, kw), padding, stride, c_in, c_out, .. } = product.conv;
        product.pack::<S>(panels, weight, true);
        let (panels, reading) = (&*panels, product.reading);
        let origin = (kh - 1 - padding) * reading.kernel_row_stride + (kw - 1 - padding) * c_out;
        let outputs = image_parts(cpu, d_input, product.conv.input_elems());
        product.for_each(cpu, images, sums, outputs, |n, image, sums, d_input| {
            let grid = PositionGrid {
                elems: &mut image[origin..],
                row_stride: stride * reading.kernel_row_stride,
                position_stride: stride * c_out,
            };
            fill(n, grid);
            if self.is_in_place::<X>() {
                let d_input = X::as_reals(d_input).expect("only f32 is written in place");
                product.run(cpu.simd, panels, image, d_input);
            } else {
                product.run(cpu.simd, panels, image, sums);
                let stride = product.columns.padded;
                match product.conv.layout {
                    ImageLayout::Nhwc => {
                        vectorized!(cpu.simd, crop::<X>, &*sums, stride, c_in, d_input)
                    }
                    ImageLayout::Nchw => {
                        let sizes = [product.rows * product.positions, c_in];
                        vectorized!(
                            cpu.simd,
                            positions_to_planes,
                            cpu.simd,
                            &*sums,
                            stride,
                            sizes,
                            None,
                            d_input
                        );
                    }
                }
            }
        });
    }
}

/// Writes the first `channels` columns of `raw`, whose rows begin `stride` elements after each other.
#[inline(always)]
fn crop<X: SinglePrecision>(raw: &[f32], stride: usize, channels: usize, to: &mut [X]) {
    for (to, from) in to.chunks_exact_mut(channels).zip(raw.chunks_exact(stride)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = X::store(*from));
    }
}
