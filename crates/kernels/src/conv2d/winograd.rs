//! The loops of a convolution by Winograd's minimal filtering F(2x2, 3x3).
//!
//! In: prepared images and gradients in f32. Out: sums in f32, as the register tiles make them (see `direct` and
//! `weight_gradient`). This file does not know what becomes of the sums.
//!
//! A square of 2x2 positions reads a square of 4x4 values of each channel. Both squares and the weights are transformed (see
//! `transform`) so that 16 products take the part of 36: `y = A^T [(G w G^T) . (B^T x B)] A`, where the sum over channels is
//! taken between the brackets. Each of the 16 places of a square is a product of matrices of its own, of squares and channels.
//! The gradient of the weight is `G^T [(B^T x B) . (A dy A^T)] G`, with the sum over squares between the brackets.
//!
//! Where the number of rows or columns is odd, the last squares of the output lie over the ones before them. For the gradient
//! of the weight they do not, and what lies outside is zero.
//!
//! Order of summation between the brackets: channel; for the gradient of the weight: image, row of squares, square.

use std::ops::Range;

use super::Conv2d;
use super::direct::{ConvProduct, Memory, Slices, even_parts};
use super::prepare::{Fill, PositionGrid, Reading, fill_image};
use super::tile::{self, GradientTile, ProductTile};
use super::transform::{
    OfInput, OfOutput, OfOutputGradient, OfWeight, OfWeightGradient, Squares, run,
};
use crate::stored::SinglePrecision;
use crate::threads::batches;
use crate::{Processor, SimdLevel, Threads, scratch};

/// Rows and columns of a square of the output, and elements of a transformed square.
const SIDE: usize = 2;
const PLACES: usize = 16;
/// Channels are read and written in whole registers, which have at most so many. And between places lies a cache line, so
/// that they do not begin at equal addresses of the first-level cache.
pub(super) const LINE: usize = 16;
/// Transformed squares of this size stay in the second-level cache together with the weight.
const SQUARES_BYTES: usize = 256 << 10;
/// The same for gradients of the weight, whose sums are read and written once for each group of images.
const GROUP_BYTES: usize = 1 << 20;
/// With fewer channels on either side the transforms take longer than the products that they save.
const FEWEST_CHANNELS: usize = 16;
/// The same for gradients of the weight, which transform two images.
const FEWEST_FOR_WEIGHT: usize = 32;

/// With fewer squares, an image does not pay for reading the transformed weight.
const FEWEST_SQUARES: usize = 9;

/// Whether this convolution, or the gradient of its input, is computed so. It has results at so many rows and positions. Nothing
/// else decides: the processor and the threads do not, so that they change no bit.
///
/// Squares over an odd edge have to leave at most two thirds of the products: 16 for each square instead of 9 for each position.
pub(super) fn is_chosen(conv: &Conv2d, rows: usize, positions: usize) -> bool {
    let squares = rows.div_ceil(SIDE) * positions.div_ceil(SIDE);
    !conv.direct
        && (conv.kernel, conv.stride) == ((3, 3), 1)
        && conv.c_in.min(conv.c_out) >= FEWEST_CHANNELS
        && rows.min(positions) >= SIDE
        && squares >= FEWEST_SQUARES
        && 3 * PLACES * squares <= 2 * 9 * rows * positions
}

/// Whether the gradient of the weight is computed directly.
pub(super) fn is_weight_direct(conv: &Conv2d) -> bool {
    conv.direct || conv.c_in.min(conv.c_out) < FEWEST_FOR_WEIGHT
}

/// Reading an image in whole squares.
pub(super) fn reading(conv: &Conv2d, rows: usize, positions: usize) -> Reading {
    let size = |image: usize, positions: usize| {
        (image + 2 * conv.padding).max(positions.next_multiple_of(SIDE) + 2)
    };
    let (rows, columns) = (size(conv.height, rows), size(conv.width, positions));
    Reading::padded(rows, columns, conv.c_in, conv.kernel, 1, (0, rows))
}

