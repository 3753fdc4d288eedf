//! The loops around the register tiles: convolution forward, and its two gradients.
//!
//! Order of summation for an output value: kernel row, then kernel column, then channel. For a
//! weight's gradient: image, row, column. Neither order depends on where a value lies in memory.

use paceline_memory::WriteGuard;

use super::prepare::{Reading, fill_image, pack_panels};
use super::tile::{self, GradientTile, ProductTile};
use super::{Conv2d, batches, columns_for};
use crate::{Compute, Result, SimdLevel};

/// A panel of weights of this size stays in the first-level cache (32 KB or more) together with the
/// other data of a tile.
const PANEL_BYTES: usize = 24 << 10;

/// Output gradients of this size stay in the first-level cache while all weights are computed.
const ROWS_BYTES: usize = 24 << 10;

/// Images and gradients of this size stay in the second-level cache (1 MB or more).
const GROUP_BYTES: usize = 512 << 10;

/// How channels are distributed over registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// Number of channels without padding.
    pub(crate) channels: usize,
    /// Number of channels that are computed: `blocks * block`.
    pub(crate) padded: usize,
    /// Channels of one block: `wide` registers.
    pub(crate) block: usize,
    /// Registers of one block.
    wide: usize,
    /// The largest number of rows of a tile.
    tall: usize,
}

impl Columns {
    pub(crate) fn new(level: SimdLevel, channels: usize) -> Self {
        let lanes = tile::lanes(level);
        let (widest, tallest) = tile::limits(level);
        let registers = channels.div_ceil(lanes);
        let blocks = registers.div_ceil(widest);
        let wide = registers.div_ceil(blocks);
        let block = wide * lanes;
        Self { channels, padded: blocks * block, block, wide, tall: tallest(wide) }
    }

    fn num_blocks(&self) -> usize {
        self.padded / self.block
    }
}

/// Splits `len` into parts of at most `most`, as even as possible.
fn even_parts(len: usize, most: usize) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    let parts = len.div_ceil(most).max(1);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

/// A convolution with fixed weights, ready to run on one prepared image after the other.
pub(crate) struct Product {
    reading: Reading,
    pub(crate) columns: Columns,
    panels: WriteGuard<f32>,
    rows: usize,
    positions: usize,
}

impl Product {
    /// The convolution itself, for all its output positions.
    pub(crate) fn forward(compute: &Compute, conv: &Conv2d, weight: &[f32]) -> Result<Self> {
        Self::forward_part(compute, conv, weight, conv.out_height(), conv.out_width())
    }

    /// The convolution for the first `rows` rows and `positions` columns of the output.
    pub(crate) fn forward_part(
        compute: &Compute,
        conv: &Conv2d,
        weight: &[f32],
        rows: usize,
        positions: usize,
    ) -> Result<Self> {
        let (reading, columns) = (Reading::input(conv), columns_for(compute, conv.c_out));
        let c_out = conv.c_out;
        Self::new(compute, reading, columns, rows, positions, |k, o| weight[k * c_out + o])
    }

    fn new(
        compute: &Compute,
        reading: Reading,
        columns: Columns,
        rows: usize,
        positions: usize,
        weight: impl Fn(usize, usize) -> f32,
    ) -> Result<Self> {
        let mut panels = compute.scratch(Self::panel_elems(&reading, &columns))?;
        pack_panels(&reading, &columns, &mut panels, weight);
        Ok(Self { reading, columns, panels, rows, positions })
    }

    /// Elements of the weights in the order in which tiles read them.
    pub(crate) fn panel_elems(reading: &Reading, columns: &Columns) -> usize {
        reading.kernel_rows * reading.run * columns.padded
    }

    /// Elements of the output of one image.
    pub(crate) fn output_elems(&self) -> usize {
        self.rows * self.positions * self.columns.padded
    }

