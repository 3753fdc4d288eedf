//! Kernels of convolutions, and how their work is divided.
//!
//! Images and gradients of the input are f32 or of the type that a kernel is named for, which its sizes say.
//! Parameters and sums are of the type that kernels compute in. Each kernel that multiplies gets a block for each [`ConvTile`] of
//! results. Which tiles have the sums of a result, and in which order, follows from sizes and types, and from whether f32 may
//! be multiplied as TF32; where operands lie only chooses between tiles that add alike. This file does not know which
//! operation convolves.

use std::marker::PhantomData;

use paceline_cuda::kernel::{In, Out, Scalar, Tf32};
use paceline_cuda::{Grid, KernelCall, Result};
use paceline_memory::{DType, Element};

use super::convolutions::*;
use super::products::{Multiplied, add_parts, grid_of_parts, retyped, untyped};
use crate::conv2d::Conv2d;
use crate::stored::Stored;
use crate::{Compute, ImageLayout, KernelError, OnCard};

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
    pub(crate) unsafe fn forward<X: Element, S: Stored>(
        &self,
        card: &OnCard,
        (x, w, bias): (In<X>, In<S::Real>, In<S::Real>),
        y: Out<S>,
        winners: Option<Out<u8>>,
    ) -> Result<()> {
        let winners_at = winners.map_or(0, |winners| winners.0);
        let tile = self.forward_tile::<X, S>(are_aligned([x.0, w.0, y.0, winners_at]));
        let sizes = self.sizes::<X, S>(self.positions(), 0);
        let (read, written) = ((retyped(x), retyped(w), retyped(bias)), (untyped(y), winners));
        let call = if is_rounded::<S>(card, tile) {
            self.forward_call::<Tf32>(tile, sizes, read, written)
        } else {
            self.forward_call::<S>(tile, sizes, read, written)
        };
        // SAFETY: the caller's; each thread writes results of positions below their number.
        unsafe { card.launch(call?, tile.grid(self.positions(), self.conv.c_out, 1)) }
    }

    /// Writes or adds to the gradients of weight and bias.
    ///
    /// # Safety
    ///
    /// The addresses are those of operands of these sizes, and `partials` has [`CardConv::scratch_len`] elements.
    pub(crate) unsafe fn backward_weight<X: Element, S: Stored<Real: Multiplied>>(
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
        let (x, winners, partials) = (retyped(x), winners.unwrap_or(In::NONE), untyped(partials));
        let [parts, of_part] = self.weight_parts::<X, S>();
        let sizes = self.sizes::<X, S>(self.positions(), of_part);
        let call = if is_rounded::<S>(card, tile) {
            self.weight_call::<Tf32>(tile, sizes, (x, retyped(dy), winners, partials))
        } else {
            self.weight_call::<S>(tile, sizes, (x, dy, winners, partials))
        };
        let accumulate = u32::from(accumulate);
        let elems = self.steps() * self.conv.c_out;
        // SAFETY: the caller's; a block writes a tile of part z of `partials`, which the second kernel reads.
        unsafe {
            card.launch(call?, tile.grid(self.steps(), self.conv.c_out, parts))?;
            let call = add_parts(partials.as_in(), parts as u64, elems as u64, accumulate, dw)?;
            card.launch(call, grid_of_parts(parts, elems))?;
        }
        let ([height, width], c_out) = (self.result(), self.conv.c_out);
        let [parts, of_part] = self.bias_parts();
        let of_image = height * width;
        let sizes = self.sizes::<X, S>(self.batch * of_image, of_part);
        let call = sum_channels(sizes, dy, winners, of_image as u32, partials)?;
        let blocks = [c_out.div_ceil(32) as u32, parts as u32, 1];
        // SAFETY: the caller's; a block writes a row of `partials` (parts, c_out), which the second kernel reads.
        unsafe {
            card.launch(call, Grid { blocks, threads: [32, 8, 1], shared_bytes: 0 })?;
            let call = add_parts(partials.as_in(), parts as u64, c_out as u64, accumulate, db)?;
            card.launch(call, grid_of_parts(parts, c_out))
        }
    }

    /// Writes the gradient of the input.
    ///
    /// # Safety
    ///
    /// The addresses are those of operands of these sizes.
    pub(crate) unsafe fn backward_input<X: Element, S: Stored>(
        &self,
        card: &OnCard,
        (w, dy, winners): (In<S::Real>, In<S>, Option<In<u8>>),
        dx: Out<X>,
    ) -> Result<()> {
        let positions = self.batch * self.conv.height * self.conv.width;
        let winners_at = winners.map_or(0, |winners| winners.0);
        let tile = self.input_tile::<S>(are_aligned([w.0, dy.0, dx.0, winners_at]));
        let (sizes, w, dx) = (self.sizes::<X, S>(positions, 0), retyped(w), untyped(dx));
        let call = if is_rounded::<S>(card, tile) {
            self.input_call::<Tf32>(tile, sizes, (w, retyped(dy), winners, dx))
        } else {
            self.input_call::<S>(tile, sizes, (w, dy, winners, dx))
        };
        // SAFETY: the caller's; each thread writes gradients of positions below their number.
        unsafe { card.launch(call?, tile.grid(positions, self.conv.c_in, 1)) }
    }

    /// The kernel of [`CardConv::forward`] for elements that are multiplied as `T`.
    fn forward_call<T: Scalar>(
        &self,
        tile: ConvTile,
        sizes: ConvSizes,
        (x, w, bias): (In<u8>, In<u8>, In<u8>),
        (y, winners): (Out<u8>, Option<Out<u8>>),
    ) -> Result<KernelCall<'static>> {
        let y = Out::<T>(y.0, PhantomData);
        if let Some(winners) = winners {
            let kernel = match tile {
                ConvTile::Wide => conv_relu_pool_forward_wide,
                ConvTile::Tall => conv_relu_pool_forward_tall,
                _ => conv_relu_pool_forward,
            };
            kernel(sizes, x, w, bias, y, winners)
        } else {
            let kernel = match tile {
                ConvTile::Wide => conv2d_forward_wide,
                ConvTile::Tall => conv2d_forward_tall,
                _ => conv2d_forward,
            };
            kernel(sizes, x, w, bias, y)
        }
    }

    /// The first kernel of [`CardConv::backward_weight`] for elements that are multiplied as `T`.
    fn weight_call<T: Scalar>(
        &self,
        tile: ConvTile,
        sizes: ConvSizes,
        (x, dy, winners, partials): (In<u8>, In<T>, In<u8>, Out<u8>),
    ) -> Result<KernelCall<'static>> {
        let kernel = match (tile, self.is_pooled) {
            (ConvTile::Wide, false) => conv2d_backward_weight_wide,
            (ConvTile::Small, false) => conv2d_backward_weight_small,
            (_, false) => conv2d_backward_weight,
            (ConvTile::Wide, true) => conv_relu_pool_backward_weight_wide,
            (ConvTile::Small, true) => conv_relu_pool_backward_weight_small,
            (_, true) => conv_relu_pool_backward_weight,
        };
        kernel(sizes, x, dy, winners, partials)
    }

    /// The kernel of [`CardConv::backward_input`] for elements that are multiplied as `T`.
    fn input_call<T: Scalar>(
        &self,
        tile: ConvTile,
        sizes: ConvSizes,
        (w, dy, winners, dx): (In<u8>, In<T>, Option<In<u8>>, Out<u8>),
    ) -> Result<KernelCall<'static>> {
        let kernel = match (tile, self.is_pooled) {
            (ConvTile::Wide, false) => conv2d_backward_input_wide,
            (ConvTile::Tall, false) => conv2d_backward_input_tall,
            (_, false) => conv2d_backward_input,
            (ConvTile::Wide, true) => conv_relu_pool_backward_input_wide,
            (ConvTile::Tall, true) => conv_relu_pool_backward_input_tall,
            (_, true) => conv_relu_pool_backward_input,
        };
        kernel(sizes, w, dy, winners.unwrap_or(In::NONE), dx)
    }
}

/// Whether the kernels of a tile multiply numbers of a type as TF32.
fn is_rounded<S: Stored>(card: &OnCard, tile: ConvTile) -> bool {
    tile != ConvTile::Any && card.rounds::<S>()
}

/// The number of parts of `count`, and the length of a part, so that `tiles` for each part are about `blocks` and no part but
/// the last one is shorter than `fewest`. They follow from the sizes, so the bits do too.
fn parts(count: usize, blocks: usize, tiles: usize, fewest: usize) -> [usize; 2] {
    let parts = (blocks / tiles.max(1)).min(count.div_ceil(fewest)).max(1);
    let of_part = count.div_ceil(parts).next_multiple_of(32);
    [count.div_ceil(of_part.max(1)).max(1), of_part]
}
