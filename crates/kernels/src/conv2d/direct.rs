//! The loops around the register tiles of a convolution with fixed weights.
//!
//! In: prepared images. Out: sums in f32, with padded channels. Order of summation for an output value: kernel row, then
//! kernel column, then channel. The order does not depend on where a value lies in memory.

use paceline_memory::WriteGuard;

use super::prepare::{Reading, pack_panels};
use super::tile::{self, ProductTile};
use super::{Conv2d, columns_for};
use crate::stored::{SinglePrecision, operand};
use crate::{Compute, Result, SimdLevel};

/// A panel of weights of this size stays in the first-level cache (32 KB or more) together with the
/// other data of a tile.
const PANEL_BYTES: usize = 24 << 10;

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
    pub(super) wide: usize,
    /// The largest number of rows of a tile.
    pub(super) tall: usize,
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

    pub(super) fn num_blocks(&self) -> usize {
        self.padded / self.block
    }
}

/// Splits `len` into parts of at most `most`, as even as possible.
pub(super) fn even_parts(
    len: usize,
    most: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    let parts = len.div_ceil(most).max(1);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

/// A convolution with fixed weights, ready to run on one prepared image after the other.
pub(crate) struct Product {
    pub(super) reading: Reading,
    pub(crate) columns: Columns,
    panels: WriteGuard<f32>,
    rows: usize,
    positions: usize,
}

impl Product {
    /// The convolution itself, for all its output positions, with the weights rounded to `S`.
    pub(crate) fn forward<S: SinglePrecision>(
        compute: &Compute,
        conv: &Conv2d,
        weight: &[f32],
    ) -> Result<Self> {
        Self::forward_part::<S>(compute, conv, weight, conv.out_height(), conv.out_width())
    }

    /// The convolution for the first `rows` rows and `positions` columns of the output.
    pub(crate) fn forward_part<S: SinglePrecision>(
        compute: &Compute,
        conv: &Conv2d,
        weight: &[f32],
        rows: usize,
        positions: usize,
    ) -> Result<Self> {
        let (reading, columns) = (Reading::input(conv), columns_for(compute, conv.c_out));
        let c_out = conv.c_out;
        let weight = |k: usize, o: usize| operand::<f32, S>(weight[k * c_out + o]);
        Self::new(compute, reading, columns, rows, positions, weight)
    }

    pub(super) fn new(
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