/// The squares of an image, row after row.
#[derive(Clone, Copy)]
struct SquareGrid {
    rows: usize,
    positions: usize,
    down: usize,
    across: usize,
    /// Elements of a transformed square at a place: of the input, and of the gradient of the output.
    channels: usize,
    padded: usize,
}

impl SquareGrid {
    /// Squares that end with the last row and column, as those of an output do.
    fn new(product: &ConvProduct) -> Self {
        let ConvProduct { reading, columns, rows, positions, .. } = *product;
        let (down, across) = (rows.div_ceil(SIDE), positions.div_ceil(SIDE));
        let channels = reading.position_stride.next_multiple_of(LINE);
        Self { rows, positions, down, across, channels, padded: columns.padded }
    }

    /// Squares side by side, as those of a gradient of the weight are. The last ones may end after the last row and column.
    fn side_by_side(product: &ConvProduct) -> Self {
        let grid = Self::new(product);
        Self { rows: SIDE * grid.down, positions: SIDE * grid.across, ..grid }
    }

    /// Elements of a place of `down` rows of squares: of the input, and of the gradient of the output.
    fn planes(self, down: usize) -> [usize; 2] {
        [self.channels, self.padded].map(|channels| down * self.across * channels + LINE)
    }

    /// Rows of squares of the input that are transformed together.
    fn at_a_time(self) -> usize {
        let row = PLACES * self.across * self.channels * size_of::<f32>();
        (SQUARES_BYTES / row).clamp(1, self.down)
    }

    /// The squares of this range as runs that lie side by side: the first square, their number, and the first row and position.
    fn runs(self, squares: Range<usize>) -> impl Iterator<Item = (usize, usize, [usize; 2])> {
        let mut next = squares.start;
        std::iter::from_fn(move || {
            let (first, row, column) = (next, next / self.across, next % self.across);
            let side_by_side = (self.positions / SIDE).saturating_sub(column).max(1);
            let count = side_by_side.min(squares.end - first);
            next += count;
            let top = (SIDE * row).min(self.rows - SIDE);
            let left = (SIDE * column).min(self.positions - SIDE);
            (count > 0).then_some((first, count, [top, left]))
        })
    }
}

/// Elements of a place of a block of columns of the weight.
fn panel_len(product: &ConvProduct) -> usize {
    product.reading.position_stride * product.columns.block + LINE
}

/// The transformed weight, and after it the weight as the register tiles read it.
pub(super) fn panels_len(product: &ConvProduct) -> usize {
    PLACES * panel_len(product) * product.columns.num_blocks() + product.weight_elems()
}

/// Elements of a place of the products of a tile.
fn products_len(product: &ConvProduct) -> usize {
    product.columns.tall * product.columns.block + LINE
}

/// The transformed squares of the rows that are transformed together, and the products of a tile.
pub(super) fn squares_len(product: &ConvProduct) -> usize {
    let grid = SquareGrid::new(product);
    let [x, _] = grid.planes(grid.at_a_time());
    PLACES * (x + products_len(product))
}

/// Writes the panels: for each block of columns, each place and each channel: the block's columns. `in_registers` writes them as
/// the register tiles read them.
pub(super) fn pack_panels(
    level: SimdLevel,
    product: &ConvProduct,
    panels: &mut [f32],
    in_registers: impl FnOnce(&mut [f32]),
) {
    let ConvProduct { reading, columns, .. } = product;
    let (channels, block, len) = (reading.position_stride, columns.block, panel_len(product));
    let (transformed, direct) = panels.split_at_mut(PLACES * len * columns.num_blocks());
    in_registers(direct);
    let blocks = direct.chunks_exact(9 * channels * block);
    for (from, to) in blocks.zip(transformed.chunks_exact_mut(PLACES * len)) {
        let squares = Squares {
            from: from.as_ptr(),
            from_strides: [3 * channels * block, channels * block, block],
            to: to.as_mut_ptr(),
            to_strides: [4 * len, len, block],
            count: channels,
            len: block,
        };
        // SAFETY: a block has 9 weights for each channel, and each place has room for it. Its columns are whole registers.
        unsafe { run::<OfWeight, 3, 4>(level, &squares) }
    }
}

