//! The kernels of convolutions, of those with ReLU and pool too. See [`conv`](super::conv), which launches them and says which
//! shapes they are for.

use paceline_cuda::kernel::{In, Out};

use super::{MMA, NUMBERS};

/// Convolutions as products.
const CONV: &str = include_str!("conv.cuh");
/// Large tiles, for images whose channels lie side by side.
const CONV_WIDE: &str = include_str!("conv_wide.cuh");

/// The struct `Conv` of the sources: height, width, channels in and out, height and width of the kernel, stride, padding, whether
/// each channel is a plane, whether the input's images are f32, positions of the batch, and those of a part.
pub(super) type ConvSizes = [u32; 12];

paceline_cuda::kernels! {
    CONV2D = "conv2d.cu", include_str!("conv2d.cu"), [NUMBERS, MMA, CONV];
    fn conv2d_forward<T: f32 | f64 | f16 | bf16>(
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>,
    );
    fn conv2d_backward_weight<T: f32 | f64 | f16 | bf16>["weight_gradient", "false"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv2d_backward_input<T: f32 | f64 | f16 | bf16>["input_gradient", "false"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
    fn sum_channels<T: f32 | f64 | f16 | bf16>(
        conv: ConvSizes, dy: In<T>, winners: In<u8>, of_image: u32, partials: Out<u8>,
    );
}

paceline_cuda::kernels! {
    CONV2D_WIDE = "conv2d_wide.cu", include_str!("conv2d_wide.cu"), [NUMBERS, MMA, CONV, CONV_WIDE];
    fn conv2d_forward_wide<T: f32 | tf32 | f16 | bf16>["conv2d_forward", "128, 128"](
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>,
    );
    fn conv2d_forward_tall<T: f32 | tf32 | f16 | bf16>["conv2d_forward", "128, 64"](
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>,
    );
    fn conv2d_backward_weight_wide<T: f32 | tf32 | f16 | bf16>["wide_weight_gradient", "false, 128"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv2d_backward_weight_small<T: f32 | tf32 | f16 | bf16>["wide_weight_gradient", "false, 64"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv2d_backward_input_wide<T: f32 | tf32 | f16 | bf16>["wide_input_gradient", "false, 128, 128"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
    fn conv2d_backward_input_tall<T: f32 | tf32 | f16 | bf16>["wide_input_gradient", "false, 128, 64"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
}

paceline_cuda::kernels! {
    CONV_RELU_POOL = "conv_relu_pool.cu", include_str!("conv_relu_pool.cu"), [NUMBERS, MMA, CONV];
    fn conv_relu_pool_forward<T: f32 | f64 | f16 | bf16>(
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>,
    );
    fn conv_relu_pool_backward_weight<T: f32 | f64 | f16 | bf16>["weight_gradient", "true"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv_relu_pool_backward_input<T: f32 | f64 | f16 | bf16>["input_gradient", "true"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
}

paceline_cuda::kernels! {
    CONV_RELU_POOL_WIDE = "conv_relu_pool_wide.cu", include_str!("conv_relu_pool_wide.cu"), [NUMBERS, MMA, CONV, CONV_WIDE];
    fn conv_relu_pool_forward_wide<T: f32 | tf32 | f16 | bf16>["conv_relu_pool_forward", "128, 128"](
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>,
    );
    fn conv_relu_pool_forward_tall<T: f32 | tf32 | f16 | bf16>["conv_relu_pool_forward", "128, 64"](
        conv: ConvSizes, x: In<u8>, w: In<u8>, bias: In<u8>, y: Out<T>, winners: Out<u8>,
    );
    fn conv_relu_pool_backward_weight_wide<T: f32 | tf32 | f16 | bf16>["wide_weight_gradient", "true, 128"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv_relu_pool_backward_weight_small<T: f32 | tf32 | f16 | bf16>["wide_weight_gradient", "true, 64"](
        conv: ConvSizes, x: In<u8>, dy: In<T>, winners: In<u8>, partials: Out<u8>,
    );
    fn conv_relu_pool_backward_input_wide<T: f32 | tf32 | f16 | bf16>["wide_input_gradient", "true, 128, 128"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
    fn conv_relu_pool_backward_input_tall<T: f32 | tf32 | f16 | bf16>["wide_input_gradient", "true, 128, 64"](
        conv: ConvSizes, w: In<u8>, dy: In<T>, winners: In<u8>, dx: Out<u8>,
    );
}
