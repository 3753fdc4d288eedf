//! Kernels of optimizer steps.

use paceline_cuda::kernel::{In, Out, Wide};

use super::NUMBERS;

paceline_cuda::kernels! {
    OPTIMIZER = "optimizer.cu", include_str!("optimizer.cu"), [NUMBERS];
    /// A step of SGD, without `v` if it is left out.
    fn sgd<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, numbers: [Wide<T>; 4], n: u64);
    /// A step of SGD whose four numbers lie in memory.
    fn sgd_from<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, numbers: In<T>, n: u64);
    /// A step of AdamW.
    fn adamw<T: f32 | f64>(p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, numbers: [Wide<T>; 9], n: u64);
    /// A step of AdamW whose nine numbers lie in memory.
    fn adamw_from<T: f32 | f64>(p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, numbers: In<T>, n: u64);
}
