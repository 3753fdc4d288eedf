//! Kernels of convolutions, and how their work is divided.
//!
//! Images and gradients of the input are f32 or of the type that a kernel is named for, which its argument `is_f32` says.
//! Parameters and sums are of the type that kernels compute in. Each kernel that multiplies gets a block for each [`Tile`] of
//! results. Which tiles have the sums of a result, and in which order, follows from sizes and types, and from whether f32 may
//! be multiplied as TF32; where operands lie only chooses between tiles that add alike. This file does not know which
//! operation convolves.

use std::marker::PhantomData;

use paceline_cuda::kernel::{In, Out, Scalar, Tf32};
use paceline_cuda::{Grid, KernelCall, Result};
use paceline_memory::{DType, Element};

use super::conv_relu_pool::{
    conv_relu_pool_backward_input, conv_relu_pool_backward_weight, conv_relu_pool_forward,
};
use super::conv_wide::{
    conv_relu_pool_backward_input_tall, conv_relu_pool_backward_input_wide,
    conv_relu_pool_backward_weight_small, conv_relu_pool_backward_weight_wide,
    conv_relu_pool_forward_tall, conv_relu_pool_forward_wide, conv2d_backward_input_tall,
    conv2d_backward_input_wide, conv2d_backward_weight_small, conv2d_backward_weight_wide,
    conv2d_forward_tall, conv2d_forward_wide,
};
use super::products::{Multiplied, add_parts, grid_of_parts, retyped, untyped};
use super::{MMA, NUMBERS};
use crate::conv2d::Conv2d;
use crate::stored::Stored;
use crate::{Compute, ImageLayout, KernelError, OnCard};

/// Convolutions as products.
pub(super) const CONV: &str = include_str!("conv.cuh");

paceline_cuda::kernels! {
    CONV2D = "conv2d.cu", include_str!("conv2d.cu"), [NUMBERS, MMA, CONV];
    /// The output of a convolution.
    fn conv2d_forward<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, positions: u32,
    );
    /// The gradient of the weight from each part of the positions.
    fn conv2d_backward_weight<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, positions: u32, positions_of_part: u32, partials: Out<u8>,
    );
    /// The gradient of the input.
    fn conv2d_backward_input<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, w: In<u8>, dy: In<T>, positions: u32, dx: Out<u8>, is_f32: u32,
    );
    /// The sums of gradients over each part of the positions.
    fn sum_channels<T: f32 | f64 | f16 | bf16>(
        dy: In<T>, winners: In<u8>, channels: u32, has_planes: u32, positions: u32, positions_of_image: u32,
        positions_of_part: u32, partials: Out<u8>,
    );
}

/// The results that a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    /// 64 x 64, whatever layout, type and sizes are.
    Any,
    /// 64 x 64. These and the following ones load vectors of channels.
    Small,
    /// 128 x 64.
    Tall,
    /// 128 x 128. All operands have whole vectors.
    Wide,
}