    /// Computes one image: `y` (rows, positions, padded columns) from the prepared image `x`.
    pub(crate) fn run(&self, level: SimdLevel, x: &[f32], y: &mut [f32]) {
        let Self { reading, columns, panels, rows, positions } = self;
        // The tiles below read and write through addresses. These two checks bound all of them: the
        // last tile ends with the last value of the last kernel row of the last position.
        assert!(y.len() >= self.output_elems());
        let last = (rows - 1) * reading.row_stride
            + (positions - 1) * reading.position_stride
            + (reading.kernel_rows - 1) * reading.kernel_row_stride
            + reading.run;
        assert!(x.len() >= last, "a prepared image of {} is too short, {last} needed", x.len());

        let row_elems = positions * columns.padded;
        for i in 0..*rows {
            if !(0..reading.kernel_rows).any(|u| reading.is_live(i, u)) {
                y[i * row_elems..(i + 1) * row_elems].fill(0.0);
            }
        }
        let most = (PANEL_BYTES / (columns.block * size_of::<f32>())).max(1);
        let tiles: Vec<_> = even_parts(*positions, columns.tall)
            .map(|part| (part.start, tile::product_kernel(level, part.len(), columns.wide)))
            .collect();
        for block in 0..columns.num_blocks() {
            for u in 0..reading.kernel_rows {
                for steps in even_parts(reading.run, most) {
                    let step = (block * reading.kernel_rows + u) * reading.run + steps.start;
                    let panel = &panels[step * columns.block..];
                    for i in (0..*rows).filter(|&i| reading.is_live(i, u)) {
                        let is_first = u == 0 || !(0..u).any(|u| reading.is_live(i, u));
                        let accumulate = !(is_first && steps.start == 0);
                        for &(j, kernel) in &tiles {
                            let x_at = i * reading.row_stride
                                + j * reading.position_stride
                                + u * reading.kernel_row_stride
                                + steps.start;
                            let y_at = i * row_elems + j * columns.padded + block * columns.block;
                            let tile = ProductTile {
                                x: x[x_at..].as_ptr(),
                                x_stride: reading.position_stride,
                                w: panel.as_ptr(),
                                len: steps.len(),
                                y: y[y_at..].as_mut_ptr(),
                                y_stride: columns.padded,
                                accumulate,
                            };
                            // SAFETY: the assertions above bound `x` and `y`; the panel holds
                            // `block` columns for every step; `level` is this processor's.
                            unsafe { kernel(tile) }
                        }
                    }
                }
            }
        }
    }
}

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
    pub(crate) fn copy_from(&mut self, d_output: &[f32], width: usize, channels: usize) {
        for (position, from) in d_output.chunks_exact(channels).enumerate() {
            let (i, j) = (position / width, position % width);
            let at = i * self.row_stride + j * self.position_stride;
            self.elems[at..at + channels].copy_from_slice(from);
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
    /// For output gradients whose rows from `live_rows` on are zero.
    pub(crate) fn new(
        compute: &Compute,
        conv: &'a Conv2d,
        live_rows: usize,
        weight: &[f32],
    ) -> Result<Self> {
        let Conv2d { height, width, c_in, c_out, kernel: (kh, kw), .. } = *conv;
        let (reading, columns) = Self::plan(compute, conv, live_rows);
        let turned = |k: usize, c: usize| {
            let (u, v, o) = (k / c_out / kw, k / c_out % kw, k % c_out);
            weight[(((kh - 1 - u) * kw + (kw - 1 - v)) * c_in + c) * c_out + o]
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

    /// Elements of one image's result if its columns are padded; zero if the result is written in place.
    pub(crate) fn raw_elems(conv: &Conv2d, columns: &Columns) -> usize {
        match columns.padded == conv.c_in {
            true => 0,
            false => conv.height * conv.width * columns.padded,
        }
    }

    /// Writes `d_input` (n, h, w, c_in). `fill(n, grid)` writes the gradients of image `n` into a grid of
    /// (h', w', c_out). The grid starts as zeros; elements that `fill` does not write keep their values.
    pub(crate) fn run(
        &self,
        compute: &Compute,
        fill: impl Fn(usize, Grid<'_>) + Send + Sync,
        d_input: &mut [f32],
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
            let is_direct = product.columns.padded == c_in;
            let mut raw = compute.scratch(Self::raw_elems(conv, &product.columns))?;
            for (n, d_input) in part.chunks_exact_mut(in_elems).enumerate() {
                let grid = Grid {
                    elems: &mut framed[origin..],
                    row_stride: stride * reading.kernel_row_stride,
                    position_stride: stride * c_out,
                };
                fill(first + n, grid);
                if is_direct {
                    product.run(compute.simd, &framed, d_input);
                    continue;
                }
                product.run(compute.simd, &framed, &mut raw);
                let raw = raw.chunks_exact(product.columns.padded);
                for (to, from) in d_input.chunks_exact_mut(c_in).zip(raw) {
                    to.copy_from_slice(&from[..c_in]);
                }
            }
            Ok(())
        })
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

    /// Writes or adds to `d_weight` (kh, kw, c_in, c_out). `image(n)` is input image `n`;
    /// `fill(n, grid)` writes its output gradients into a grid of (rows, positions, c_out).
    pub(crate) fn run<'x>(
        &self,
        compute: &Compute,
        batch: usize,
        image: impl Fn(usize) -> &'x [f32] + Send + Sync,
        fill: impl Fn(usize, Grid<'_>) + Send + Sync,
        d_weight: &mut [f32],
        accumulate: bool,
    ) -> Result<()> {
        let sum_elems = self.sum_elems();
        let parts = compute.threads.split(batch);
        let mut sums = compute.scratch(parts.len() * sum_elems)?;
        sums.fill(0.0);
        let items = parts.into_iter().zip(sums.chunks_exact_mut(sum_elems)).collect();
        compute
            .threads
            .for_each(items, |(part, sum)| self.run_part(compute, part, &image, &fill, sum))?;
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

    fn run_part<'x>(
        &self,
        compute: &Compute,
        part: std::ops::Range<usize>,
        image: &impl Fn(usize) -> &'x [f32],
        fill: &impl Fn(usize, Grid<'_>),
        sum: &mut [f32],
    ) -> Result<()> {
        let Self { conv, reading, columns, rows, positions } = self;
        let (x_elems, dy_elems) = (reading.elems, rows * positions * columns.padded);
        let [all_x, all_dy] = self.group_elems(part.len());
        let group = all_x / x_elems;
        let mut x = compute.scratch(all_x)?;
        let mut dy = compute.scratch(all_dy)?;
        x.fill(0.0);
        dy.fill(0.0);
        let images: Vec<usize> = part.collect();
        for images in images.chunks(group) {
            for (&n, to) in images.iter().zip(x.chunks_exact_mut(x_elems)) {
                fill_image(compute.simd, conv, image(n), to);
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