/// Computes one image: `y` (rows, positions, padded columns) from the prepared image `x`. `memory` has [`squares_len`]
/// elements.
pub(super) fn forward(
    level: SimdLevel,
    product: &ConvProduct,
    panels: &[f32],
    x: &[f32],
    memory: &mut [f32],
    y: &mut [f32],
) {
    let ConvProduct { reading, columns, positions, .. } = product;
    let (grid, len) = (SquareGrid::new(product), products_len(product));
    let [plane, _] = grid.planes(grid.at_a_time());
    assert!(y.len() >= product.output_elems() && panels.len() >= panels_len(product));
    let (transformed, products) = memory.split_at_mut(PLACES * plane);
    assert!(products.len() >= PLACES * len);
    let panels = panels.chunks_exact(PLACES * panel_len(product)).take(columns.num_blocks());
    let all = grid.down * grid.across;
    for first in (0..all).step_by(grid.at_a_time() * grid.across) {
        let squares = first..all.min(first + grid.at_a_time() * grid.across);
        transform_input(level, reading, grid, squares.clone(), x, transformed, plane);
        let tiles = even_parts(squares.len(), columns.tall);
        let blocks = panels.clone().enumerate();
        for ((block, panel), tile) in
            blocks.flat_map(|of| tiles.clone().map(move |tile| (of, tile)))
        {
            let kernel = tile::product_kernel(level, tile.len(), columns.wide);
            for (place, w) in panel.chunks_exact(panel_len(product)).enumerate() {
                let tile = ProductTile {
                    x: transformed[place * plane + tile.start * grid.channels..].as_ptr(),
                    x_stride: grid.channels,
                    w: w.as_ptr(),
                    kernel_rows: 1,
                    x_row_stride: 0,
                    len: reading.position_stride,
                    y: products[place * len..].as_mut_ptr(),
                    y_stride: columns.block,
                    accumulate: false,
                };
                // SAFETY: a place has all squares with all channels, the panel a block of columns for each channel, and the
                // products have room for a tile; `level` is this processor's.
                unsafe { kernel(tile) }
            }
            let tile = first + tile.start..first + tile.end;
            for (square, count, [top, left]) in grid.runs(tile.clone()) {
                let at = (top * positions + left) * columns.padded + block * columns.block;
                let squares = Squares {
                    from: products[(square - tile.start) * columns.block..].as_ptr(),
                    from_strides: [4 * len, len, columns.block],
                    to: y[at..].as_mut_ptr(),
                    to_strides: [positions * columns.padded, columns.padded, SIDE * columns.padded],
                    count,
                    len: columns.block,
                };
                // SAFETY: the output has the rows and columns of all squares, whose channels are whole registers.
                unsafe { run::<OfOutput, 4, 2>(level, &squares) }
            }
        }
    }
}

/// Transforms squares of a prepared image into places, which are `plane` elements apart.
fn transform_input(
    level: SimdLevel,
    reading: &Reading,
    grid: SquareGrid,
    squares: Range<usize>,
    x: &[f32],
    to: &mut [f32],
    plane: usize,
) {
    let (row, position) = (reading.row_stride, reading.position_stride);
    let end = (grid.rows + 1) * row + (grid.positions + 2) * position + LINE;
    assert!(x.len() >= end && squares.end <= grid.down * grid.across);
    assert!(squares.len() * grid.channels <= plane && to.len() >= PLACES * plane);
    for (square, count, [top, left]) in grid.runs(squares.clone()) {
        let squares = Squares {
            from: x[top * row + left * position..].as_ptr(),
            from_strides: [row, position, SIDE * position],
            to: to[(square - squares.start) * grid.channels..].as_mut_ptr(),
            to_strides: [4 * plane, plane, grid.channels],
            count,
            len: position,
        };
        // SAFETY: the assertions above: the image has all rows and columns of the squares, and a register after the last one;
        // each place has room for them.
        unsafe { run::<OfInput, 4, 4>(level, &squares) }
    }
}

