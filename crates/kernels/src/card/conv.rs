//! Kernels of convolutions, and how their work is divided.
//!
//! Images and gradients of the input are f32 or of the type that a kernel is named for, which its argument `is_f32` says.
//! Parameters and sums are of the type that kernels compute in. Each kernel that multiplies gets a block of [`THREADS`] for
//! each tile of [`SIDE`] x [`SIDE`] results. This file does not know which operation convolves.

use paceline_cuda::kernel::{In, Out};
use paceline_cuda::{Grid, Result};
use paceline_memory::Element;

use super::conv_relu_pool::{
    conv_relu_pool_backward_input, conv_relu_pool_backward_weight, conv_relu_pool_forward,
};
use super::products::{Multiplied, add_parts, retyped, untyped};
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

/// Rows, and columns, of a tile of results.
const SIDE: usize = 64;
/// Threads of a tile.
const THREADS: u32 = 256;

fn grid(rows: usize, columns: usize, parts: usize) -> Grid {
    let blocks = [rows.div_ceil(SIDE), columns.div_ceil(SIDE), parts].map(|count| count as u32);
    Grid { blocks, threads: [THREADS, 1, 1], shared_bytes: 0 }
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

    /// The parts of the positions, and the positions of a part, for the gradient of the weight.
    fn weight_parts(&self) -> [usize; 2] {
        let tiles = self.steps().div_ceil(SIDE) * self.conv.c_out.div_ceil(SIDE);
        parts(self.positions(), tiles, 256)
    }

    /// The parts of what a bias's gradient is summed over, and the positions of a part.
    fn bias_parts(&self) -> [usize; 2] {
        let [height, width] = self.result();
        parts(self.batch * height * width, self.conv.c_out.div_ceil(32), 64)
    }

    /// Elements of the scratch memory of [`CardConv::backward_weight`].
    pub(crate) fn scratch_len(&self) -> usize {
        let ([of_weight, _], [of_bias, _]) = (self.weight_parts(), self.bias_parts());
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
        let [h, wide, c_in, c_out, kh, kw, stride, padding, planes] = self.sizes();
        let (x, w, bias) = (retyped(x), retyped(w), retyped(bias));
        let (positions, is_f32) = (self.positions() as u32, is_f32::<X, S>());
        let call = match winners {
            None => conv2d_forward(
                h, wide, c_in, c_out, kh, kw, stride, padding, planes, x, is_f32, w, bias, y,
                positions,
            ),
            Some(winners) => conv_relu_pool_forward(
                h, wide, c_in, c_out, kh, kw, stride, padding, planes, x, is_f32, w, bias, y,
                winners, positions,
            ),
        };
        // SAFETY: the caller's; each thread writes results of positions below their number.
        unsafe { card.launch(call?, grid(self.positions(), self.conv.c_out, 1)) }
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
        let [h, wide, c_in, c_out, kh, kw, stride, padding, planes] = self.sizes();
        let (x, partials, is_f32) = (retyped(x), untyped(partials), is_f32::<X, S>());
        let (positions, accumulate) = (self.positions() as u32, u32::from(accumulate));
        let [parts, of_part] = self.weight_parts();
        let call = match winners {
            None => conv2d_backward_weight(
                h,
                wide,
                c_in,
                c_out,
                kh,
                kw,
                stride,
                padding,
                planes,
                x,
                is_f32,
                dy,
                positions,
                of_part as u32,
                partials,
            ),
            Some(winners) => conv_relu_pool_backward_weight(
                h,
                wide,
                c_in,
                c_out,
                kh,
                kw,
                stride,
                padding,
                planes,
                x,
                is_f32,
                dy,
                winners,
                positions,
                of_part as u32,
                partials,
            ),
        };
        let elems = self.steps() * self.conv.c_out;
        // SAFETY: the caller's; a block writes a tile of part z of `partials`, which the second kernel reads.
        unsafe {
            card.launch(call?, grid(self.steps(), self.conv.c_out, parts))?;
            let call = add_parts(partials.as_in(), parts as u64, elems as u64, accumulate, dw)?;
            card.launch(call, Grid::elements(elems))?;
        }
        let [height, width] = self.result();
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
            card.launch(call, Grid::elements(self.conv.c_out))
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
        let [h, wide, c_in, c_out, kh, kw, stride, padding, planes] = self.sizes();
        let positions = self.batch * self.conv.height * self.conv.width;
        let (w, dx, is_f32) = (retyped(w), untyped(dx), is_f32::<X, S>());
        let call = match winners {
            None => conv2d_backward_input(
                h,
                wide,
                c_in,
                c_out,
                kh,
                kw,
                stride,
                padding,
                planes,
                w,
                dy,
                positions as u32,
                dx,
                is_f32,
            ),
            Some(winners) => conv_relu_pool_backward_input(
                h,
                wide,
                c_in,
                c_out,
                kh,
                kw,
                stride,
                padding,
                planes,
                w,
                dy,
                winners,
                positions as u32,
                dx,
                is_f32,
            ),
        };
        // SAFETY: the caller's; each thread writes gradients of positions below their number.
        unsafe { card.launch(call?, grid(positions, self.conv.c_in, 1)) }
    }
}

/// Whether images are f32 although they are computed with as `S`.
fn is_f32<X: Element, S: Stored>() -> u32 {
    (X::DTYPE != S::DTYPE).into()
}

/// The number of parts of `count`, and the length of a part, so that `tiles` for each part keep a large card busy and no part
/// but the last one is shorter than `fewest`. They follow from the sizes, so the bits do too.
fn parts(count: usize, tiles: usize, fewest: usize) -> [usize; 2] {
    /// Blocks that keep a large card busy.
    const BLOCKS: usize = 512;
    let parts = (BLOCKS / tiles.max(1)).min(count.div_ceil(fewest)).max(1);
    let of_part = count.div_ceil(parts).next_multiple_of(16);
    [count.div_ceil(of_part.max(1)).max(1), of_part]
}
