//! Kernels of convolutions with ReLU and pool. See [`conv`](super::conv), which launches them.

use paceline_cuda::kernel::{In, Out};

use super::conv::CONV;
use super::{MMA, NUMBERS};

paceline_cuda::kernels! {
    CONV_RELU_POOL = "conv_relu_pool.cu", include_str!("conv_relu_pool.cu"), [NUMBERS, MMA, CONV];
    /// The pooled output, and the winners.
    fn conv_relu_pool_forward<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32,
        padding: u32, has_planes: u32, x: In<u8>, is_f32: u32, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>,
        positions: u32,
    );
    /// The gradient of the weight from each part of the positions.
    fn conv_relu_pool_backward_weight<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32,
        padding: u32, has_planes: u32, x: In<u8>, is_f32: u32, dy: In<T>, winners: In<u8>, positions: u32,
        positions_of_part: u32, partials: Out<u8>,
    );
    /// The gradient of the input.
    fn conv_relu_pool_backward_input<T: f32 | f64 | f16 | bf16>(
        height: u32, width: u32, c_in: u32, c_out: u32, kernel_height: u32, kernel_width: u32, stride: u32,
        padding: u32, has_planes: u32, w: In<u8>, dy: In<T>, winners: In<u8>, positions: u32, dx: Out<u8>,
        is_f32: u32,
    );
}
