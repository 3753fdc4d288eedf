//! Element-wise kernels.

use paceline_cuda::kernel::{In, Out};

use super::NUMBERS;

paceline_cuda::kernels! {
    ELEMENTWISE = "elementwise.cu", include_str!("elementwise.cu"), [NUMBERS];
    fn relu<T: f32 | f64 | f16 | bf16>(x: In<T>, y: Out<T>, n: u64);
    fn relu_backward<T: f32 | f64 | f16 | bf16>(y: In<T>, dy: In<T>, dx: Out<T>, n: u64);
    fn add<T: f32 | f64 | f16 | bf16>(x: In<T>, y: Out<T>, n: u64);
    fn divide<T: f32 | f64>(x: Out<T>, divisor: f64, n: u64);
}
