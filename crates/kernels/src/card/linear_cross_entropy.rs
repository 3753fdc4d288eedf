//! Kernels of the loss of a language model's head.

use paceline_cuda::kernel::{In, Out};

use super::{EXP, NUMBERS};

paceline_cuda::kernels! {
    LINEAR_CROSS_ENTROPY = "linear_cross_entropy.cu", include_str!("linear_cross_entropy.cu"), [NUMBERS, EXP];
    /// z is of the type that kernels compute in.
    fn row_losses<T: f32 | f64 | f16 | bf16>(
        labels: In<i64>, classes: u64, scale: f64, wants_gradient: u32, z: Out<u8>, rounded: Out<T>, losses: Out<f64>,
        marks: Out<i32>,
    );
    fn add_losses(losses: In<f64>, marks: In<i32>, rows: u64, sums: Out<f64>);
    fn ignore_padding(labels: In<i64>, lengths: In<i64>, seq: u64, real: Out<i64>, n: u64);
}
