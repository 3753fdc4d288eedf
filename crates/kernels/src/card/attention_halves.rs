//! Kernels of attention in 16 bits, on tensor cores. See [`attention`](super::attention), which launches them.

use paceline_cuda::kernel::{In, Out};

use super::attention::SHARED;
use super::{EXP, MMA, NUMBERS};

paceline_cuda::kernels! {
    ATTENTION_HALVES = "attention_halves.cu", include_str!("attention_halves.cu"), [NUMBERS, EXP, MMA, SHARED];
    /// Outputs and logarithms.
    fn halves_forward<T: f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: Out<T>, log_sums: Out<u8>,
    );
    /// The gradient of the queries.
    fn halves_backward_queries<T: f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    /// The gradients of keys and values.
    fn halves_backward_keys<T: f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
}
