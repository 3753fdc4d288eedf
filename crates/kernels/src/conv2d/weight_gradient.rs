//! The gradient of a convolution's weight.
//!
//! In: images and gradients of the output. Out: the gradient of the weight. The batch is divided into parts, each part has
//! sums of its own, and these are added in order. Order of summation within a part: image, row, column.

use std::ops::Range;

use paceline_memory::DType;

use super::direct::{Columns, even_parts};
use super::input_gradient::Grid;
use super::prepare::{Reading, fill_image};
use super::tile::{self, GradientTile};
use super::{Conv2d, columns_for};
use crate::stored::SinglePrecision;
use crate::{Compute, Result, SimdLevel};

/// Output gradients of this size stay in the first-level cache while all weights are computed.
const ROWS_BYTES: usize = 24 << 10;

/// Images and gradients of this size stay in the second-level cache (1 MB or more).
const GROUP_BYTES: usize = 512 << 10;

/// The most parts of a batch in bf16. More would take more memory, because each part has its own sums.
const MOST_PARTS: usize = 8;

/// A part of a batch with sums of its own.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    images: Range<usize>,
    /// The number of images that scratch memory is taken for.
    pub(crate) room: usize,
}

/// The parts of a batch. In f32 there is one for each thread, so the bits depend on the number of threads. In bf16 the parts
/// depend on the batch only, and so do the bits. All of them take as much memory as the largest one.
pub(crate) fn parts(compute: &Compute, batch: usize, d_output: DType) -> Vec<Part> {
    match d_output {
        DType::BF16 => {
            let room = batch.div_ceil(MOST_PARTS).max(1);
            even_parts(batch, room).map(|images| Part { images, room }).collect()
        }
        _ => {
            let part = |images: Range<usize>| Part { room: images.len(), images };
            compute.threads.split(batch).into_iter().map(part).collect()
        }
    }
}

/// The gradient of the weight.
pub(crate) struct WeightGradient<'a> {
    conv: &'a Conv2d,
    reading: Reading,
    columns: Columns,
    rows: usize,
    positions: usize,
}

impl<'a> WeightGradient<'a> {
    /// For output gradients that are zero outside the first `rows` rows and `positions` columns.
    pub(crate) fn new(compute: &Compute, conv: &'a Conv2d, rows: usize, positions: usize) -> Self {
        let (reading, columns) = (Reading::input(conv), columns_for(compute, conv.c_out));
        Self { conv, reading, columns, rows, positions }
    }

    /// Elements of one thread's sums: the weight, with padded columns.
    pub(crate) fn sum_elems(&self) -> usize {
        self.reading.kernel_rows * self.reading.run * self.columns.padded
    }

    /// Elements of the prepared images, and of their output gradients, that a thread holds at a time while it works on
    /// `part_len` images.
    pub(crate) fn group_elems(&self, part_len: usize) -> [usize; 2] {
        let dy_elems = self.rows * self.positions * self.columns.padded;
        let bytes = (self.reading.elems + dy_elems) * size_of::<f32>();
        let group = (GROUP_BYTES / bytes).clamp(1, part_len.max(1));
        [group * self.reading.elems, group * dy_elems]
    }

    /// Writes or adds to `d_weight` (kh, kw, c_in, c_out). `image(n)` is input image `n`, which is rounded to `S`;
    /// `fill(n, grid)` writes its output gradients into a grid of (rows, positions, c_out).
    pub(crate) fn run<'x, X: SinglePrecision, S: SinglePrecision>(
        &self,
        compute: &Compute,
        batch: usize,
        image: impl Fn(usize) -> &'x [X] + Send + Sync,
        fill: impl Fn(usize, Grid<'_>) + Send + Sync,
        d_weight: &mut [f32],
        accumulate: bool,
    ) -> Result<()> {
        let sum_elems = self.sum_elems();
        let parts = parts(compute, batch, S::DTYPE);
        let mut sums = compute.scratch(parts.len() * sum_elems)?;
        sums.fill(0.0);
        let items = parts.into_iter().zip(sums.chunks_exact_mut(sum_elems)).collect();
        compute.threads.for_each(items, |(part, sum)| {
            self.run_part::<X, S>(compute, part, &image, &fill, sum)
        })?;
        if !accumulate {
            d_weight.fill(0.0);
        }
        for sum in sums.chunks_exact(sum_elems) {
            let rows = sum.chunks_exact(self.columns.padded);
            for (to, from) in d_weight.chunks_exact_mut(self.conv.c_out).zip(rows) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to += from;
                }
            }
        }
        Ok(())
    }

    fn run_part<'x, X: SinglePrecision, S: SinglePrecision>(
        &self,
        compute: &Compute,
        part: Part,
        image: &impl Fn(usize) -> &'x [X],
        fill: &impl Fn(usize, Grid<'_>),
        sum: &mut [f32],
    ) -> Result<()> {
        let Self { conv, reading, columns, rows, positions } = self;
        let (x_elems, dy_elems) = (reading.elems, rows * positions * columns.padded);
        let [all_x, all_dy] = self.group_elems(part.room);
        let group = all_x / x_elems;
        let mut x = compute.scratch(all_x)?;
        let mut dy = compute.scratch(all_dy)?;
        x.fill(0.0);
        dy.fill(0.0);
        let images: Vec<usize> = part.images.collect();
        for images in images.chunks(group) {
            for (&n, to) in images.iter().zip(x.chunks_exact_mut(x_elems)) {
                fill_image::<X, S>(compute.simd, conv, image(n), to);
            }
            for (&n, elems) in images.iter().zip(dy.chunks_exact_mut(dy_elems)) {
                let row_stride = positions * columns.padded;
                fill(n, Grid { elems, row_stride, position_stride: columns.padded });
            }
            self.add_group(compute.simd, images.len(), &x, &dy, sum);
        }
        Ok(())
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
        let Self { reading, columns, rows, positions, .. } = self;
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
