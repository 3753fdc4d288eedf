//! Kernels of norms.

use paceline_cuda::kernel::{In, Out};

use super::NUMBERS;

paceline_cuda::kernels! {
    NORM = "norm.cu", include_str!("norm.cu"), [NUMBERS];
    fn squares_of_runs<T: f32 | f64>(
        x: In<T>, pieces: In<i64>, num_pieces: u32, nodes: In<i64>, num_nodes: u32, of_runs: Out<f64>,
    );
    fn squares_of_nodes(of_runs: In<f64>, nodes: In<i64>, of_nodes: Out<f64>);
}
