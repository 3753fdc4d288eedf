//! Kernels of attention, and how their work is divided.
//!
//! Heads in f32 and f64 are worked on tile by tile, and heads in 16 bits are multiplied on tensor cores. Angles, logarithms and
//! scores are of the type that kernels compute in.

use std::marker::PhantomData;

use paceline_cuda::kernel::{In, Out, Record};
use paceline_cuda::{Grid, KernelSource, Result};
use paceline_memory::{DType, Element};

use super::AttentionSpec;
use crate::card::products::{from_elem_mut, retyped};
use crate::card::{EXP, MMA, NUMBERS};
use crate::stored::Stored;
use crate::{CardNeeds, OnCard};

const OF_ALL: &str = include_str!("card.cuh");

/// The struct `Attention` of the sources.
#[derive(Clone, Copy)]
#[repr(C)]
struct CardAttention {
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

pub(crate) static CARD: KernelSource =
    KernelSource::new("attention/card.cu", include_str!("card.cu"), &[NUMBERS, EXP, OF_ALL]);

pub(crate) static CARD_HALVES: KernelSource = KernelSource::new(
    "attention/card_halves.cu",
    include_str!("card_halves.cu"),
    &[NUMBERS, EXP, MMA, OF_ALL],
);

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

/// The constant of kernels for queries in 16 bits: columns of each half of a head that a block computes; and its most warps.
fn columns(spec: &AttentionSpec) -> (&'static str, usize, usize) {
    if spec.head_dim <= 64 { ("32", 32, 8) } else { ("64", 64, 4) }
}

/// How the work of the forward pass is divided.
fn forward_grid<S: Stored>(spec: &AttentionSpec) -> Grid {
    if are_halves::<S>() {
        let (_, columns, warps) = columns(spec);
        halves_grid(spec, spec.heads, (1, columns, warps))
    } else {
        grid::<S>(spec, spec.heads, [3, 1, 0])
    }
}

/// How the work of the backward pass is divided: it has a kernel for queries, then one for keys and values.
fn backward_grids<S: Stored>(spec: &AttentionSpec) -> [Grid; 2] {
    let [heads, kv_heads] = [spec.heads, spec.kv_heads];
    if are_halves::<S>() {
        let (_, columns, warps) = columns(spec);
        [halves_grid(spec, heads, (2, columns, warps)), halves_grid(spec, kv_heads, (2, 32, 4))]
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

/// A block has at most `warps` warps, each with a run of 16 tokens, and a part of the columns: `columns` of each half of a head. Its
/// shared memory holds tiles of its own tokens and of 32 others.
fn halves_grid(
    spec: &AttentionSpec,
    heads: usize,
    (tiles, columns, warps): (usize, usize, usize),
) -> Grid {
    let warps = spec.seq.div_ceil(16).clamp(1, warps);
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
    let kernel = if are_halves::<S>() {
        CARD_HALVES.with::<S>("halves_forward", columns(spec).0)
    } else {
        CARD.of::<S>("attention_forward")
    };
    let arguments = (first_argument(spec, lengths, angles), qkv, output, log_sums);
    // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`.
    unsafe { card.launch(kernel, arguments, forward_grid::<S>(spec)) }
}

/// Elements of scratch memory of a backward pass. In 16 bits: rotated queries, and a number for each.
pub(crate) fn scratch_len(dtype: DType, spec: &AttentionSpec) -> usize {
    let [tokens, columns] = spec.output_shape();
    let turned = (tokens * columns).div_ceil(2);
    if matches!(dtype, DType::F32 | DType::F64) { 0 } else { turned + spec.log_sums_len() }
}

/// # Safety
///
/// The addresses are those of operands of these sizes; in 16 bits, `space` has the elements of [`scratch_len`].
pub(crate) unsafe fn backward<S: Stored>(
    card: &OnCard,
    spec: &AttentionSpec,
    (qkv, lengths, angles): (In<S>, Option<In<i64>>, In<S::Real>),
    (output, log_sums, d_output): (In<S>, In<S::Real>, In<S>),
    d_qkv: Out<S>,
    space: Out<f32>,
) -> Result<()> {
    let first = first_argument(spec, lengths, angles);
    let [queries, keys] = backward_grids::<S>(spec);
    // SAFETY: the caller's; a block writes what belongs to its tile of tokens below `seq`, the first kernel the gradients of
    // queries and the second one those of keys and values. In 16 bits the first one also writes rotated queries, and a product for
    // each of them, which the second one reads.
    unsafe {
        if are_halves::<S>() {
            let kernel = CARD_HALVES.with::<S>("halves_backward_queries", columns(spec).0);
            let products = from_elem_mut(space, scratch_len(S::DTYPE, spec) - spec.log_sums_len());
            let turned: Out<S> = Out(space.0, PhantomData);
            let arguments = (first, qkv, output, log_sums, d_output, d_qkv, products, turned);
            card.launch(kernel, arguments, queries)?;
            let (products, turned) = (products.as_in(), turned.as_in());
            let arguments = (first, qkv, log_sums, products, turned, d_output, d_qkv);
            return card.launch(CARD_HALVES.of::<S>("halves_backward_keys"), arguments, keys);
        }
        let arguments = (first, qkv, output, log_sums, d_output, d_qkv);
        card.launch(CARD.of::<S>("attention_backward_queries"), arguments, queries)?;
        card.launch(CARD.of::<S>("attention_backward_keys"), arguments, keys)
    }
}
