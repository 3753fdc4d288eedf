//! The gradient of a convolution's weight.
//!
//! In: images and gradients of the output. Out: the gradient of the weight. The batch is divided into parts, each part has
//! sums of its own, and these are added by the tree of [`paceline_numeric::tree`]. Order of summation within a part: image, row,
//! column. Minimal filtering has no parts (see `winograd`).

use std::ops::Range;

use super::Conv2d;
use super::direct::{ConvForm, ConvProduct, Memory, Slices, even_parts};
use super::in_tiles::{self, PlaceGrid};
use super::prepare::{Fill, PositionGrid, fill_image};
use super::tile::{self, GradientTile};
use super::winograd;
use crate::simd::vectorized;
use crate::stored::SinglePrecision;
use crate::threads::batches;
use crate::tiles::Ways;
use crate::{Processor, SimdLevel, Threads, scratch};

/// Output gradients of this size stay in the first-level cache while all weights are computed.
const ROWS_BYTES: usize = 24 << 10;

/// Images and gradients of this size stay in the second-level cache (1 MB or more).
const GROUP_BYTES: usize = 512 << 10;

/// The most parts of a batch, and so of threads. More would take more memory, because each part has its own sums.
const MOST_PARTS: usize = 8;

/// The parts of a batch, each with its own sums. They, and so the bits, depend on the batch only.
fn parts(batch: usize) -> Vec<Range<usize>> {
    even_parts(batch, batch.div_ceil(MOST_PARTS).max(1)).collect()
}

/// The gradient of the weight, with the numbers of the convolution itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightGradient(ConvProduct);

impl WeightGradient {
    /// For output gradients that are zero outside the first `rows` rows and `positions` columns.
    pub(crate) fn new(ways: Ways, conv: &Conv2d, rows: usize, positions: usize) -> Self {
        let tiles = ways.tiles.filter(|_| in_tiles::have_planes(conv));
        let conv = Conv2d { direct: winograd::is_weight_direct(conv), ..*conv };
        Self(ConvProduct::new(Ways { tiles, ..ways }, &conv, rows, positions))
    }

    /// The scratch memory for a batch: the sums of each part, and for each thread a group of prepared images and their output
    /// gradients.
    pub(crate) fn memory(&self, threads: &Threads, batch: usize) -> Memory {
        if self.0.form == ConvForm::Winograd {
            return winograd::gradient_memory(&self.0, threads, batch);
        }
        let parts = parts(batch);
        let groups = threads.split(parts.len()).into_iter().map(|own| self.group(&parts[own]));
        let images: usize = groups.sum();
        let (own, all) = (self.memory_of_thread(), self.memory_of_image());
        let threads = threads.split(parts.len()).len();
        (
            scratch(parts.len() * self.sum_elems()),
            scratch(threads * own.0 + images * all.0),
            scratch(threads * own.1 + images * all.1),
        )
    }

    fn sum_elems(&self) -> usize {
        let Self(product) = self;
        match product.form {
            ConvForm::Tiles(_) => in_tiles::gradient_len(product),
            _ => product.weight_elems(),
        }
    }

    /// Elements for the images, and for the gradients, that a thread needs once. Tiles read another form of both.
    fn memory_of_thread(&self) -> (usize, usize) {
        let Self(product) = self;
        match product.form {
            ConvForm::Tiles(_) => {
                let gradients = PlaceGrid::new(product).padded * product.columns.padded;
                (product.reading.elems + in_tiles::spare_len(product), gradients)
            }
            _ => (0, 0),
        }
    }

    /// The same for each image that a thread prepares at a time.
    fn memory_of_image(&self) -> (usize, usize) {
        let Self(product) = self;
        match product.form {
            ConvForm::Tiles(_) => (in_tiles::planes_len(product), in_tiles::pairs_len(product)),
            _ => (product.reading.elems, product.output_elems()),
        }
    }

