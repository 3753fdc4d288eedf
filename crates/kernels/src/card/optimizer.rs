//! Kernels of optimizer steps.

use paceline_cuda::kernel::{In, Out, Wide};

use super::NUMBERS;

paceline_cuda::kernels! {
    OPTIMIZER = "optimizer.cu", include_str!("optimizer.cu"), [NUMBERS];
    /// A step of SGD, without `v` if it is left out.
    fn sgd<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, factor: Wide<T>, lr: Wide<T>, momentum: Wide<T>, weight_decay: Wide<T>, n: u64);
    /// A step of SGD whose four numbers lie in memory.
    fn sgd_from<T: f32 | f64>(p: Out<T>, g: In<T>, v: Out<T>, numbers: In<T>, n: u64);
    /// A step of AdamW.
    fn adamw<T: f32 | f64>(
        p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, factor: Wide<T>, beta1: Wide<T>, rest1: Wide<T>, beta2: Wide<T>, rest2: Wide<T>, eps: Wide<T>,
        shrink: Wide<T>, rate: Wide<T>, root: Wide<T>, n: u64,
    );
    /// A step of AdamW whose nine numbers lie in memory.
    fn adamw_from<T: f32 | f64>(p: Out<T>, g: In<T>, m: Out<T>, v: Out<T>, numbers: In<T>, n: u64);
}
