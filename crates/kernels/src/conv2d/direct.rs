//! The loops around the register tiles of a convolution with fixed weights.
//!
//! In: prepared images. Out: sums in f32, with padded channels. Order of summation for an output value: kernel row, then
//! kernel column, then channel. The order does not depend on where a value lies in memory.

use std::slice::ChunksExactMut;

use paceline_memory::DType;

use super::Conv2d;
use super::prepare::{Reading, fill_image, pack_panels, pack_rotated};
use super::tile::{self, ChannelColumns, ProductTile};
use super::{in_tiles, winograd};
use crate::stored::{SinglePrecision, operand};
use crate::threads::batches;
use crate::tiles::{TilesOf, Ways};
use crate::{Processor, Scratch, SimdLevel, Threads, scratch};

/// A panel of weights of this size stays in the first-level cache (32 KB or more) together with the
/// other data of a tile.
const PANEL_BYTES: usize = 24 << 10;

/// Splits `len` into parts of at most `most`, as even as possible.
pub(super) fn even_parts(
    len: usize,
    most: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    let parts = len.div_ceil(most).max(1);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

/// The images of each part of a batch, `elems` elements each, with the number of the first image.
pub(crate) fn image_parts<'a, T>(
    cpu: &Processor,
    all: &'a mut [T],
    elems: usize,
) -> Vec<(usize, ChunksExactMut<'a, T>)> {
    let batch = all.len() / elems;
    let parts = batches(cpu, all, elems, batch).into_iter();
    parts.map(|(first, part)| (first, part.chunks_exact_mut(elems))).collect()
}

/// The loops that compute a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConvForm {
    Registers,
    Winograd,
    Tiles(TilesOf),
}

impl ConvForm {
    /// By the type and the sizes of the convolution.
    fn new(ways: Ways, conv: &Conv2d, rows: usize, positions: usize) -> Self {
        match ways.tiles {
            Some(tiles) => Self::Tiles(tiles),
            None if ways.dtype == DType::F32 && winograd::is_chosen(conv, rows, positions) => {
                Self::Winograd
            }
            None => Self::Registers,
        }
    }
}

/// A convolution with fixed weights, which runs on one prepared image after the other. It holds only numbers. The panels,
/// which are the weights in the order in which tiles read them, lie in scratch memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvProduct {
    ways: Ways,
    pub(super) form: ConvForm,
    pub(super) conv: Conv2d,
    pub(super) reading: Reading,
    pub(crate) columns: ChannelColumns,
    pub(super) rows: usize,
    pub(super) positions: usize,
}

/// Scratch memory. That of a [`ConvProduct`] is its panels, a prepared image for each part of the batch, and the sums of an image
/// for each part.
pub(crate) type Memory = (Scratch<f32>, Scratch<f32>, Scratch<f32>);

pub(crate) type Slices<'a> = (&'a mut [f32], &'a mut [f32], &'a mut [f32]);

impl ConvProduct {
    /// The convolution for the first `rows` rows and `positions` columns of the output.
    pub(crate) fn new(ways: Ways, conv: &Conv2d, rows: usize, positions: usize) -> Self {
        let reading = match ConvForm::new(ways, conv, rows, positions) {
            ConvForm::Winograd => winograd::reading(conv, rows, positions),
            ConvForm::Tiles(_) | ConvForm::Registers => Reading::image(conv),
        };
        Self::reading(ways, conv, reading, conv.c_out, rows, positions)
    }

    /// The product of a prepared image with weights of `channels` columns.
    pub(super) fn reading(
        ways: Ways,
        conv: &Conv2d,
        reading: Reading,
        channels: usize,
        rows: usize,
        positions: usize,
    ) -> Self {
        let form = ConvForm::new(ways, conv, rows, positions);
        let columns = ChannelColumns::new(ways, channels);
        let mut reading = reading;
        if form == ConvForm::Winograd {
            // Whole registers are read.
            reading.elems = (reading.elems + winograd::LINE).next_multiple_of(winograd::LINE);
        }
        Self { ways, form, conv: *conv, reading, columns, rows, positions }
    }

    /// Elements of the weight, or of its gradient, with padded columns.
    pub(super) fn weight_elems(&self) -> usize {
        self.reading.kernel_rows * self.reading.run * self.columns.padded
    }

    pub(super) fn output_elems(&self) -> usize {
        self.rows * self.positions * self.columns.padded
    }

    /// The scratch memory for a batch. There are no sums if images are computed in place.
    pub(crate) fn memory(&self, threads: &Threads, batch: usize, is_in_place: bool) -> Memory {
        let parts = threads.split(batch).len();
        let sums = if is_in_place { 0 } else { parts * self.output_elems() };
        let panels = match self.form {
            ConvForm::Tiles(_) => in_tiles::panels_len(self),
            ConvForm::Winograd => winograd::panels_len(self),
            ConvForm::Registers => self.weight_elems(),
        };
        (scratch(panels), scratch(parts * self.image_len()), scratch(sums))
    }

    /// Scratch memory of a prepared image. For tiles it is there a second time, in bf16, and for minimal filtering its squares.
    fn image_len(&self) -> usize {
        let memory = match self.form {
            ConvForm::Tiles(_) => in_tiles::image_len(self),
            ConvForm::Winograd => winograd::squares_len(self),
            ConvForm::Registers => 0,
        };
        self.reading.elems + memory
    }