    /// The number of images that a thread with these parts prepares at a time.
    fn group(&self, parts: &[Range<usize>]) -> usize {
        let (image, gradients) = self.memory_of_image();
        let longest = parts.iter().map(Range::len).max().unwrap_or(0);
        (GROUP_BYTES / size_of::<f32>() / (image + gradients)).clamp(1, longest.max(1))
    }

    /// Writes or adds to `d_weight` (kh, kw, c_in, c_out), from input images `x`, which are rounded to `S`. `fill(n, grid)`
    /// writes the output gradients of image `n` into a grid of (rows, positions, c_out).
    pub(crate) fn run<X: SinglePrecision, S: SinglePrecision>(
        &self,
        cpu: &Processor,
        x: &[X],
        (sums, mut images, mut gradients): Slices<'_>,
        fill: Fill<'_>,
        d_weight: &mut [f32],
        accumulate: bool,
    ) {
        let Self(product @ ConvProduct { conv, columns, .. }) = self;
        if product.form == ConvForm::Winograd {
            let sums = winograd::gradient::<X, S>(cpu, product, x, (sums, images, gradients), fill);
            return write_sums(sums, columns.padded, conv.c_out, d_weight, accumulate);
        }
        let sum_elems = self.sum_elems();
        let parts = parts(x.len() / conv.input_elems());
        sums.fill(0.0);
        let mut items = Vec::new();
        for (first, sums) in batches(cpu, sums, sum_elems, parts.len()) {
            let parts = &parts[first..first + sums.len() / sum_elems];
            let (group, own, all) =
                (self.group(parts), self.memory_of_thread(), self.memory_of_image());
            let images = images.split_off_mut(..own.0 + group * all.0);
            let gradients = gradients.split_off_mut(..own.1 + group * all.1);
            let memory = images.zip(gradients).expect("the memory is that of all groups");
            items.push((parts, sums, memory));
        }
        cpu.threads.for_each(items, |(parts, sums, (images, gradients))| {
            images.fill(0.0);
            gradients.fill(0.0);
            for (part, sum) in parts.iter().zip(sums.chunks_exact_mut(sum_elems)) {
                self.add_part::<X, S>(cpu.simd, part.clone(), x, fill, (images, gradients), sum);
            }
        });
        vectorized!(cpu.simd, add_parts, &mut *sums, sum_elems);
        write_sums(sums, columns.padded, conv.c_out, d_weight, accumulate);
    }

    /// Adds the gradients of a part of the batch to `sum`, one group of images after the other.
    fn add_part<X: SinglePrecision, S: SinglePrecision>(
        &self,
        level: SimdLevel,
        part: Range<usize>,
        x: &[X],
        fill: Fill<'_>,
        (images, gradients): (&mut [f32], &mut [f32]),
        sum: &mut [f32],
    ) {
        let Self(product @ ConvProduct { conv, positions, columns, .. }) = self;
        let (own, (x_elems, dy_elems)) = (self.memory_of_thread(), self.memory_of_image());
        let (image, images) = images.split_at_mut(own.0);
        let (gradient, gradients) = gradients.split_at_mut(own.1);
        let in_elems = conv.input_elems();
        let row = match product.form {
            ConvForm::Tiles(_) => PlaceGrid::new(product).row,
            _ => *positions,
        };
        let fill_image = |n: usize, to: &mut [f32]| {
            let x = &x[n * in_elems..(n + 1) * in_elems];
            fill_image::<X, S>(level, conv, &product.reading, x, to);
        };
        let fill_gradients = |n: usize, elems: &mut [f32]| {
            let (row_stride, position_stride) = (row * columns.padded, columns.padded);
            fill(n, PositionGrid { elems, row_stride, position_stride });
        };
        for start in part.clone().step_by(images.len() / x_elems) {
            let group = start..part.end.min(start + images.len() / x_elems);
            for (n, to) in group.clone().zip(images.chunks_exact_mut(x_elems)) {
                match product.form {
                    ConvForm::Tiles(_) => {
                        let (image, spare) = image.split_at_mut(product.reading.elems);
                        fill_image(n, image);
                        in_tiles::fill_planes(level, product, image, spare, to);
                    }
                    _ => fill_image(n, to),
                }
            }
            for (n, to) in group.clone().zip(gradients.chunks_exact_mut(dy_elems)) {
                match product.form {
                    ConvForm::Tiles(_) => {
                        fill_gradients(n, gradient);
                        in_tiles::fill_pairs(level, product, gradient, to);
                    }
                    _ => fill_gradients(n, to),
                }
            }
            match product.form {
                ConvForm::Tiles(tiles) => {
                    in_tiles::add_images(tiles, product, group.len(), images, gradients, sum);
                }
                _ => self.add_group(level, group.len(), images, gradients, sum),
            }
        }
    }

