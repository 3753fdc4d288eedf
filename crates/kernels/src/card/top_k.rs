//! Kernels of selections of the largest elements.

use paceline_cuda::kernel::{In, Out};

use super::NUMBERS;

/// Elements of the counts of digits, which are 11 bits at most.
pub(crate) const COUNTS: usize = 1 << 11;

paceline_cuda::kernels! {
    TOP_K = "top_k.cu", include_str!("top_k.cu"), [NUMBERS];
    fn top_k_begin(state: Out<i32>, counts: Out<i32>, k: u32);
    fn top_k_count(residual: In<f32>, state: In<i32>, counts: Out<i32>, shift: u32, bits: u32, n: u64);
    fn top_k_digit(state: Out<i32>, counts: Out<i32>, bits: u32);
    fn top_k_count_blocks(residual: In<f32>, state: In<i32>, of_blocks: Out<i32>, n: u64);
    fn top_k_sum_blocks(of_blocks: Out<i32>, blocks: u32);
    fn top_k_move(residual: Out<f32>, state: In<i32>, of_blocks: In<i32>, selected: Out<i32>, k: u32, n: u64);
    fn top_k_mean(selections: In<i32>, mean: Out<f32>, k: u32, n: u32, len: u64);
}