/// Elements of a place of the gradient of the weight.
fn weight_plane(product: &ConvProduct) -> usize {
    product.reading.position_stride * product.columns.padded + LINE
}

/// Elements of an image whose gradient of the weight is added: the prepared image and the gradient of its output in whole
/// squares, and the transformed squares of both.
fn image_len(product: &ConvProduct) -> ([usize; 2], [usize; 2]) {
    let grid = SquareGrid::side_by_side(product);
    let gradient = grid.rows * grid.positions * grid.padded;
    ([product.reading.elems, gradient], grid.planes(grid.down).map(|plane| PLACES * plane))
}

/// The number of images that `threads` threads transform before their products are added.
fn group(product: &ConvProduct, threads: usize, batch: usize) -> usize {
    let (_, [x, dy]) = image_len(product);
    let most = threads * GROUP_BYTES / ((x + dy) * size_of::<f32>());
    most.clamp(1, batch.max(1))
}

/// The scratch memory of [`gradient`]: the gradients of the transformed weight and of the weight; and for images and gradients
/// those of each thread, and the transformed squares of a group.
pub(super) fn gradient_memory(product: &ConvProduct, threads: &Threads, batch: usize) -> Memory {
    let (own, squares) = image_len(product);
    let group = group(product, threads.count(), batch);
    let parts = threads.num_parts(group);
    let sums = PLACES * weight_plane(product) + product.weight_elems();
    let [x, dy] = [0, 1].map(|i| scratch(parts * own[i] + group * squares[i]));
    (scratch(sums), x, dy)
}

/// The gradient of the weight (3, 3, channels, padded columns), from input images `x`. `fill(n, grid)` writes the output gradients
/// of image `n`.
///
/// The threads share the images of a group while these are transformed, and then the places, whose products they add.
pub(super) fn gradient<'a, X: SinglePrecision, S: SinglePrecision>(
    cpu: &Processor,
    product: &ConvProduct,
    x: &[X],
    (sums, images, gradients): Slices<'a>,
    fill: Fill<'_>,
) -> &'a [f32] {
    let ConvProduct { conv, reading, columns, .. } = product;
    let (own, squares) = image_len(product);
    let batch = x.len() / conv.input_elems();
    let group = group(product, cpu.threads.count(), batch);
    let parts = cpu.threads.num_parts(group);
    let (image, x_squares) = images.split_at_mut(parts * own[0]);
    let (gradient, dy_squares) = gradients.split_at_mut(parts * own[1]);
    let (sums, d_weight) = sums.split_at_mut(PLACES * weight_plane(product));
    image.fill(0.0);
    gradient.fill(0.0);
    sums.fill(0.0);
    for first in (0..batch).step_by(group) {
        let count = group.min(batch - first);
        let x_parts = batches(cpu, &mut x_squares[..count * squares[0]], squares[0], count);
        let dy_parts = batches(cpu, &mut dy_squares[..count * squares[1]], squares[1], count);
        let memory = image.chunks_exact_mut(own[0]).zip(gradient.chunks_exact_mut(own[1]));
        let items = x_parts.into_iter().zip(dy_parts).zip(memory).collect();
        cpu.threads.for_each(
            items,
            |(((start, x_squares), (_, dy_squares)), (image, gradient))| {
                let to = x_squares.chunks_exact_mut(squares[0]);
                let to = to.zip(dy_squares.chunks_exact_mut(squares[1]));
                for (n, to) in (first + start..).zip(to) {
                    let x = &x[n * conv.input_elems()..][..conv.input_elems()];
                    fill_image::<X, S>(cpu.simd, conv, reading, x, image);
                    let row_stride = SquareGrid::side_by_side(product).positions * columns.padded;
                    let position_stride = columns.padded;
                    fill(n, PositionGrid { elems: gradient, row_stride, position_stride });
                    transform(cpu.simd, product, (image, gradient), to);
                }
            },
        );
        let squares = (&*x_squares, &*dy_squares);
        let places = sums.chunks_exact_mut(weight_plane(product)).enumerate().collect();
        cpu.threads.for_each(places, |(place, sums): (usize, &mut [f32])| {
            add_place(cpu.simd, product, count, squares, place, sums);
        });
    }
    finish(cpu.simd, product, sums, d_weight);
    d_weight
}

