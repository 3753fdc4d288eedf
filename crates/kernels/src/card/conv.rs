//! Kernels of convolutions, of those with ReLU and pool too, and how their work is divided.
//!
//! Images and gradients of the input are f32 or of the type that a kernel is named for, which its sizes say.
//! Parameters and sums are of the type that kernels compute in. Each kernel that multiplies gets a block for each [`ConvTile`] of
//! results. Which tiles have the sums of a result, and in which order, follows from sizes and types, and from whether f32 may
//! be multiplied as TF32; where operands lie only chooses between tiles that add alike. This file does not know which
//! operation convolves.

use paceline_cuda::kernel::{In, Out, Scalar, Tf32};
use paceline_cuda::{CardKernel, Grid, KernelSource, Result};
use paceline_memory::{DType, Element};

use super::products::add_parts;
use super::{MMA, NUMBERS};
use crate::conv2d::Conv2d;
use crate::stored::Stored;
use crate::{Compute, ImageLayout, KernelError, OnCard};

/// Convolutions as products.
const CONV: &str = include_str!("conv.cuh");
/// Large tiles, for images whose channels lie side by side.
const WIDE: &str = include_str!("conv_wide.cuh");

pub(crate) static CONV2D: KernelSource =
    KernelSource::new("conv2d.cu", include_str!("conv2d.cu"), &[NUMBERS, MMA, CONV]);

pub(crate) static CONV2D_WIDE: KernelSource = KernelSource::new(
    "conv2d_wide.cu",
    include_str!("conv2d_wide.cu"),
    &[NUMBERS, MMA, CONV, WIDE],
);

pub(crate) static CONV_RELU_POOL: KernelSource = KernelSource::new(
    "conv_relu_pool.cu",
    include_str!("conv_relu_pool.cu"),
    &[NUMBERS, MMA, CONV],
);

pub(crate) static CONV_RELU_POOL_WIDE: KernelSource = KernelSource::new(
    "conv_relu_pool_wide.cu",
    include_str!("conv_relu_pool_wide.cu"),
    &[NUMBERS, MMA, CONV, WIDE],
);

/// The struct `Conv` of the sources: height, width, channels in and out, height and width of the kernel, stride, padding, whether
/// each channel is a plane, whether the input's images are f32, positions of the batch, and those of a part.
type ConvSizes = [u32; 12];

/// The results that a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConvTile {
    /// 64 x 64, whatever layout, type and sizes are.
    Any,
    /// 64 x 64. These and the following ones load vectors of channels.
    Small,
    /// 128 x 64.
    Tall,
    /// 128 x 128. All operands have whole vectors.
    Wide,
}

impl ConvTile {
    fn sides(self) -> [usize; 2] {
        match self {
            ConvTile::Any | ConvTile::Small => [64, 64],
            ConvTile::Tall => [128, 64],
            ConvTile::Wide => [128, 128],
        }
    }

    /// The tiles of rows and columns.
    fn count(self, rows: usize, columns: usize) -> [usize; 2] {
        let [height, width] = self.sides();
        [rows.div_ceil(height), columns.div_ceil(width)]
    }

    fn grid(self, rows: usize, columns: usize, parts: usize) -> Grid {
        let [x, y] = self.count(rows, columns);
        let [height, width] = self.sides();
        let threads = if self == ConvTile::Any { 256 } else { height * width / 64 };
        let blocks = [x, y, parts].map(|count| count as u32);
        Grid { blocks, threads: [threads as u32, 1, 1], shared_bytes: 0 }
    }
}

const VECTOR_BYTES: usize = 16;

/// Whether vectors can be loaded at all these addresses.
fn are_aligned<const N: usize>(addresses: [u64; N]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(VECTOR_BYTES as u64))
}

/// A convolution of a batch, whose results may be pooled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CardConv {
    conv: Conv2d,
    is_pooled: bool,
    batch: usize,
}

