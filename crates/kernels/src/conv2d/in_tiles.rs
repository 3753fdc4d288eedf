//! The loops of a convolution in bf16 over tiles, which AMX has.
//!
//! In: prepared images and gradients in f32, whose values are bf16. Out: sums in f32, as the register tiles make them (see
//! `direct` and `weight_gradient`). This file does not know what becomes of the sums.
//!
//! Places of an image are numbered as if each row of positions were as long as a row of the prepared image, so that 16 places at
//! equal distances are the rows of a tile, wherever a row ends. Results at places that are no positions are dropped.
//!
//! Order of summation for an output value: kernel row, then kernel column, then channel; for the gradient of a weight: image,
//! row, column. Of 32 products in this order the even and the odd ones are added up by themselves, and then to the sum, see
//! [`Tiles::add_products`].
#![cfg_attr(not(any(target_arch = "x86_64", test)), allow(dead_code, reason = "no tiles there"))]

use half::bf16;

use super::Conv2d;
use super::direct::ConvProduct;
use super::prepare::Reading;
use crate::SimdLevel;
use crate::layout::square::positions_to_planes;
use crate::simd::vectorized;
use crate::tiles::{
    self, ROW_BYTES, ROWS, Tiles, TilesOf, as_bf16, interleave, narrow, read_bf16, with_tiles,
};

/// Rows of a block of sums.
pub(super) const TALL: usize = tiles::BLOCK;
/// Channels of a tile.
pub(super) const LANES: usize = 16;
/// Products that are added to each sum at a time.
const STEP: usize = 32;

/// How the places of an image are numbered.
#[derive(Clone, Copy)]
pub(super) struct PlaceGrid {
    /// Those of a row. The first `positions` of them are positions.
    pub(super) row: usize,
    positions: usize,
    /// All of them, rounded up to whole blocks, and the number of rows.
    pub(super) padded: usize,
    rows: usize,
}

impl PlaceGrid {
    pub(super) fn new(product: &ConvProduct) -> Self {
        let ConvProduct { reading, rows, positions, .. } = *product;
        let row = reading.row_stride / reading.position_stride;
        let padded = ((rows - 1) * row + positions).next_multiple_of(TALL);
        Self { row, positions, padded, rows }
    }

    /// The positions of a block of places, counted from row to row. `None` for padding.
    fn of_block(self, first: usize) -> impl Iterator<Item = Option<usize>> {
        let (mut i, mut j) = (first / self.row, first % self.row);
        (0..TALL).map(move |_| {
            let position = (i < self.rows && j < self.positions).then_some(i * self.positions + j);
            (i, j) = if j + 1 < self.row { (i, j + 1) } else { (i + 1, 0) };
            position
        })
    }
}

/// Elements of f32 that hold `len` elements of bf16.
fn len_in_f32(len: usize) -> usize {
    len.div_ceil(2)
}

/// A prepared image in bf16, and the elements after it that the last block of places reads, in elements of f32.
pub(super) fn image_len(product: &ConvProduct) -> usize {
    let Reading { position_stride, kernel_row_stride, kernel_rows, run, elems, .. } =
        product.reading;
    let last = (PlaceGrid::new(product).padded - 1) * position_stride;
    let run = run.next_multiple_of(STEP);
    len_in_f32(elems.max(last + (kernel_rows - 1) * kernel_row_stride + run))
}

/// The weights of a convolution as pairs, in the order in which tiles read them: elements of f32.
pub(super) fn panels_len(product: &ConvProduct) -> usize {
    product.reading.kernel_rows * product.reading.run.next_multiple_of(STEP) / 2
        * product.columns.padded
}