/// Transforms a prepared image, and the gradient of its output, which comes in whole squares with padded columns.
fn transform(
    level: SimdLevel,
    product: &ConvProduct,
    (x, dy): (&[f32], &[f32]),
    (x_squares, dy_squares): (&mut [f32], &mut [f32]),
) {
    let grid = SquareGrid::side_by_side(product);
    let ([x_plane, dy_plane], all) = (grid.planes(grid.down), grid.down * grid.across);
    transform_input(level, &product.reading, grid, 0..all, x, x_squares, x_plane);
    let row = grid.positions * grid.padded;
    assert!(dy.len() >= grid.rows * row && dy_squares.len() >= PLACES * dy_plane);
    for (square, count, [top, _]) in grid.runs(0..all) {
        let squares = Squares {
            from: dy[top * row..].as_ptr(),
            from_strides: [row, grid.padded, SIDE * grid.padded],
            to: dy_squares[square * grid.padded..].as_mut_ptr(),
            to_strides: [4 * dy_plane, dy_plane, grid.padded],
            count,
            len: grid.padded,
        };
        // SAFETY: the assertion above: the gradient has all rows of the squares, and each place has room for them.
        unsafe { run::<OfOutputGradient, 2, 4>(level, &squares) }
    }
}

/// Adds to a place of the gradient of the transformed weight the products of the first `num_images` images.
fn add_place(
    level: SimdLevel,
    product: &ConvProduct,
    num_images: usize,
    (x, dy): (&[f32], &[f32]),
    place: usize,
    sums: &mut [f32],
) {
    let ConvProduct { reading, columns, .. } = product;
    let grid = SquareGrid::side_by_side(product);
    let (_, [x_len, dy_len]) = image_len(product);
    let [x_plane, dy_plane] = grid.planes(grid.down);
    assert!(x.len() >= num_images * x_len && dy.len() >= num_images * dy_len && place < PLACES);
    assert!(sums.len() >= weight_plane(product));
    let images: Vec<_> = (x.chunks_exact(x_len).zip(dy.chunks_exact(dy_len)).take(num_images))
        .map(|(x, dy)| (x[place * x_plane..].as_ptr(), dy[place * dy_plane..].as_ptr()))
        .collect();
    for block in 0..columns.num_blocks() {
        for channels in even_parts(reading.position_stride, columns.tall) {
            let column = block * columns.block;
            let tile = GradientTile {
                rows: &images,
                x_offset: channels.start,
                dy_offset: column,
                positions: grid.down * grid.across,
                x_stride: grid.channels,
                dy_stride: grid.padded,
                d_w: sums[channels.start * grid.padded + column..].as_mut_ptr(),
                d_w_stride: grid.padded,
            };
            let kernel = tile::gradient_kernel(level, channels.len(), columns.wide);
            // SAFETY: each image has all squares of the place, with all channels and columns, and the sums have all
            // weights; `level` is this processor's.
            unsafe { kernel(tile) }
        }
    }
}

/// Writes the gradient of the weight (3, 3, channels, padded columns) from that of the transformed weight.
fn finish(level: SimdLevel, product: &ConvProduct, sums: &[f32], d_weight: &mut [f32]) {
    let (channels, padded) = (product.reading.position_stride, product.columns.padded);
    let plane = weight_plane(product);
    assert!(sums.len() >= PLACES * plane && d_weight.len() >= product.weight_elems());
    let squares = Squares {
        from: sums.as_ptr(),
        from_strides: [4 * plane, plane, padded],
        to: d_weight.as_mut_ptr(),
        to_strides: [3 * channels * padded, channels * padded, padded],
        count: channels,
        len: padded,
    };
    // SAFETY: the assertion above; columns are whole registers.
    unsafe { run::<OfWeightGradient, 4, 3>(level, &squares) }
}