impl Tile {
    fn sides(self) -> [usize; 2] {
        match self {
            Tile::Any | Tile::Small => [64, 64],
            Tile::Tall => [128, 64],
            Tile::Wide => [128, 128],
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
        let threads = if self == Tile::Any { 256 } else { height * width / 64 };
        let blocks = [x, y, parts].map(|count| count as u32);
        Grid { blocks, threads: [threads as u32, 1, 1], shared_bytes: 0 }
    }
}

/// The bytes of a vector.
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

/// Calls a kernel with the sizes of a convolution before its other arguments.
macro_rules! sized {
    ($conv:expr, $kernel:ident($($argument:expr),*)) => {{
        let [h, w, c_in, c_out, kh, kw, stride, padding, planes] = $conv.sizes();
        $kernel(h, w, c_in, c_out, kh, kw, stride, padding, planes, $($argument),*)
    }};
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

    /// The first arguments of a kernel.
    fn sizes(&self) -> [u32; 9] {
        let Conv2d { height, width, c_in, c_out, kernel, stride, padding, layout } = self.conv;
        let has_planes = usize::from(layout == ImageLayout::Nchw);
        [height, width, c_in, c_out, kernel.0, kernel.1, stride, padding, has_planes]
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

    fn forward_tile<X: Element, S: Stored>(&self, is_aligned: bool) -> Tile {
        let is_whole = is_aligned && self.has_input_vectors::<S>() && X::DTYPE == S::DTYPE;
        if !self.has_vectors::<S>() {
            Tile::Any
        } else if is_whole && self.conv.c_out > 64 {
            Tile::Wide
        } else {
            Tile::Tall
        }
    }

    fn input_tile<S: Stored>(&self, is_aligned: bool) -> Tile {
        if !self.has_vectors::<S>() || !self.has_input_vectors::<S>() {
            Tile::Any
        } else if is_aligned && self.conv.c_in > 64 {
            Tile::Wide
        } else {
            Tile::Tall
        }
    }

    fn weight_tile<X: Element, S: Stored>(&self) -> Tile {
        let is_whole = self.has_input_vectors::<S>() && X::DTYPE == S::DTYPE;
        if !self.has_vectors::<S>() {
            Tile::Any
        } else if is_whole && self.conv.c_out > 64 && self.steps() > 64 {
            Tile::Wide
        } else {
            Tile::Small
        }
    }

    /// The parts of the positions, and the positions of a part, for the gradient of the weight.
    fn weight_parts<X: Element, S: Stored>(&self) -> [usize; 2] {
        let tile = self.weight_tile::<X, S>();
        // Blocks that keep a large card busy.
        let blocks = if tile == Tile::Small { 768 } else { 512 };
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
        let (x, w, bias) = (retyped(x), retyped(w), retyped(bias));
        let (y, is_f32) = (untyped(y), is_f32::<X, S>());
        let call = if is_rounded::<S>(card, tile) {
            self.forward_call::<Tf32>(tile, (x, is_f32), (w, bias), y, winners)
        } else {
            self.forward_call::<S>(tile, (x, is_f32), (w, bias), y, winners)
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
            Tile::Wide if !are_aligned([x.0, dy.0, winners_at, partials.0]) => Tile::Small,
            tile => tile,
        };
        let (x, partials, is_f32) = (retyped(x), untyped(partials), is_f32::<X, S>());
        let [parts, of_part] = self.weight_parts::<X, S>();
        let call = if is_rounded::<S>(card, tile) {
            self.weight_call::<Tf32>(tile, (x, is_f32), (retyped(dy), winners), of_part, partials)
        } else {
            self.weight_call::<S>(tile, (x, is_f32), (dy, winners), of_part, partials)
        };
        let accumulate = u32::from(accumulate);
        let elems = self.steps() * self.conv.c_out;
        // SAFETY: the caller's; a block writes a tile of part z of `partials`, which the second kernel reads.
        unsafe {
            card.launch(call?, tile.grid(self.steps(), self.conv.c_out, parts))?;
            let call = add_parts(partials.as_in(), parts as u64, elems as u64, accumulate, dw)?;
            card.launch(call, grid_of_parts(parts, elems))?;
        }
        let ([height, width], [.., c_out, _, _, _, _, planes]) = (self.result(), self.sizes());
        let [parts, of_part] = self.bias_parts();
        let call = sum_channels(
            dy,
            winners.unwrap_or(In::NONE),
            c_out,
            planes,
            (self.batch * height * width) as u32,
            (height * width) as u32,
            of_part as u32,
            partials,
        )?;
        let blocks = [c_out.div_ceil(32), parts as u32, 1];
        // SAFETY: the caller's; a block writes a row of `partials` (parts, c_out), which the second kernel reads.
        unsafe {
            card.launch(call, Grid { blocks, threads: [32, 8, 1], shared_bytes: 0 })?;
            let call = add_parts(partials.as_in(), parts as u64, c_out.into(), accumulate, db)?;
            card.launch(call, grid_of_parts(parts, self.conv.c_out))
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
        let (w, dx) = (retyped(w), (untyped(dx), is_f32::<X, S>()));
        let call = if is_rounded::<S>(card, tile) {
            self.input_call::<Tf32>(tile, w, (retyped(dy), winners), dx)
        } else {
            self.input_call::<S>(tile, w, (dy, winners), dx)
        };
        // SAFETY: the caller's; each thread writes gradients of positions below their number.
        unsafe { card.launch(call?, tile.grid(positions, self.conv.c_in, 1)) }
    }

    /// The kernel of [`CardConv::forward`] for elements that are multiplied as `T`.
    fn forward_call<T: Scalar>(
        &self,
        tile: Tile,
        (x, is_f32): (In<u8>, u32),
        (w, bias): (In<u8>, In<u8>),
        y: Out<u8>,
        winners: Option<Out<u8>>,
    ) -> Result<KernelCall<'static>> {
        let (y, positions) = (Out::<T>(y.0, PhantomData), self.positions() as u32);
        match winners {
            None => {
                let kernel = match tile {
                    Tile::Wide => conv2d_forward_wide,
                    Tile::Tall => conv2d_forward_tall,
                    _ => conv2d_forward,
                };
                sized!(self, kernel(x, is_f32, w, bias, y, positions))
            }
            Some(winners) => {
                let kernel = match tile {
                    Tile::Wide => conv_relu_pool_forward_wide,
                    Tile::Tall => conv_relu_pool_forward_tall,
                    _ => conv_relu_pool_forward,
                };
                sized!(self, kernel(x, is_f32, w, bias, y, winners, positions))
            }
        }
    }

    /// The first kernel of [`CardConv::backward_weight`] for elements that are multiplied as `T`.
    fn weight_call<T: Scalar>(
        &self,
        tile: Tile,
        (x, is_f32): (In<u8>, u32),
        (dy, winners): (In<T>, Option<In<u8>>),
        of_part: usize,
        partials: Out<u8>,
    ) -> Result<KernelCall<'static>> {
        let positions = self.positions() as u32;
        match winners {
            None => {
                let kernel = match tile {
                    Tile::Wide => conv2d_backward_weight_wide,
                    Tile::Small => conv2d_backward_weight_small,
                    _ => conv2d_backward_weight,
                };
                sized!(self, kernel(x, is_f32, dy, positions, of_part as u32, partials))
            }
            Some(winners) => {
                let kernel = match tile {
                    Tile::Wide => conv_relu_pool_backward_weight_wide,
                    Tile::Small => conv_relu_pool_backward_weight_small,
                    _ => conv_relu_pool_backward_weight,
                };
                sized!(self, kernel(x, is_f32, dy, winners, positions, of_part as u32, partials))
            }
        }
    }

    /// The kernel of [`CardConv::backward_input`] for elements that are multiplied as `T`.
    fn input_call<T: Scalar>(
        &self,
        tile: Tile,
        w: In<u8>,
        (dy, winners): (In<T>, Option<In<u8>>),
        (dx, is_f32): (Out<u8>, u32),
    ) -> Result<KernelCall<'static>> {
        let positions = self.batch * self.conv.height * self.conv.width;
        match winners {
            None => {
                let kernel = match tile {
                    Tile::Wide => conv2d_backward_input_wide,
                    Tile::Tall => conv2d_backward_input_tall,
                    _ => conv2d_backward_input,
                };
                sized!(self, kernel(w, dy, positions as u32, dx, is_f32))
            }
            Some(winners) => {
                let kernel = match tile {
                    Tile::Wide => conv_relu_pool_backward_input_wide,
                    Tile::Tall => conv_relu_pool_backward_input_tall,
                    _ => conv_relu_pool_backward_input,
                };
                sized!(self, kernel(w, dy, winners, positions as u32, dx, is_f32))
            }
        }
    }
}

/// Whether the kernels of a tile multiply numbers of a type as TF32.
fn is_rounded<S: Stored>(card: &OnCard, tile: Tile) -> bool {
    tile != Tile::Any && card.rounds::<S>()
}

/// Whether images are f32 although they are computed with as `S`.
fn is_f32<X: Element, S: Stored>() -> u32 {
    (X::DTYPE != S::DTYPE).into()
}

/// The number of parts of `count`, and the length of a part, so that `tiles` for each part are about `blocks` and no part but
/// the last one is shorter than `fewest`. They follow from the sizes, so the bits do too.
fn parts(count: usize, blocks: usize, tiles: usize, fewest: usize) -> [usize; 2] {
    let parts = (blocks / tiles.max(1)).min(count.div_ceil(fewest)).max(1);
    let of_part = count.div_ceil(parts).next_multiple_of(32);
    [count.div_ceil(of_part.max(1)).max(1), of_part]
}
