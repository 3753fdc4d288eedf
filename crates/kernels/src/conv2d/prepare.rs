//! Images with a border of zeros, and weights in the order in which register tiles read them.
//!
//! In: tensors of f32 or bf16. Out: f32, which is rounded to bf16 if the convolution is one of bf16.

use super::Conv2d;
use super::tile::ChannelColumns;
use crate::layout::square::planes_to_positions;
use crate::simd::vectorized;
use crate::stored::{SinglePrecision, operand};
use crate::{ImageLayout, SimdLevel};

/// How a convolution reads its padded input: `kernel_rows` runs of `run` contiguous values for each
/// position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// Number of kernel rows that are read one after the other.
    pub(crate) kernel_rows: usize,
    /// Contiguous values of one kernel row: kernel width times channels.
    pub(crate) run: usize,
    /// Elements from one position to the next.
    pub(crate) position_stride: usize,
    pub(crate) row_stride: usize,
    pub(crate) kernel_row_stride: usize,
    /// Image rows between rows of positions.
    pub(crate) row_step: usize,
    /// The image rows, in padded coordinates, that are not all zeros.
    pub(crate) live_rows: (usize, usize),
    pub(crate) elems: usize,
}

impl Reading {
    /// Reading a zero-padded image with `channels` channels of padded size `rows` x `columns`.
    pub(crate) fn padded(
        rows: usize,
        columns: usize,
        channels: usize,
        kernel: (usize, usize),
        stride: usize,
        live_rows: (usize, usize),
    ) -> Self {
        Self {
            kernel_rows: kernel.0,
            run: kernel.1 * channels,
            position_stride: stride * channels,
            row_stride: stride * columns * channels,
            kernel_row_stride: columns * channels,
            row_step: stride,
            live_rows,
            elems: rows * columns * channels,
        }
    }

    /// Reading the input of a convolution.
    pub(crate) fn image(conv: &Conv2d) -> Self {
        let border = 2 * conv.padding;
        let live = (conv.padding, conv.padding + conv.height);
        let (rows, columns) = (conv.height + border, conv.width + border);
        Self::padded(rows, columns, conv.c_in, conv.kernel, conv.stride, live)
    }

    /// Whether kernel row `u` of the positions in row `i` reads anything but zeros.
    pub(crate) fn is_live(&self, i: usize, u: usize) -> bool {
        let row = i * self.row_step + u;
        self.live_rows.0 <= row && row < self.live_rows.1
    }
}

/// A rectangle of positions in a larger array, `channels` contiguous values at each.
pub(crate) struct PositionGrid<'a> {
    /// The memory, which begins with the first position.
    pub(crate) elems: &'a mut [f32],
    pub(crate) row_stride: usize,
    pub(crate) position_stride: usize,
}

/// Writes an image into a grid. Called once for an image, so products are not compiled for each kind.
pub(crate) type Fill<'a> = &'a (dyn Fn(usize, PositionGrid<'_>) + Sync);

/// Copies `image`, rounded to `S`, into `to`, whose border is zero, as it is read: with the channels of a position next to each
/// other, whatever the layout of the image.
pub(crate) fn fill_image<X: SinglePrecision, S: SinglePrecision>(
    level: SimdLevel,
    conv: &Conv2d,
    reading: &Reading,
    image: &[X],
    to: &mut [f32],
) {
    match conv.layout {
        ImageLayout::Nhwc => {
            vectorized!(level, copy::<X, S>, conv, reading.kernel_row_stride, image, to)
        }
        ImageLayout::Nchw => {
            let Conv2d { height, width, c_in, padding, .. } = *conv;
            let row = reading.kernel_row_stride;
            let to = &mut to[padding * (row + c_in)..];
            let sizes = [c_in, height * width];
            vectorized!(
                level,
                planes_to_positions::<X, S>,
                level,
                image,
                sizes,
                width,
                [row, c_in],
                to
            );
        }
    }
}

/// Writes an NHWC image into the inner part of `to`.
#[inline(always)]
fn copy<X: SinglePrecision, S: SinglePrecision>(
    conv: &Conv2d,
    padded_row: usize,
    image: &[X],
    to: &mut [f32],
) {
    let row = conv.width * conv.c_in;
    let lead = conv.padding * conv.c_in;
    let rows = to.chunks_exact_mut(padded_row).skip(conv.padding);
    for (to, from) in rows.zip(image.chunks_exact(row)) {
        for (to, from) in to[lead..lead + row].iter_mut().zip(from) {
            *to = operand::<X, S>(*from);
        }
    }
}

/// Weights, rounded to `S`, as panels: for each block of columns, each kernel row, the run, and the block's columns, padded with
/// zeros to whole registers.
pub(super) fn pack_panels<S: SinglePrecision>(
    columns: &ChannelColumns,
    panels: &mut [f32],
    weight: &[f32],
) {
    let (width, blocks) = (columns.block, columns.num_blocks());
    let rows = weight.chunks_exact(columns.channels);
    let len = rows.len() * width;
    for (block, panel) in panels.chunks_exact_mut(len).take(blocks).enumerate() {
        for (to, row) in panel.chunks_exact_mut(width).zip(rows.clone()) {
            let row = &row[block * width..];
            let (to, padding) = to.split_at_mut(width.min(row.len()));
            to.iter_mut().zip(row).for_each(|(to, x)| *to = operand::<f32, S>(*x));
            padding.fill(0.0);
        }
    }
}

/// The same for the weights of a gradient of the input: rotated by 180 degrees, and with channels of the input as columns.
pub(super) fn pack_rotated<S: SinglePrecision>(
    level: SimdLevel,
    columns: &ChannelColumns,
    c_out: usize,
    panels: &mut [f32],
    weight: &[f32],
) {
    let (width, blocks) = (columns.block, columns.num_blocks());
    let kernel = weight.chunks_exact(columns.channels * c_out);
    let len = kernel.len() * c_out * width;
    for (block, panel) in panels.chunks_exact_mut(len).take(blocks).enumerate() {
        let channels = width.min(columns.channels - block * width);
        if channels < width {
            panel.fill(0.0);
        }
        for (to, from) in panel.chunks_exact_mut(c_out * width).zip(kernel.clone().rev()) {
            let (from, sizes) = (&from[block * width * c_out..], [channels, c_out]);
            vectorized!(
                level,
                planes_to_positions::<f32, S>,
                level,
                from,
                sizes,
                c_out,
                [0, width],
                to
            );
        }
    }
}