impl CardConv {
    /// Errors if a card computes and its kernels cannot count the positions of the batch.
    pub(crate) fn new(
        compute: &Compute,
        op: &'static str,
        conv: &Conv2d,
        is_pooled: bool,
        batch: usize,
    ) -> crate::Result<Self> {
        let [height, width, _] = conv.input_image();
        let padded = (height + 2 * conv.padding).saturating_mul(width + 2 * conv.padding);
        // Half of what 32 bits count, because a tile may reach beyond the last position.
        if compute.is_card() && batch.saturating_mul(padded) > i32::MAX as usize {
            let reason = format!("{batch} images of {height} x {width} are too many for a card");
            return Err(KernelError::Geometry { op, reason });
        }
        Ok(Self { conv: *conv, is_pooled, batch })
    }

    /// The first argument of a kernel. Images of the input that are computed with as `S` are of `X`.
    fn sizes<X: Element, S: Stored>(&self, positions: usize, of_part: usize) -> ConvSizes {
        let Conv2d { height, width, c_in, c_out, kernel: (rows, columns), .. } = self.conv;
        let Conv2d { stride, padding, layout, .. } = self.conv;
        let planes = usize::from(layout == ImageLayout::Nchw);
        let is_f32 = usize::from(X::DTYPE != S::DTYPE);
        [
            height, width, c_in, c_out, rows, columns, stride, padding, planes, is_f32, positions,
            of_part,
        ]
        .map(|size| size as u32)
    }

    /// Rows and columns of the result, or of its windows.
    fn result(&self) -> [usize; 2] {
        let [height, width, _] = self.conv.output_image();
        if self.is_pooled { [height / 2, width / 2] } else { [height, width] }
    }

    /// Results of a batch that are computed for a channel.
    fn positions(&self) -> usize {
        let [height, width] = self.result();
        self.batch * height * width * if self.is_pooled { 4 } else { 1 }
    }

    /// Elements of the weight for an output channel.
    fn steps(&self) -> usize {
        let (kernel_height, kernel_width) = self.conv.kernel;
        kernel_height * kernel_width * self.conv.c_in
    }

    /// Whether kernels load vectors of the output's channels.
    fn has_vectors<S: Stored>(&self) -> bool {
        /// With fewer products a card has nothing to do in any tile.
        const FEWEST_PRODUCTS: usize = 1 << 16;
        /// Kernels count rows and columns of an image in 16 bits.
        const LONGEST_SIDE: usize = 1 << 14;
        let Conv2d { height, width, c_in, c_out, kernel, padding, layout, .. } = self.conv;
        let len = VECTOR_BYTES / size_of::<S>();
        let longest = height.max(width).max(kernel.0).max(kernel.1) + 2 * padding;
        S::DTYPE != DType::F64
            && layout == ImageLayout::Nhwc
            && c_out.is_multiple_of(len)
            && self.positions() * self.steps() * c_out >= FEWEST_PRODUCTS
            && longest <= LONGEST_SIDE
            // And numbers of a row with their sign.
            && (width + 2 * padding) * c_in <= i32::MAX as usize
            // Vectors of images, and elements of the weight, are counted in 32 bits.
            && [self.batch * height * width * c_in, self.positions() * c_out]
                .iter()
                .all(|elems| elems / len <= u32::MAX as usize)
            && self.steps() * c_out <= u32::MAX as usize
    }

    /// Whether channels of the input are whole vectors.
    fn has_input_vectors<S: Stored>(&self) -> bool {
        self.conv.c_in.is_multiple_of(VECTOR_BYTES / size_of::<S>())
    }

    fn forward_tile<X: Element, S: Stored>(&self, is_aligned: bool) -> ConvTile {
        let is_whole = is_aligned && self.has_input_vectors::<S>() && X::DTYPE == S::DTYPE;
        if !self.has_vectors::<S>() {
            ConvTile::Any
        } else if is_whole && self.conv.c_out > 64 {
            ConvTile::Wide
        } else {
            ConvTile::Tall
        }
    }

    fn input_tile<S: Stored>(&self, is_aligned: bool) -> ConvTile {
        if !self.has_vectors::<S>() || !self.has_input_vectors::<S>() {
            ConvTile::Any
        } else if is_aligned && self.conv.c_in > 64 {
            ConvTile::Wide
        } else {
            ConvTile::Tall
        }
    }

    fn weight_tile<X: Element, S: Stored>(&self) -> ConvTile {
        let is_whole = self.has_input_vectors::<S>() && X::DTYPE == S::DTYPE;
        if !self.has_vectors::<S>() {
            ConvTile::Any
        } else if is_whole && self.conv.c_out > 64 && self.steps() > 64 {
            ConvTile::Wide
        } else {
            ConvTile::Small
        }
    }