/// Writes the panels: for each block of columns, each kernel row, and each two steps of the run: the pairs of the columns.
/// `weight(k, column)` is a bf16; steps that are missing become zeros.
pub(super) fn pack_panels(
    product: &ConvProduct,
    panels: &mut [f32],
    weight: impl Fn(usize, usize) -> f32,
) {
    let ConvProduct { reading: Reading { kernel_rows, run, .. }, columns, .. } = product;
    let pairs = run.next_multiple_of(STEP) / 2;
    for (row, to) in as_bf16(panels).chunks_exact_mut(2 * columns.block).enumerate() {
        let (block, u, first) =
            (row / pairs / kernel_rows, row / pairs % kernel_rows, row % pairs * 2);
        for (i, to) in to.iter_mut().enumerate() {
            let (column, step) = (block * columns.block + i / 2, first + i % 2);
            let is_there = column < columns.channels && step < *run;
            *to = if is_there { narrow(weight(u * run + step, column)) } else { bf16::ZERO };
        }
    }
}

/// Narrows f32 that hold bf16.
#[inline(always)]
fn narrow_all(from: &[f32], to: &mut [bf16]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = narrow(*x));
}

/// Computes one image: `sums` (rows, positions, padded columns) from the prepared image `x`. `memory` has [`image_len`] elements.
pub(super) fn run(
    tiles: TilesOf,
    level: SimdLevel,
    product: &ConvProduct,
    panels: &[f32],
    x: &[f32],
    memory: &mut [f32],
    sums: &mut [f32],
) {
    assert!(sums.len() >= product.output_elems() && panels.len() >= panels_len(product));
    assert!(x.len() <= memory.len() * 2 && memory.len() >= image_len(product));
    let image = as_bf16(memory);
    vectorized!(level, narrow_all, x, &mut *image);
    with_tiles!(tiles, product.columns.wide, run_blocks(product, panels, image, sums))
}

#[inline(always)]
fn run_blocks<T: Tiles, const C: usize>(
    tiles: &mut T,
    product: &ConvProduct,
    panels: &[f32],
    image: &[bf16],
    sums: &mut [f32],
) {
    let ConvProduct { reading, columns, .. } = product;
    let places = PlaceGrid::new(product);
    let pairs = reading.run.next_multiple_of(STEP) / 2;
    let mut buffer = BlockSums::default();
    let mut ends = [[bf16::ZERO; STEP]; TALL];
    // All bits of the elements of the last step of a run.
    let is_of_run: [u16; STEP] =
        std::array::from_fn(|i| if i < reading.run % STEP { u16::MAX } else { 0 });
    let stride = reading.position_stride * size_of::<bf16>();
    for block in 0..columns.num_blocks() {
        for first in (0..places.padded).step_by(TALL) {
            // SAFETY: the image has all runs of these places, the panels all pairs of the block, and the buffer the sums.
            unsafe {
                tiles::zero_sums(tiles);
                for u in 0..reading.kernel_rows {
                    let at = first * reading.position_stride + u * reading.kernel_row_stride;
                    let panel = panels
                        .as_ptr()
                        .add((block * reading.kernel_rows + u) * pairs * columns.block);
                    for step in (0..reading.run).step_by(STEP) {
                        let from = image.as_ptr().add(at + step);
                        let b = panel.add(step / 2 * columns.block).cast();
                        let left = reading.run - step;
                        if left >= STEP {
                            let rows = [from, from.add(ROWS * reading.position_stride)]
                                .map(<*const bf16>::cast);
                            tiles::add_block::<T, C>(tiles, rows, stride, b);
                            continue;
                        }
                        // Elements after the run belong to others, and may be infinite.
                        for (i, end) in ends.iter_mut().enumerate() {
                            let from = from.add(i * reading.position_stride).cast::<[bf16; STEP]>();
                            for ((end, x), mask) in end.iter_mut().zip(from.read()).zip(is_of_run) {
                                *end = bf16::from_bits(x.to_bits() & mask);
                            }
                        }
                        let rows = [0, ROWS].map(|row| ends.as_ptr().add(row).cast());
                        tiles::add_block::<T, C>(tiles, rows, ROW_BYTES, b);
                    }
                }
                tiles::store_sums::<T, C>(tiles, buffer.0.as_mut_ptr().cast(), C * ROW_BYTES, true);
            }
            for (from, position) in buffer.0.chunks_exact(C * LANES).zip(places.of_block(first)) {
                if let Some(position) = position {
                    let to = &mut sums[position * columns.padded + block * columns.block..];
                    to[..C * LANES].copy_from_slice(from);
                }
            }
        }
    }
}

