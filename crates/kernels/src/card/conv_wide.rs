//! Kernels of convolutions in large tiles, for images whose channels lie side by side. See [`conv`](super::conv), which
//! launches them and says which shapes they are for.

use paceline_cuda::kernel::{In, Out};

use super::conv::CONV;
use super::{MMA, NUMBERS};

/// Large tiles.
const CONV_WIDE: &str = include_str!("conv_wide.cuh");

paceline_cuda::kernels! {
    CONV2D_WIDE = "conv2d_wide.cu", include_str!("conv2d_wide.cu"), [NUMBERS, MMA, CONV, CONV_WIDE];
    /// The output, in tiles of 128 x 128.
    fn conv2d_forward_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, positions: u32,
    );
    /// The same in tiles of 128 x 64.
    fn conv2d_forward_tall<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, positions: u32,
    );
    /// The gradient of the weight from each part of the positions, in tiles of 128 x 128.
    fn conv2d_backward_weight_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, positions: u32, positions_of_part: u32, partials: Out<u8>,
    );
    /// The same in tiles of 64 x 64.
    fn conv2d_backward_weight_small<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, positions: u32, positions_of_part: u32, partials: Out<u8>,
    );
    /// The gradient of the input, in tiles of 128 x 128.
    fn conv2d_backward_input_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, w: In<u8>, dy: In<T>, positions: u32, dx: Out<u8>, is_f32: u32,
    );
    /// The same in tiles of 128 x 64.
    fn conv2d_backward_input_tall<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, w: In<u8>, dy: In<T>, positions: u32, dx: Out<u8>, is_f32: u32,
    );
}

paceline_cuda::kernels! {
    CONV_RELU_POOL_WIDE = "conv_relu_pool_wide.cu", include_str!("conv_relu_pool_wide.cu"), [NUMBERS, MMA, CONV, CONV_WIDE];
    /// The pooled output, and the winners, in tiles of 128 x 128.
    fn conv_relu_pool_forward_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>, positions: u32,
    );
    /// The same in tiles of 128 x 64.
    fn conv_relu_pool_forward_tall<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>, positions: u32,
    );
    /// The gradient of the weight from each part of the positions, in tiles of 128 x 128.
    fn conv_relu_pool_backward_weight_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, winners: In<u8>, positions: u32, positions_of_part: u32, partials: Out<u8>,
    );
    /// The same in tiles of 64 x 64.
    fn conv_relu_pool_backward_weight_small<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, winners: In<u8>, positions: u32, positions_of_part: u32, partials: Out<u8>,
    );
    /// The gradient of the input, in tiles of 128 x 128.
    fn conv_relu_pool_backward_input_wide<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, w: In<u8>, dy: In<T>, winners: In<u8>, positions: u32, dx: Out<u8>, is_f32: u32,
    );
    /// The same in tiles of 128 x 64.
    fn conv_relu_pool_backward_input_tall<T: f32 | tf32 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
        has_planes: u32, w: In<u8>, dy: In<T>, winners: In<u8>, positions: u32, dx: Out<u8>, is_f32: u32,
    );
}
