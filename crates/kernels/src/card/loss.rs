//! Kernels of losses.

use paceline_cuda::kernel::{In, Out, Wide};

use super::{NUMBERS, REDUCE};

paceline_cuda::kernels! {
    LOSS = "loss.cu", include_str!("loss.cu"), [NUMBERS, REDUCE];
    fn cross_entropy<S: f32 | f64 | f16 | bf16>(
        logits: In<S>, labels: In<i64>, d_logits: Out<S>, of_rows: Out<f64>, scale: Wide<S>, classes: u32, rows: u64,
    );
    fn add_rows(of_rows: In<f64>, sums: Out<f64>, rows: u64);
    fn mse<S: f32 | f64 | f16 | bf16>(
        x: In<S>, t: In<Wide<S>>, d_input: Out<S>, of_blocks: Out<f64>, factor: Wide<S>, n: u64,
    );
    fn add_blocks(of_blocks: In<f64>, sums: Out<f64>, blocks: u32, columns: f64, rows: f64);
}
