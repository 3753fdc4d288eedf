//! Kernels of attention with narrow heads. See [`attention`](super::attention), which launches them.

use paceline_cuda::kernel::{In, Out};

use super::attention::SHARED;
use super::{EXP, NUMBERS};

paceline_cuda::kernels! {
    ATTENTION_NARROW = "attention_narrow.cu", include_str!("attention_narrow.cu"), [NUMBERS, EXP, SHARED];
    /// Outputs and logarithms.
    fn narrow_forward<T: f32 | f64>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: Out<T>, log_sums: Out<u8>,
    );
    /// The gradient of the queries.
    fn narrow_backward_queries<T: f32 | f64>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    /// The gradients of keys and values.
    fn narrow_backward_keys<T: f32 | f64>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
}
