//! Kernels of batch normalization.

use paceline_cuda::kernel::{In, Out, Record, Wide};

use super::NUMBERS;

/// The struct `Norm` of the source: the operands of `batch_norm::Factors`, and the settings.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Norm<R> {
    pub(crate) moments: In<f64>,
    pub(crate) weight: In<R>,
    pub(crate) bias: In<R>,
    pub(crate) eps: f64,
    pub(crate) channels: u32,
    pub(crate) with_relu: u32,
}

// SAFETY: laid out as in C; four numbers of 8 bytes come before two of 4, so there are no gaps.
unsafe impl<R: Copy> Record for Norm<R> {}

paceline_cuda::kernels! {
    BATCH_NORM = "batch_norm.cu", include_str!("batch_norm.cu"), [NUMBERS];
    fn norm_sums<S: f32 | f64 | f16 | bf16>(x: In<S>, blocks: Out<f64>, channels: u32, rows: u64, rows_of_block: u32);
    fn norm_gradient_sums<S: f32 | f64 | f16 | bf16>(
        x: In<S>, dy: In<S>, norm: Norm<Wide<S>>, blocks: Out<f64>, rows: u64, rows_of_block: u32,
    );
    fn norm_add_blocks(blocks: In<f64>, sums: Out<f64>, count: Out<f64>, len: u32, num_blocks: u32, rows: f64);
    fn norm_moments(sums: In<f64>, moments: Out<f64>, channels: u32);
    fn norm_running_moments<R: f32 | f64>(mean: In<R>, var: In<R>, moments: Out<f64>, channels: u32);
    fn norm_update_running<R: f32 | f64>(moments: In<f64>, mean: Out<R>, var: Out<R>, momentum: f64, channels: u32);
    fn norm_normalize<S: f32 | f64 | f16 | bf16>(x: In<S>, norm: Norm<Wide<S>>, y: Out<S>, n: u64);
    fn norm_backward_input<S: f32 | f64 | f16 | bf16>(
        x: In<S>, dy: In<S>, norm: Norm<Wide<S>>, gradient_sums: In<f64>, dx: Out<S>, n: u64,
    );
    fn norm_backward_weight<R: f32 | f64>(
        gradient_sums: In<f64>, d_weight: Out<R>, d_bias: Out<R>, accumulate: u32, channels: u32,
    );
}