    /// The parts of the positions, and the positions of a part, for the gradient of the weight.
    fn weight_parts<X: Element, S: Stored>(&self) -> [usize; 2] {
        let tile = self.weight_tile::<X, S>();
        // Blocks that keep a large card busy.
        let blocks = if tile == ConvTile::Small { 768 } else { 512 };
        let tiles = tile.count(self.steps(), self.conv.c_out).iter().product();
        parts(self.positions(), blocks, tiles, 256)
    }

    /// The parts of what a bias's gradient is summed over, and the positions of a part.
    fn bias_parts(&self) -> [usize; 2] {
        let [height, width] = self.result();
        parts(self.batch * height * width, 512, self.conv.c_out.div_ceil(32), 64)
    }

    /// Elements of the scratch memory of [`CardConv::backward_weight`].
    pub(crate) fn scratch_len<X: Element, S: Stored>(&self) -> usize {
        let ([of_weight, _], [of_bias, _]) = (self.weight_parts::<X, S>(), self.bias_parts());
        (of_weight * self.steps() * self.conv.c_out).max(of_bias * self.conv.c_out)
    }

    /// Writes the output, and the winners if results are pooled.
    ///
    /// # Safety
    ///
    /// The addresses are those of operands of these sizes.
    pub(crate) unsafe fn forward<X: Element + Scalar, S: Stored>(
        &self,
        card: &OnCard,
        (x, w, bias): (In<X>, In<S::Real>, In<S::Real>),
        y: Out<S>,
        winners: Option<Out<u8>>,
    ) -> Result<()> {
        let winners_at = winners.map_or(0, |winners| winners.0);
        let tile = self.forward_tile::<X, S>(are_aligned([x.0, w.0, y.0, winners_at]));
        let sizes = self.sizes::<X, S>(self.positions(), 0);
        let grid = tile.grid(self.positions(), self.conv.c_out, 1);
        let [any, large] = self.sources();
        let name = if self.is_pooled { "conv_relu_pool_forward" } else { "conv2d_forward" };
        let kernel = match tile {
            ConvTile::Any | ConvTile::Small => any.of::<S>(name),
            ConvTile::Tall => rounded::<S>(card, large, name, "128, 64"),
            ConvTile::Wide => rounded::<S>(card, large, name, "128, 128"),
        };
        // SAFETY: the caller's; each thread writes results of positions below their number.
        unsafe {
            match winners {
                None => card.launch(kernel, (sizes, x, w, bias, y), grid),
                Some(winners) => card.launch(kernel, (sizes, x, w, bias, y, winners), grid),
            }
        }
    }

    /// Writes or adds to the gradients of weight and bias.
    ///
    /// # Safety
    ///
    /// The addresses are those of operands of these sizes, and `partials` has [`CardConv::scratch_len`] elements.
    pub(crate) unsafe fn backward_weight<X: Element + Scalar, S: Stored>(
        &self,
        card: &OnCard,
        (x, dy, winners): (In<X>, In<S>, Option<In<u8>>),
        (dw, db): (Out<S::Real>, Out<S::Real>),
        accumulate: bool,
        partials: Out<S::Real>,
    ) -> Result<()> {
        let winners_at = winners.map_or(0, |winners| winners.0);
        let tile = match self.weight_tile::<X, S>() {
            ConvTile::Wide if !are_aligned([x.0, dy.0, winners_at, partials.0]) => ConvTile::Small,
            tile => tile,
        };
        let winners = winners.unwrap_or(In::NONE);
        let [parts, of_part] = self.weight_parts::<X, S>();
        let sizes = self.sizes::<X, S>(self.positions(), of_part);
        let [any, large] = self.sources();
        let name = "wide_weight_gradient";
        let kernel = match (tile, self.is_pooled) {
            (ConvTile::Wide, false) => rounded::<S>(card, large, name, "false, 128"),
            (ConvTile::Wide, true) => rounded::<S>(card, large, name, "true, 128"),
            (ConvTile::Small, false) => rounded::<S>(card, large, name, "false, 64"),
            (ConvTile::Small, true) => rounded::<S>(card, large, name, "true, 64"),
            (_, false) => any.with::<S>("weight_gradient", "false"),
            (_, true) => any.with::<S>("weight_gradient", "true"),
        };
        let c_out = self.conv.c_out;
        // SAFETY: the caller's; a block writes a tile of part z of `partials`, which the second kernel reads.
        unsafe {
            let grid = tile.grid(self.steps(), c_out, parts);
            card.launch(kernel, (sizes, x, dy, winners, partials), grid)?;
            add_parts(card, parts, self.steps() * c_out, partials.as_in(), accumulate, dw)?;
        }
        let [height, width] = self.result();
        let [parts, of_part] = self.bias_parts();
        let of_image = height * width;
        let sizes = self.sizes::<X, S>(self.batch * of_image, of_part);
        let blocks = [c_out.div_ceil(32) as u32, parts as u32, 1];
        let grid = Grid { blocks, threads: [32, 8, 1], shared_bytes: 0 };
        // SAFETY: the caller's; a block writes a row of `partials` (parts, c_out), which the second kernel reads.
        unsafe {
            let arguments = (sizes, dy, winners, of_image as u32, partials);
            card.launch(CONV2D.of::<S>("sum_channels"), arguments, grid)?;
            add_parts(card, parts, c_out, partials.as_in(), accumulate, db)
        }
    }