    /// Adds the gradients of the first `num_images` prepared images to `sum`.
    fn add_group(
        &self,
        level: SimdLevel,
        num_images: usize,
        x: &[f32],
        dy: &[f32],
        sum: &mut [f32],
    ) {
        let Self(ConvProduct { reading, columns, rows, positions, .. }) = self;
        // The tiles below read and write through addresses. These checks bound all of them.
        let last = (rows - 1) * reading.row_stride
            + (positions - 1) * reading.position_stride
            + (reading.kernel_rows - 1) * reading.kernel_row_stride
            + reading.run;
        assert!(last <= reading.elems && x.len() >= num_images * reading.elems);
        assert!(dy.len() >= num_images * rows * positions * columns.padded);
        assert!(sum.len() >= reading.kernel_rows * reading.run * columns.padded);

        let row_bytes = positions * columns.block * size_of::<f32>();
        let at_a_time = (ROWS_BYTES / row_bytes).max(1);
        let mut list = Vec::with_capacity(at_a_time);
        let tiles: Vec<_> = even_parts(reading.run, columns.tall)
            .map(|part| (part.start, tile::gradient_kernel(level, part.len(), columns.wide)))
            .collect();
        for chunk in even_parts(num_images * rows, at_a_time) {
            for u in 0..reading.kernel_rows {
                list.clear();
                let live = chunk.clone().filter(|row| reading.is_live(row % rows, u));
                list.extend(live.map(|row| {
                    let x_at = row / rows * reading.elems
                        + row % rows * reading.row_stride
                        + u * reading.kernel_row_stride;
                    let dy_at = row * positions * columns.padded;
                    (x[x_at..].as_ptr(), dy[dy_at..].as_ptr())
                }));
                for block in 0..columns.num_blocks() {
                    for &(t, kernel) in &tiles {
                        let at = (u * reading.run + t) * columns.padded + block * columns.block;
                        let tile = GradientTile {
                            rows: &list,
                            x_offset: t,
                            dy_offset: block * columns.block,
                            positions: *positions,
                            x_stride: reading.position_stride,
                            dy_stride: columns.padded,
                            d_w: sum[at..].as_mut_ptr(),
                            d_w_stride: columns.padded,
                        };
                        // SAFETY: the assertions above bound all three arrays for every row of
                        // every image and every weight; `level` is this processor's.
                        unsafe { kernel(tile) }
                    }
                }
            }
        }
    }
}

/// Writes the sums without the padding of their columns, or adds them.
fn write_sums(sums: &[f32], padded: usize, channels: usize, to: &mut [f32], accumulate: bool) {
    for (to, from) in to.chunks_exact_mut(channels).zip(sums.chunks_exact(padded)) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = if accumulate { *to + from } else { *from };
        }
    }
}

/// Adds the sums of all parts, of `elems` elements each, by the tree. Those of the first part become the sum.
#[inline(always)]
fn add_parts(sums: &mut [f32], elems: usize) {
    let count = sums.len() / elems;
    let mut width = 1;
    while width < count {
        for at in (0..count - width).step_by(2 * width) {
            let (left, right) = sums[at * elems..].split_at_mut(width * elems);
            left[..elems].iter_mut().zip(&right[..elems]).for_each(|(left, right)| *left += right);
        }
        width *= 2;
    }
}