#[repr(align(64))]
struct BlockSums([f32; TALL * 2 * LANES]);

impl Default for BlockSums {
    fn default() -> Self {
        Self([0.0; TALL * 2 * LANES])
    }
}

/// Weights of a kernel that may have a plane each.
const MOST_PLANES: usize = 64;

/// Whether gradients of weights are computed in tiles. The rows of a tile are 16 planes, and its columns places next to each
/// other: of 16 channels of the image, which serve all weights, or of 16 weights of a small kernel.
pub(super) fn have_planes(conv: &Conv2d) -> bool {
    let weights = conv.kernel.0 * conv.kernel.1 * conv.c_in;
    conv.stride == 1 && (are_of_channels(conv) || weights <= MOST_PLANES)
}

/// Whether planes are those of the channels.
fn are_of_channels(conv: &Conv2d) -> bool {
    conv.c_in.is_multiple_of(ROWS)
}

/// Elements of a plane, and the number of planes.
fn planes(product: &ConvProduct) -> [usize; 2] {
    let ConvProduct { reading, conv, .. } = product;
    if are_of_channels(conv) {
        [reading.elems / conv.c_in, conv.c_in]
    } else {
        let weights = reading.kernel_rows * reading.run;
        [PlaceGrid::new(product).padded, weights.next_multiple_of(ROWS)]
    }
}

/// The planes of a prepared image in bf16: elements of f32.
pub(super) fn planes_len(product: &ConvProduct) -> usize {
    // The planes of channels are read a block of places beyond the end.
    let [len, number] = planes(product);
    len_in_f32(len * number + TALL)
}

/// The scratch memory of [`fill_planes`], in elements of f32.
pub(super) fn spare_len(product: &ConvProduct) -> usize {
    if are_of_channels(&product.conv) { 0 } else { len_in_f32(product.reading.elems + TALL) }
}

/// The sums of gradients of weights, in whole tiles.
pub(super) fn gradient_len(product: &ConvProduct) -> usize {
    let ConvProduct { reading, columns, .. } = product;
    (reading.kernel_rows * reading.run).next_multiple_of(ROWS) * columns.padded
}

/// The gradients of the output of one image as pairs of places: elements of f32.
pub(super) fn pairs_len(product: &ConvProduct) -> usize {
    PlaceGrid::new(product).padded / 2 * product.columns.padded
}

/// Writes the planes of a prepared image. `spare` and the elements after the last plane start as zeros, and stay so.
pub(super) fn fill_planes(
    level: SimdLevel,
    product: &ConvProduct,
    image: &[f32],
    spare: &mut [f32],
    to: &mut [f32],
) {
    let ConvProduct { reading, conv, .. } = product;
    let (channels, elems) = (conv.c_in, reading.elems);
    let of_channels = |to: &mut [f32]| {
        let sizes = [elems / channels, channels];
        let to = &mut as_bf16(to)[..elems];
        vectorized!(level, positions_to_planes::<bf16>, level, image, channels, sizes, None, to);
    };
    if are_of_channels(conv) {
        return of_channels(to);
    }
    of_channels(spare);
    let (row, [len, _]) = (PlaceGrid::new(product).row, planes(product));
    let weights = 0..reading.kernel_rows * reading.run;
    for (weight, plane) in weights.zip(as_bf16(to).chunks_exact_mut(len)) {
        let (u, step) = (weight / reading.run, weight % reading.run);
        let from = step % channels * (elems / channels) + u * row + step / channels;
        plane.copy_from_slice(&read_bf16(spare)[from..from + len]);
    }
}

