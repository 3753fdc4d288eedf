//! The gradient of a convolution's weight.
//!
//! In: images and gradients of the output. Out: the gradient of the weight. The batch is divided into parts, each part has
//! sums of its own, and these are added in order. Order of summation within a part: image, row, column.

use std::ops::Range;

use paceline_memory::DType;

use super::Conv2d;
use super::direct::{Memory, Product, Slices, even_parts};
use super::input_gradient::Grid;
use super::prepare::fill_image;
use super::tile::{self, GradientTile};
use crate::compute::batches;
use crate::stored::SinglePrecision;
use crate::{Processor, SimdLevel, Threads, scratch};

/// Output gradients of this size stay in the first-level cache while all weights are computed.
const ROWS_BYTES: usize = 24 << 10;

/// Images and gradients of this size stay in the second-level cache (1 MB or more).
const GROUP_BYTES: usize = 512 << 10;

/// The most parts of a batch in 16 bits. More would take more memory, because each part has its own sums.
const MOST_PARTS: usize = 8;

/// The parts of a batch, each of which has sums of its own. In f32 there is one for each thread, so the bits depend on the
/// number of threads. In 16 bits the parts depend on the batch only, and so do the bits.
fn parts<S: SinglePrecision>(threads: &Threads, batch: usize) -> Vec<Range<usize>> {
    match S::DTYPE {
        DType::BF16 | DType::F16 => even_parts(batch, batch.div_ceil(MOST_PARTS).max(1)).collect(),
        _ => threads.split(batch),
    }
}

/// The gradient of the weight, with the numbers of the convolution itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightGradient(Product);

impl WeightGradient {
    /// For output gradients that are zero outside the first `rows` rows and `positions` columns.
    pub(crate) fn new(level: SimdLevel, conv: &Conv2d, rows: usize, positions: usize) -> Self {
        Self(Product::new(level, conv, rows, positions))
    }

    /// The scratch memory for a batch whose output gradients are `S`: the sums of each part, and for each thread a group of
    /// prepared images and their output gradients.
    pub(crate) fn memory<S: SinglePrecision>(&self, threads: &Threads, batch: usize) -> Memory {
        let parts = parts::<S>(threads, batch);
        let groups = threads.split(parts.len()).into_iter().map(|own| self.group(&parts[own]));
        let images: usize = groups.sum();
        let Self(product) = self;
        (
            scratch(parts.len() * product.weight_elems()),
            scratch(images * product.reading.elems),
            scratch(images * product.output_elems()),
        )
    }

    /// The number of images that a thread with these parts prepares at a time.
    fn group(&self, parts: &[Range<usize>]) -> usize {
        let bytes = (self.0.reading.elems + self.0.output_elems()) * size_of::<f32>();
        let longest = parts.iter().map(Range::len).max().unwrap_or(0);
        (GROUP_BYTES / bytes).clamp(1, longest.max(1))
    }

    /// Writes or adds to `d_weight` (kh, kw, c_in, c_out), from input images `x`, which are rounded to `S`. `fill(n, grid)`
    /// writes the output gradients of image `n` into a grid of (rows, positions, c_out).
    pub(crate) fn run<X: SinglePrecision, S: SinglePrecision>(
        &self,
        cpu: &Processor,
        x: &[X],
        (sums, mut images, mut gradients): Slices<'_>,
        fill: impl Fn(usize, Grid<'_>) + Send + Sync,
        d_weight: &mut [f32],
        accumulate: bool,
    ) {
        let Self(product @ Product { conv, reading, columns, .. }) = self;
        let sum_elems = product.weight_elems();
        let parts = parts::<S>(&cpu.threads, x.len() / conv.input_elems());
        sums.fill(0.0);
        let mut items = Vec::new();
        for (first, sums) in batches(cpu, sums, sum_elems, parts.len()) {
            let parts = &parts[first..first + sums.len() / sum_elems];
            let group = self.group(parts);
            let images = images.split_off_mut(..group * reading.elems);
            let gradients = gradients.split_off_mut(..group * product.output_elems());
            let memory = images.zip(gradients).expect("the memory is that of all groups");
            items.push((parts, sums, memory));
        }
        cpu.threads.for_each(items, |(parts, sums, (images, gradients))| {
            images.fill(0.0);
            gradients.fill(0.0);
            for (part, sum) in parts.iter().zip(sums.chunks_exact_mut(sum_elems)) {
                self.add_part::<X, S>(cpu.simd, part.clone(), x, &fill, (images, gradients), sum);
            }
        });
        if !accumulate {
            d_weight.fill(0.0);
        }
        for sum in sums.chunks_exact(sum_elems) {
            let rows = sum.chunks_exact(columns.padded);
            for (to, from) in d_weight.chunks_exact_mut(conv.c_out).zip(rows) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to += from;
                }
            }
        }
    }

    /// Adds the gradients of a part of the batch to `sum`, one group of images after the other.
    fn add_part<X: SinglePrecision, S: SinglePrecision>(
        &self,
        level: SimdLevel,
        part: Range<usize>,
        x: &[X],
        fill: &impl Fn(usize, Grid<'_>),
        (images, gradients): (&mut [f32], &mut [f32]),
        sum: &mut [f32],
    ) {
        let Self(product @ Product { conv, reading, columns, positions, .. }) = self;
        let (x_elems, dy_elems) = (reading.elems, product.output_elems());
        let in_elems = conv.input_elems();
        for start in part.clone().step_by(images.len() / x_elems) {
            let group = start..part.end.min(start + images.len() / x_elems);
            for (n, to) in group.clone().zip(images.chunks_exact_mut(x_elems)) {
                fill_image::<X, S>(level, conv, &x[n * in_elems..(n + 1) * in_elems], to);
            }
            for (n, elems) in group.clone().zip(gradients.chunks_exact_mut(dy_elems)) {
                let row_stride = positions * columns.padded;
                fill(n, Grid { elems, row_stride, position_stride: columns.padded });
            }
            self.add_group(level, group.len(), images, gradients, sum);
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
        let Self(Product { reading, columns, rows, positions, .. }) = self;
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
