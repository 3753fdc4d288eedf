//! Kernels of optimizer steps.

use paceline_cuda::kernel::{In, Out, Wide};

use super::NUMBERS;

paceline_cuda::kernels! {
    OPTIMIZER = "optimizer.cu", include_str!("optimizer.cu"), [NUMBERS];
    fn sgd<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, numbers: [Wide<T>; 4], n: u64);
    fn sgd_from<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, numbers: In<T>, n: u64);
    fn adamw<T: f32 | f64>(p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, numbers: [Wide<T>; 9], n: u64);
    fn adamw_from<T: f32 | f64>(p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, numbers: In<T>, n: u64);
}