    /// Writes the gradient of the input.
    ///
    /// # Safety
    ///
    /// The addresses are those of operands of these sizes.
    pub(crate) unsafe fn backward_input<X: Element + Scalar, S: Stored>(
        &self,
        card: &OnCard,
        (w, dy, winners): (In<S::Real>, In<S>, Option<In<u8>>),
        dx: Out<X>,
    ) -> Result<()> {
        let positions = self.batch * self.conv.height * self.conv.width;
        let winners_at = winners.map_or(0, |winners| winners.0);
        let tile = self.input_tile::<S>(are_aligned([w.0, dy.0, dx.0, winners_at]));
        let (sizes, winners) = (self.sizes::<X, S>(positions, 0), winners.unwrap_or(In::NONE));
        let [any, large] = self.sources();
        let name = "wide_input_gradient";
        let kernel = match (tile, self.is_pooled) {
            (ConvTile::Wide, false) => rounded::<S>(card, large, name, "false, 128, 128"),
            (ConvTile::Wide, true) => rounded::<S>(card, large, name, "true, 128, 128"),
            (ConvTile::Tall, false) => rounded::<S>(card, large, name, "false, 128, 64"),
            (ConvTile::Tall, true) => rounded::<S>(card, large, name, "true, 128, 64"),
            (_, false) => any.with::<S>("input_gradient", "false"),
            (_, true) => any.with::<S>("input_gradient", "true"),
        };
        let grid = tile.grid(positions, self.conv.c_in, 1);
        // SAFETY: the caller's; each thread writes gradients of positions below their number.
        unsafe { card.launch(kernel, (sizes, w, dy, winners, dx), grid) }
    }

    /// The sources of kernels for any tile, and for large ones.
    fn sources(&self) -> [&'static KernelSource; 2] {
        if self.is_pooled {
            [&CONV_RELU_POOL, &CONV_RELU_POOL_WIDE]
        } else {
            [&CONV2D, &CONV2D_WIDE]
        }
    }
}

/// The kernel for numbers of a type, which multiplies f32 as TF32 if the card may.
fn rounded<S: Stored>(
    card: &OnCard,
    source: &'static KernelSource,
    name: &'static str,
    constants: &'static str,
) -> CardKernel {
    if card.rounds::<S>() {
        source.with::<Tf32>(name, constants)
    } else {
        source.with::<S>(name, constants)
    }
}

/// The number of parts of `count`, and the length of a part, so that `tiles` for each part are about `blocks` and no part but
/// the last one is shorter than `fewest`. They follow from the sizes, so the bits do too.
fn parts(count: usize, blocks: usize, tiles: usize, fewest: usize) -> [usize; 2] {
    let parts = (blocks / tiles.max(1)).min(count.div_ceil(fewest)).max(1);
    let of_part = count.div_ceil(parts).next_multiple_of(32);
    [count.div_ceil(of_part.max(1)).max(1), of_part]
}