/// Writes the pairs of gradients (places, padded columns): for each block of columns and each two places, the pairs of the columns.
pub(super) fn fill_pairs(
    level: SimdLevel,
    product: &ConvProduct,
    gradients: &[f32],
    pairs: &mut [f32],
) {
    let (padded, block) = (product.columns.padded, product.columns.block);
    vectorized!(level, interleave_all, gradients, padded, block, pairs);
}

#[inline(always)]
fn interleave_all(from: &[f32], stride: usize, block: usize, to: &mut [f32]) {
    interleave(from, stride, block, to, narrow);
}

/// Adds to `sums` (kernel rows, run, padded columns) the gradients of the weights from `num_images` images: their planes, and their
/// gradients as pairs.
pub(super) fn add_images(
    tiles: TilesOf,
    product: &ConvProduct,
    num_images: usize,
    planes: &[f32],
    pairs: &[f32],
    sums: &mut [f32],
) {
    let ConvProduct { reading, conv, .. } = product;
    assert!(
        planes.len() >= num_images * planes_len(product)
            && pairs.len() >= num_images * pairs_len(product)
    );
    assert!(have_planes(conv) && reading.position_stride == conv.c_in);
    assert!(sums.len() >= gradient_len(product));
    with_tiles!(tiles, product.columns.wide, add_blocks(product, num_images, planes, pairs, sums))
}

