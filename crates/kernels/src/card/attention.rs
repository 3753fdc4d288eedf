//! Kernels of attention, and how their work is divided.
//!
//! Heads in f32 and f64 are worked on tile by tile, and heads in 16 bits are multiplied on tensor cores. Angles, logarithms and
//! scores are of the type that kernels compute in.

use paceline_cuda::kernel::{In, Out, Record};
use paceline_cuda::{Grid, Result};
use paceline_memory::Element;

use super::products::{retyped, untyped};
use super::{EXP, MMA, NUMBERS};
use crate::attention::AttentionSpec;
use crate::stored::Stored;
use crate::{CardNeeds, OnCard};

const ATTENTION_OF_ALL: &str = include_str!("attention.cuh");

/// The struct `Attention` of the sources.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CardAttention {
    seq: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    scale: f64,
    lengths: In<i64>,
    angles: In<u8>,
}

// SAFETY: laid out as in C; four numbers of 4 bytes come before three of 8, so there are no gaps.
unsafe impl Record for CardAttention {}

paceline_cuda::kernels! {
    ATTENTION = "attention.cu", include_str!("attention.cu"), [NUMBERS, EXP, ATTENTION_OF_ALL];
    fn attention_forward<T: f32 | f64>(spec: CardAttention, qkv: In<T>, output: Out<T>, log_sums: Out<u8>);
    fn attention_backward_queries<T: f32 | f64>(
        spec: CardAttention, qkv: In<T>, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    fn attention_backward_keys<T: f32 | f64>(
        spec: CardAttention, qkv: In<T>, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
}

paceline_cuda::kernels! {
    ATTENTION_HALVES = "attention_halves.cu", include_str!("attention_halves.cu"), [NUMBERS, EXP, MMA, ATTENTION_OF_ALL];
    fn halves_forward<T: f16 | bf16>(spec: CardAttention, qkv: In<T>, output: Out<T>, log_sums: Out<u8>);
    fn halves_backward_queries<T: f16 | bf16>(
        spec: CardAttention, qkv: In<T>, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
    fn halves_backward_keys<T: f16 | bf16>(
        spec: CardAttention, qkv: In<T>, output: In<T>, log_sums: In<u8>, d_output: In<T>, d_qkv: Out<T>,
    );
}

/// Queries, and keys, of a tile.
const SIDE: usize = 32;
const THREADS: u32 = 128;
/// Bytes of the columns of each half of a head that a block computes.
const HALF_BYTES: usize = 256;

fn first_argument<R>(
    spec: &AttentionSpec,
    lengths: Option<In<i64>>,
    angles: In<R>,
) -> CardAttention {
    let [seq, heads, kv_heads, head_dim] =
        [spec.seq, spec.heads, spec.kv_heads, spec.head_dim].map(|size| size as u32);
    let (lengths, angles) = (lengths.unwrap_or(In::NONE), retyped(angles));
    CardAttention { seq, heads, kv_heads, head_dim, scale: spec.scale(), lengths, angles }
}

/// Whether heads are multiplied on tensor cores: those in 16 bits.
fn are_halves<S: Stored>() -> bool {
    S::DTYPE != <S::Real as Element>::DTYPE
}

/// How the work of the forward pass is divided.
fn forward_grid<S: Stored>(spec: &AttentionSpec) -> Grid {
    if are_halves::<S>() {
        halves_grid(spec, spec.heads, (1, 64))
    } else {
        grid::<S>(spec, spec.heads, [3, 1, 0])
    }
}

/// How the work of the backward pass is divided: it has a kernel for queries, then one for keys and values.
fn backward_grids<S: Stored>(spec: &AttentionSpec) -> [Grid; 2] {
    let [heads, kv_heads] = [spec.heads, spec.kv_heads];
    if are_halves::<S>() {
        [halves_grid(spec, heads, (2, 64)), halves_grid(spec, kv_heads, (2, 32))]
    } else {
        [grid::<S>(spec, heads, [4, 1, 2]), grid::<S>(spec, kv_heads, [4, 2, 2])]
    }
}

/// The needs of a forward and of a backward pass.
pub(crate) fn needs<S: Stored>(spec: &AttentionSpec) -> [CardNeeds; 2] {
    let all = CardNeeds::of_products::<S>();
    let [queries, keys] = backward_grids::<S>(spec);
    [all.and_grid(forward_grid::<S>(spec)), all.and_grid(queries).and_grid(keys)]
}

/// A block has at most 4 warps, each with a run of 16 tokens, and a part of the columns: `columns` of each half of a head. Its
/// shared memory holds tiles of its own tokens and of 32 others.
fn halves_grid(spec: &AttentionSpec, heads: usize, (tiles, columns): (usize, usize)) -> Grid {
    let warps = spec.seq.div_ceil(16).clamp(1, 4);
    let blocks = spec.batch * heads * spec.seq.div_ceil(16 * warps);
    let half = (spec.head_dim / 2).next_multiple_of(8);
    let tokens = tiles * 16 * warps + 2 * SIDE;
    let tile_bytes = tokens * (2 * half + 8) * size_of::<u16>();
    let grid = Grid {
        blocks: [blocks as u32, half.div_ceil(columns) as u32, 1],
        threads: [32 * warps as u32, 1, 1],
        shared_bytes: 0,
    };
    grid.with_shared(tile_bytes)
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
    let kernel = if are_halves::<S>() { halves_forward } else { attention_forward };
    let call = kernel(first_argument(spec, lengths, angles), qkv, output, untyped(log_sums))?;
    // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`.
    unsafe { card.launch(call, forward_grid::<S>(spec)) }
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
    let (first, log_sums) = (first_argument(spec, lengths, angles), retyped(log_sums));
    let kernels = if are_halves::<S>() {
        [halves_backward_queries, halves_backward_keys]
    } else {
        [attention_backward_queries, attention_backward_keys]
    };
    for (kernel, grid) in kernels.into_iter().zip(backward_grids::<S>(spec)) {
        let call = kernel(first, qkv, output, log_sums, d_output, d_qkv)?;
        // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`, the first kernel the gradients of
        // queries and the second one those of keys and values.
        unsafe { card.launch(call, grid)? };
    }
    Ok(())
}
