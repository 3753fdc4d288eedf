//! Kernels of pools and layouts.

use paceline_cuda::kernel::{In, Out};

use super::NUMBERS;

paceline_cuda::kernels! {
    IMAGES = "images.cu", include_str!("images.cu"), [NUMBERS];
    fn pool<S: f32 | f64 | f16 | bf16>(x: In<S>, y: Out<S>, winners: Out<u8>, sizes: [u32; 7], n: u64);
    fn pool_backward<S: f32 | f64 | f16 | bf16>(
        winners: In<u8>, dy: In<S>, dx: Out<S>, sizes: [u32; 7], n: u64,
    );
    fn transpose<T: f32 | f64 | bf16 | u8>(x: In<T>, y: Out<T>, rows: u32, columns: u32, tiles: u32);
}