#[inline(always)]
fn add_blocks<T: Tiles, const C: usize>(
    tiles: &mut T,
    product: &ConvProduct,
    num_images: usize,
    planes: &[f32],
    pairs: &[f32],
    sums: &mut [f32],
) {
    let ConvProduct { reading, conv, columns, .. } = product;
    let places = PlaceGrid::new(product);
    let (planes_len, pairs_len) = (planes_len(product), pairs_len(product));
    let [len, _] = self::planes(product);
    let planes = read_bf16(planes).as_ptr();
    let stride = columns.padded * size_of::<f32>();
    // Where the planes of 16 weights begin: each weight's own, or that of its channel, at its row and column of the kernel.
    let at = |weight: usize| {
        if are_of_channels(conv) {
            let (u, step) = (weight / reading.run, weight % reading.run);
            step % conv.c_in * len + u * places.row + step / conv.c_in
        } else {
            weight * len
        }
    };
    let weights = reading.kernel_rows * reading.run;
    for weight in (0..weights).step_by(TALL) {
        let is_whole = weight + ROWS < weights;
        let rows = [at(weight), at(if is_whole { weight + ROWS } else { weight })];
        for block in 0..columns.num_blocks() {
            let sum = &mut sums[weight * columns.padded + block * columns.block..];
            // SAFETY: the sums have rows for 16 weights, or 32 if the block is whole; the planes have all places of these
            // weights, and a block after them; the pairs have all places.
            unsafe {
                tiles::load_sums::<T, C>(tiles, sum.as_ptr().cast(), stride, is_whole);
                for image in 0..num_images {
                    let a = rows.map(|at| planes.add(2 * image * planes_len + at));
                    let b = image * pairs_len + block * places.padded / 2 * columns.block;
                    let b = pairs.as_ptr().add(b);
                    for first in (0..places.padded).step_by(STEP) {
                        let a = a.map(|a| a.add(first).cast());
                        let b = b.add(first / 2 * columns.block).cast();
                        tiles::add_block::<T, C>(tiles, a, len * size_of::<bf16>(), b);
                    }
                }
                tiles::store_sums::<T, C>(tiles, sum.as_mut_ptr().cast(), stride, is_whole);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use paceline_memory::{Allocator, Category, DType, Tensor};

    use super::super::{Conv2d, backward_input, backward_weight, forward};
    use crate::tiles::EMULATES;
    use crate::{Bf16Products, Compute, ImageLayout, conv_relu_pool};

    /// Small integers: all sums of their products are exact, in any order.
    fn integers(compute: &Compute, dtype: DType, shape: [usize; 4], seed: usize) -> Tensor {
        let tensor = compute.allocator.tensor(dtype, shape, Category::Data).unwrap();
        let at = |i: usize| ((i * 7 + i / 5 + seed) % 9) as f32 - 4.0;
        match dtype {
            DType::BF16 => {
                let mut elems = tensor.write::<bf16>().unwrap();
                elems.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(at(i)));
            }
            _ => {
                let mut elems = tensor.write::<f32>().unwrap();
                elems.iter_mut().enumerate().for_each(|(i, x)| *x = at(i));
            }
        }
        tensor
    }

    fn bits(tensor: &Tensor) -> Vec<u32> {
        match tensor.dtype() {
            DType::BF16 => {
                tensor.read::<bf16>().unwrap().iter().map(|x| x.to_f32().to_bits()).collect()
            }
            _ => tensor.read::<f32>().unwrap().iter().map(|x| x.to_bits()).collect(),
        }
    }

    /// Output and all gradients of a convolution.
    fn results(compute: &Compute, conv: &Conv2d, input: DType, batch: usize) -> [Vec<u32>; 4] {
        let make = |dtype, shape, seed| integers(compute, dtype, shape, seed);
        let x = make(input, conv.input_shape(batch), 1);
        let w = make(DType::F32, conv.weight_shape(), 2);
        let dy = make(DType::BF16, conv.output_shape(batch), 3);
        let vector = |seed| {
            let b = make(DType::F32, [1, 1, 1, conv.c_out], seed);
            b.view([conv.c_out]).unwrap()
        };
        let (b, db) = (vector(4), vector(5));
        // What is overwritten, and what is added to.
        let y = make(DType::BF16, conv.output_shape(batch), 6);
        let dw = make(DType::F32, conv.weight_shape(), 7);
        let dx = make(input, conv.input_shape(batch), 8);
        forward(compute, conv, &x, &w, &b, &y).unwrap();
        backward_weight(compute, conv, &x, &dy, &dw, &db, true).unwrap();
        backward_input(compute, conv, &w, &dy, &dx).unwrap();
        [bits(&y), bits(&dw), bits(&db), bits(&dx)]
    }

    #[test]
    fn tiles_compute_what_registers_compute() {
        let same = Conv2d::same3x3;
        let all = [
            // Whole tiles; tiles that end in the middle; one tile side by side.
            same(8, 6, 32, 64),
            same(7, 5, 48, 40),
            same(4, 9, 16, 16),
            // Runs that end in the middle of a tile, with planes of weights and without tiles for their gradients.
            same(6, 6, 3, 20),
            same(9, 33, 1, 32),
            Conv2d { kernel: (5, 4), padding: 2, ..same(5, 7, 2, 16) },
            Conv2d { kernel: (2, 5), padding: 1, ..same(6, 7, 20, 8) },
            // Rows that are left out, and a kernel without neighbors.
            Conv2d { stride: 2, ..same(9, 8, 16, 24) },
            Conv2d { kernel: (1, 1), padding: 0, ..same(5, 5, 32, 33) },
        ];
        for (conv, layout) in
            all.into_iter().flat_map(|conv| ImageLayout::ALL.map(|layout| (conv, layout)))
        {
            let conv = Conv2d { layout, ..conv };
            for (input, threads) in [(DType::BF16, 1), (DType::F32, 2)] {
                let compute = Compute::new(threads, Allocator::new()).unwrap();
                let compute = compute.with_bf16_products(Bf16Products::Widened).unwrap();
                EMULATES.set(false);
                // A part of the batch is one image, or several where images are small.
                let batch = if conv.c_in * conv.height * conv.width < 600 { 17 } else { 3 };
                let expected = results(&compute, &conv, input, batch);
                EMULATES.set(true);
                let found = results(&compute, &conv, input, batch);
                for (name, found, expected) in named(found, expected) {
                    assert_eq!(found, expected, "{name} of {conv:?}");
                }
            }
        }
    }

    fn named(
        a: [Vec<u32>; 4],
        b: [Vec<u32>; 4],
    ) -> impl Iterator<Item = (&'static str, Vec<u32>, Vec<u32>)> {
        let names = ["output", "gradient of the weight", "of the bias", "of the input"];
        names.into_iter().zip(a).zip(b).map(|((name, a), b)| (name, a, b))
    }

    /// The same of a convolution that is pooled: outputs and winners, and gradients of weight and input.
    fn pooled(compute: &Compute, conv: &Conv2d) -> [Vec<u32>; 4] {
        let make = |dtype, shape, seed| integers(compute, dtype, shape, seed);
        let shape = conv_relu_pool::output_shape(conv, 2);
        let x = make(DType::BF16, conv.input_shape(2), 1);
        let w = make(DType::F32, conv.weight_shape(), 2);
        let [b, db] = [4, 5].map(|seed| make(DType::F32, [1, 1, 1, conv.c_out], seed));
        let [b, db] = [b, db].map(|tensor| tensor.view([conv.c_out]).unwrap());
        let [y, dy] = [6, 3].map(|seed| make(DType::BF16, shape, seed));
        let winners = compute.allocator.tensor(DType::U8, shape, Category::Data).unwrap();
        let dw = make(DType::F32, conv.weight_shape(), 7);
        let dx = make(DType::BF16, conv.input_shape(2), 8);
        conv_relu_pool::forward(compute, conv, &x, &w, &b, &y, &winners).unwrap();
        conv_relu_pool::backward_weight(compute, conv, &x, &winners, &dy, &dw, &db, false).unwrap();
        conv_relu_pool::backward_input(compute, conv, &w, &winners, &dy, &dx).unwrap();
        let winners = winners.read::<u8>().unwrap().iter().map(|x| u32::from(*x)).collect();
        [bits(&y), winners, bits(&dw), bits(&dx)]
    }

    #[test]
    fn pooled_images_are_those_of_registers() {
        // Also of odd sizes, whose last rows and columns are left out.
        for (height, width, c_in) in [(6, 8, 16), (7, 9, 3), (5, 5, 1)] {
            for layout in ImageLayout::ALL {
                let conv = Conv2d { layout, ..Conv2d::same3x3(height, width, c_in, 24) };
                let compute = Compute::new(1, Allocator::new()).unwrap();
                let compute = compute.with_bf16_products(Bf16Products::Widened).unwrap();
                let [registers, tiles] = [false, true].map(|emulates| {
                    EMULATES.set(emulates);
                    pooled(&compute, &conv)
                });
                assert_eq!(registers, tiles, "{conv:?}");
            }
        }
    }

    #[test]
    fn an_infinite_number_stays_in_its_patches() {
        // Of one step of a run that ends in the middle of a tile, and of a whole step with such an end.
        for c_in in [1, 3, 12, 16] {
            let conv = Conv2d::same3x3(6, 7, c_in, 16);
            let compute = Compute::new(1, Allocator::new()).unwrap();
            let compute = compute.with_bf16_products(Bf16Products::Widened).unwrap();
            let make = |dtype, shape, seed| integers(&compute, dtype, shape, seed);
            let (x, w) = (
                make(DType::BF16, conv.input_shape(2), 1),
                make(DType::F32, conv.weight_shape(), 2),
            );
            x.write::<bf16>().unwrap()[c_in * 24] = bf16::INFINITY;
            w.write::<f32>().unwrap().fill(1.0);
            let b = make(DType::F32, [1, 1, 1, 16], 4).view([16]).unwrap();
            let outputs = [false, true].map(|emulates| {
                EMULATES.set(emulates);
                let y = make(DType::BF16, conv.output_shape(2), 6);
                forward(&compute, &conv, &x, &w, &b, &y).unwrap();
                bits(&y)
            });
            assert!(outputs[0].iter().filter(|y| **y == f32::INFINITY.to_bits()).count() == 9 * 16);
            assert_eq!(outputs[0], outputs[1], "{c_in} channels");
        }
    }
}