    /// Writes the panels from the weight, which is rounded to `S`. For a gradient of the input it is rotated.
    pub(super) fn pack<S: SinglePrecision>(
        &self,
        panels: &mut [f32],
        weight: &[f32],
        is_rotated: bool,
    ) {
        let (Conv2d { c_in, c_out, .. }, level) = (self.conv, self.ways.simd);
        let in_registers = |panels: &mut [f32]| {
            if is_rotated {
                pack_rotated::<S>(level, &self.columns, c_out, panels, weight);
            } else {
                pack_panels::<S>(&self.columns, panels, weight);
            }
        };
        match self.form {
            ConvForm::Tiles(_) => in_tiles::pack_panels(self, panels, |k, column| {
                let at = if is_rotated {
                    let tap = weight.len() / (c_in * c_out) - 1 - k / c_out;
                    (tap * c_in + column) * c_out + k % c_out
                } else {
                    k * c_out + column
                };
                operand::<f32, S>(weight[at])
            }),
            ConvForm::Winograd => winograd::pack_panels(level, self, panels, in_registers),
            ConvForm::Registers => in_registers(panels),
        }
    }

    /// Convolves images `x` with the weight `w`, both rounded to `S`. `outputs` has the outputs of each part of the batch
    /// with the number of the first image, see [`image_parts`]. `finish` makes an output from the sums of its image.
    pub(crate) fn forward<X: SinglePrecision, S: SinglePrecision, Y: Iterator + Send>(
        &self,
        cpu: &Processor,
        (x, w): (&[X], &[f32]),
        (panels, images, sums): Slices<'_>,
        outputs: Vec<(usize, Y)>,
        finish: impl Fn(&[f32], Y::Item) + Send + Sync,
    ) {
        let in_elems = self.conv.input_elems();
        self.pack::<S>(panels, w, false);
        let panels = &*panels;
        self.for_each(cpu, images, sums, outputs, |n, image, sums, y| {
            let to = &mut image[..self.reading.elems];
            let x = &x[n * in_elems..][..in_elems];
            fill_image::<X, S>(cpu.simd, &self.conv, &self.reading, x, to);
            self.run(cpu.simd, panels, image, sums);
            finish(sums, y);
        })
    }

    /// Calls `compute(n, image, sums, output)` for each image `n` of a batch. The memory for the prepared image, at its beginning,
    /// starts as zeros, and keeps its values from one image of a part to the next.
    pub(super) fn for_each<Y: Iterator + Send>(
        &self,
        cpu: &Processor,
        images: &mut [f32],
        sums: &mut [f32],
        outputs: Vec<(usize, Y)>,
        compute: impl Fn(usize, &mut [f32], &mut [f32], Y::Item) + Send + Sync,
    ) {
        let parts = outputs.len();
        let images = batches(cpu, images, self.image_len(), parts);
        let elems = sums.len() / parts;
        let memory = images.into_iter().zip(batches(cpu, sums, elems, parts));
        let items = outputs.into_iter().zip(memory).collect();
        cpu.threads.for_each(items, |((first, outputs), ((_, image), (_, sums)))| {
            // Squares are written before they are read.
            let memory =
                if self.form == ConvForm::Winograd { self.reading.elems } else { image.len() };
            image[..memory].fill(0.0);
            for (n, output) in outputs.enumerate() {
                compute(first + n, image, sums, output);
            }
        });
    }

    /// Computes one image: `y` (rows, positions, padded columns) from the prepared image, in memory that
    /// [`for_each`](Self::for_each) has given.
    pub(super) fn run(&self, level: SimdLevel, panels: &[f32], image: &mut [f32], y: &mut [f32]) {
        let (x, memory) = image.split_at_mut(self.reading.elems);
        match self.form {
            ConvForm::Tiles(tiles) => in_tiles::run(tiles, level, self, panels, x, memory, y),
            ConvForm::Winograd => winograd::forward(level, self, panels, x, memory, y),
            ConvForm::Registers => self.run_in_registers(level, panels, x, y),
        }
    }

    fn run_in_registers(&self, level: SimdLevel, panels: &[f32], x: &[f32], y: &mut [f32]) {
        let Self { reading, columns, rows, positions, .. } = self;
        // The tiles below read and write through addresses. These checks bound all of them: the
        // last tile ends with the last value of the last kernel row of the last position.
        assert!(y.len() >= self.output_elems() && panels.len() >= self.weight_elems());
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
        // A panel of all kernel rows, if it is small: sums stay in registers.
        let at_a_time =
            if reading.kernel_rows * reading.run <= most { reading.kernel_rows } else { 1 };
        let pieces = even_parts(reading.kernel_rows, at_a_time)
            .flat_map(|us| even_parts(reading.run, most).map(move |steps| (us.clone(), steps)));
        for block in 0..columns.num_blocks() {
            for (us, steps) in pieces.clone() {
                for i in 0..*rows {
                    let mut live = us.clone().filter(|&u| reading.is_live(i, u));
                    let kernel_rows = live.clone().count();
                    let Some(u) = live.next() else { continue };
                    let step = (block * reading.kernel_rows + u) * reading.run + steps.start;
                    let is_first = steps.start == 0 && !(0..u).any(|u| reading.is_live(i, u));
                    for &(j, kernel) in &tiles {
                        let x_at = i * reading.row_stride
                            + j * reading.position_stride
                            + u * reading.kernel_row_stride
                            + steps.start;
                        let y_at = i * row_elems + j * columns.padded + block * columns.block;
                        let tile = ProductTile {
                            x: x[x_at..].as_ptr(),
                            x_stride: reading.position_stride,
                            w: panels[step * columns.block..].as_ptr(),
                            kernel_rows,
                            x_row_stride: reading.kernel_row_stride,
                            len: steps.len(),
                            y: y[y_at..].as_mut_ptr(),
                            y_stride: columns.padded,
                            accumulate: !is_first,
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
