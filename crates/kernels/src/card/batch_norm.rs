//! Kernels of batch normalization.

use paceline_cuda::kernel::{In, Out, Wide};

use super::NUMBERS;

paceline_cuda::kernels! {
    BATCH_NORM = "batch_norm.cu", include_str!("batch_norm.cu"), [NUMBERS];
    /// A thread for each channel and block of rows: both sums.
    fn norm_sums<S: f32 | f64 | f16 | bf16>(x: In<S>, blocks: Out<f64>, channels: u32, rows: u64, rows_of_block: u32);
    /// A thread for each channel and block of rows: both sums of gradients.
    fn norm_gradient_sums<S: f32 | f64 | f16 | bf16>(
        x: In<S>, dy: In<S>, moments: In<f64>, weight: In<Wide<S>>, bias: In<Wide<S>>, eps: f64, relu: u32,
        blocks: Out<f64>, channels: u32, rows: u64, rows_of_block: u32,
    );
    /// A thread for each sum: over the blocks.
    fn norm_add_blocks(blocks: In<f64>, sums: Out<f64>, count: Out<f64>, len: u32, num_blocks: u32, rows: f64);
    /// A thread for each channel.
    fn norm_moments(sums: In<f64>, moments: Out<f64>, channels: u32);
    /// A thread for each channel.
    fn norm_running_moments<R: f32 | f64>(mean: In<R>, var: In<R>, moments: Out<f64>, channels: u32);
    /// A thread for each channel.
    fn norm_update_running<R: f32 | f64>(moments: In<f64>, mean: Out<R>, var: Out<R>, momentum: f64, channels: u32);
    /// A thread for each element.
    fn norm_normalize<S: f32 | f64 | f16 | bf16>(
        x: In<S>, moments: In<f64>, weight: In<Wide<S>>, bias: In<Wide<S>>, eps: f64, relu: u32, y: Out<S>,
        channels: u32, n: u64,
    );
    /// A thread for each element.
    fn norm_backward_input<S: f32 | f64 | f16 | bf16>(
        x: In<S>, dy: In<S>, moments: In<f64>, weight: In<Wide<S>>, bias: In<Wide<S>>, eps: f64, relu: u32,
        gradient_sums: In<f64>, dx: Out<S>, channels: u32, n: u64,
    );
    /// A thread for each channel.
    fn norm_backward_weight<R: f32 | f64>(
        gradient_sums: In<f64>, d_weight: Out<R>, d_bias: Out<R>, accumulate: u32, channels: u32,
    );
}
