//! Images with a border of zeros, and weights in the order in which register tiles read them.
//!
//! In: tensors of f32 or bf16. Out: f32, which is rounded to bf16 if the convolution is one of bf16.

use super::Conv2d;
use super::tile::ChannelColumns;
use crate::layout::square::planes_to_positions;
use crate::simd::vectorized;
use crate::stored::{SinglePrecision, operand};
use crate::{ImageLayout, SimdLevel};

/// With fewer input values per kernel row, the inner loop of a tile is too short to be fast.
const SHORTEST_RUN: usize = 16;

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
    /// Whether the whole patch of each position lies there, one after the other.
    has_patches: bool,
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
            has_patches: false,
        }
    }

    /// Reading the input of a convolution in registers. An input with few channels (gray or color images) is laid out as one
    /// run per position, which holds the whole patch. Patches are small then, and the longer runs save more time than the copies
    /// take.
    pub(crate) fn input(conv: &Conv2d) -> Self {
        if conv.kernel.1 * conv.c_in >= SHORTEST_RUN {
            return Self::image(conv);
        }
        let run = conv.kernel.0 * conv.kernel.1 * conv.c_in;
        let (rows, columns) = (conv.out_height(), conv.out_width());
        Self { has_patches: true, ..Self::padded(rows, columns, run, (1, 1), 1, (0, rows)) }
    }

    /// Reading the input of a convolution as it is.
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
        _ if reading.has_patches => vectorized!(level, expand::<X, S>, conv, image, to),
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

/// Writes the whole patch of every position, except what lies outside the image: there, `to` keeps
/// the zeros that it starts with.
#[inline(always)]
fn expand<X: SinglePrecision, S: SinglePrecision>(conv: &Conv2d, image: &[X], to: &mut [f32]) {
    let Conv2d { width, c_in: c, kernel: (kh, kw), stride, padding, .. } = *conv;
    let (patch, run) = (kh * kw * c, kw * c);
    let positions = conv.out_width();
    let [row_stride, position_stride, channel_stride] = conv.layout.strides(conv.input_image());
    let is_run = channel_stride == 1;
    // The positions whose runs lie in the image.
    let first = padding.div_ceil(stride);
    let end = (width + padding + stride).saturating_sub(kw) / stride;
    let whole = first..end.clamp(first, positions.max(first));
    for (i, row) in to.chunks_exact_mut(positions * patch).enumerate() {
        for u in 0..kh {
            let y = (i * stride + u).wrapping_sub(padding);
            if y >= conv.height {
                continue;
            }
            let line = &image[y * row_stride..];
            if is_run && !whole.is_empty() {
                let line = &line[(whole.start * stride - padding) * c..];
                let patches = row[whole.start * patch..whole.end * patch].chunks_exact_mut(patch);
                let (step, place) = (stride * c, u * run..(u + 1) * run);
                match run {
                    8.. => copy_runs::<X, S, 8>(line, step, patches, place),
                    4.. => copy_runs::<X, S, 4>(line, step, patches, place),
                    2.. => copy_runs::<X, S, 2>(line, step, patches, place),
                    _ => copy_runs::<X, S, 1>(line, step, patches, place),
                }
            }
            for j in (0..positions).filter(|j| !is_run || !whole.contains(j)) {
                let place = &mut row[j * patch + u * run..][..run];
                for (v, place) in place.chunks_exact_mut(c).enumerate() {
                    let column = (j * stride + v).wrapping_sub(padding);
                    if column < width {
                        let from = line[column * position_stride..].iter().step_by(channel_stride);
                        place.iter_mut().zip(from).for_each(|(to, x)| *to = operand::<X, S>(*x));
                    }
                }
            }
        }
    }
}

/// Copies a run of `N` to `2 N` elements of a line into each patch, at `place`: its first `N` elements, and its last.
#[inline(always)]
fn copy_runs<X: SinglePrecision, S: SinglePrecision, const N: usize>(
    line: &[X],
    step: usize,
    patches: std::slice::ChunksExactMut<'_, f32>,
    place: std::ops::Range<usize>,
) {
    let last = place.len() - N;
    for (at, patch) in patches.enumerate() {
        let (from, to) = (&line[at * step..][..place.len()], &mut patch[place.clone()]);
        for start in [0, last] {
            let run = from[start..].first_chunk::<N>().expect("a run has so many");
            to[start..][..N].copy_from_slice(&run.map(operand::<X, S>));
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
