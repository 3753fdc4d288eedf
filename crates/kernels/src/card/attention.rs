//! Kernels of attention, and how their work is divided.
//!
//! Angles, logarithms and scores are of the type that kernels compute in.

use paceline_cuda::kernel::{In, Out};
use paceline_cuda::{Grid, Result};

use super::products::{retyped, untyped};
use super::{EXP, NUMBERS};
use crate::attention::AttentionSpec;
use crate::stored::Stored;
use crate::{OnCard, Real};

paceline_cuda::kernels! {
    ATTENTION = "attention.cu", include_str!("attention.cu"), [NUMBERS, EXP];
    /// Outputs and logarithms.
    fn attention_forward<T: f32 | f64 | f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: Out<T>, log_sums: Out<u8>,
    );
    /// The gradient of the queries.
    fn attention_backward_queries<T: f32 | f64 | f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    /// The gradients of keys and values.
    fn attention_backward_keys<T: f32 | f64 | f16 | bf16>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, lengths: In<i64>, angles: In<u8>,
        scale: f64, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    /// The output of one new token for each row.
    fn attention_step<T: f32 | f64>(
        batch: u32, seq: u32, heads: u32, kv_heads: u32, head_dim: u32, qkv: In<T>, angles: In<T>, scale: f64,
        position: u32, keys: Out<T>, values: Out<T>, output: Out<T>, scores: Out<T>,
    );
}

/// Queries, and keys, of a tile.
const SIDE: usize = 32;
/// Threads of a block.
const THREADS: u32 = 128;
/// Bytes of the columns of each half of a head that a block computes.
const HALF_BYTES: usize = 256;

/// The first arguments of a kernel.
fn sizes(spec: &AttentionSpec) -> [u32; 5] {
    let AttentionSpec { batch, seq, heads, kv_heads, head_dim } = *spec;
    [batch, seq, heads, kv_heads, head_dim].map(|size| size as u32)
}

/// A block for each tile of each head of each row, and for each part of the columns; with shared memory for tiles, squares and
/// numbers of the tokens of a tile.
fn grid<S: Stored>(
    spec: &AttentionSpec,
    heads: usize,
    [tiles, squares, numbers]: [usize; 3],
) -> Grid {
    let blocks = spec.batch * heads * spec.seq.div_ceil(SIDE);
    let parts = (spec.head_dim / 2).div_ceil(HALF_BYTES / size_of::<S::Real>());
    let of_token = tiles * (spec.head_dim + 1) + squares * (SIDE + 1) + numbers;
    let grid = Grid {
        blocks: [blocks as u32, parts as u32, 1],
        threads: [THREADS, 1, 1],
        shared_bytes: 0,
    };
    grid.with_shared(SIDE * of_token * size_of::<S::Real>())
}

/// # Safety
///
/// The addresses are those of operands of these sizes.
pub(crate) unsafe fn forward<S: Stored>(
    card: &OnCard,
    spec: &AttentionSpec,
    (qkv, lengths, angles): (In<S>, Option<In<i64>>, In<S::Real>),
    output: Out<S>,
    log_sums: Out<S::Real>,
) -> Result<()> {
    let [batch, seq, heads, kv_heads, head_dim] = sizes(spec);
    let (lengths, angles) = (lengths.unwrap_or(In::NONE), retyped(angles));
    let (scale, log_sums) = (spec.scale(), untyped(log_sums));
    let call = attention_forward(
        batch, seq, heads, kv_heads, head_dim, qkv, lengths, angles, scale, output, log_sums,
    )?;
    // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`.
    unsafe { card.launch(call, grid::<S>(spec, spec.heads, [3, 1, 0])) }
}

/// # Safety
///
/// The addresses are those of operands of these sizes.
pub(crate) unsafe fn backward<S: Stored>(
    card: &OnCard,
    spec: &AttentionSpec,
    (qkv, lengths, angles): (In<S>, Option<In<i64>>, In<S::Real>),
    (output, log_sums, d_output): (In<S>, In<S::Real>, In<S>),
    d_qkv: Out<S>,
) -> Result<()> {
    let [batch, seq, heads, kv_heads, head_dim] = sizes(spec);
    let (lengths, angles) = (lengths.unwrap_or(In::NONE), retyped(angles));
    let (scale, log_sums) = (spec.scale(), retyped(log_sums));
    let of_queries = attention_backward_queries(
        batch, seq, heads, kv_heads, head_dim, qkv, lengths, angles, scale, output, log_sums,
        d_output, d_qkv,
    )?;
    let of_keys = attention_backward_keys(
        batch, seq, heads, kv_heads, head_dim, qkv, lengths, angles, scale, output, log_sums,
        d_output, d_qkv,
    )?;
    // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`, the first kernel the gradients of
    // queries and the second one those of keys and values.
    unsafe {
        card.launch(of_queries, grid::<S>(spec, spec.heads, [4, 1, 2]))?;
        card.launch(of_keys, grid::<S>(spec, spec.kv_heads, [4, 2, 2]))
    }
}

/// # Safety
///
/// The addresses are those of operands of these sizes, and there is a score for each head of each row and each token up to
/// `position`.
pub(crate) unsafe fn step<T: Real>(
    card: &OnCard,
    spec: &AttentionSpec,
    position: usize,
    (qkv, angles): (In<T>, In<T>),
    (keys, values): (Out<T>, Out<T>),
    output: Out<T>,
    scores: Out<T>,
) -> Result<()> {
    let [batch, seq, heads, kv_heads, head_dim] = sizes(spec);
    let (scale, position) = (spec.scale(), position as u32);
    let call = attention_step(
        batch, seq, heads, kv_heads, head_dim, qkv, angles, scale, position, keys, values, output,
        scores,
    )?;
    let grid = Grid::blocks(batch * heads, 256).with_shared(2 * spec.head_dim * size_of::<T>());
    // SAFETY: the caller's; a block writes the output of its head of its row, and the first block of a group a place of the
    // cache.
    unsafe { card.launch(call, grid) }
}
