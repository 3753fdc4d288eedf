//! Causal attention of a Llama: rotated queries and keys, grouped heads, rows of different lengths.
//!
//! Input: the queries, keys and values of all heads side by side, one row per token, and the number of real tokens of each row of
//! the batch. Output: the mean of the values that each query attends to, and the gradients. Nothing is kept between calls: the
//! cache of [`step`], which computes one token at a time, belongs to the caller.
//!
//! No matrix of (seq, seq) exists: work goes by 64 queries and 64 keys, and the backward pass computes probabilities again from
//! the logarithms of the forward pass's sums. Each f32 thread takes [`forward_scratch`] or [`backward_scratch`] elements of
//! scratch memory, which grow linearly with `seq`.
//!
//! Threads share the pairs of a row of the batch and a head of keys. What a pair computes depends only on the real tokens
//! of its row: neither on other rows, nor on the padding, nor on the number of threads.
//!
//! With AMX, products in bf16 are computed in its tiles, if heads rounded up to 16 elements are a multiple of 32 (see `in_tiles`).
//! Rotated queries and keys, probabilities and gradients of scores are rounded to bf16 then: results, and logarithms, are within
//! 4/256 of the largest. Infinite values of a token then make the outputs of up to 31 tokens before it NaN, and infinite
//! queries or gradients those of up to 31 tokens after it; otherwise of up to 7.
//!
//! A card has tiles of 32, and computes scores a second time in the backward pass, for keys and for queries. Results differ from
//! the processor's by at most 1e-5 of the largest element of a result in f32 and 1e-13 in f64. In 16 bits its tensor cores
//! multiply, so the same numbers are rounded to the type: results, and logarithms, are within 4/256 of the largest in bf16 and
//! 4/2048 in f16. A card cannot report a wrong length: all results of the row become NaN.
//!
//! Sources: Vaswani et al., "Attention Is All You Need", 2017; Su et al., "RoFormer", 2021 (rotation); Ainslie et al.,
//! "GQA: Training Generalized Multi-Query Transformer Models", 2023 (grouped heads); Dao, "FlashAttention-2", 2023
//! (tiles, and the backward pass).

use std::borrow::Cow;

use half::{bf16, f16};
use paceline_memory::{DType, Tensor};

use crate::rotary::RotaryTable;
use crate::stored::Stored;
use crate::threads::batches;
use crate::tiles::{self, Ways};
use crate::{Compute, KernelError, Op, Processor, Result, read, scratch, write};

mod backward;
pub(crate) mod card;
mod forward;
mod in_tiles;
pub(crate) mod plain;
mod product;
mod spec;
mod step;
mod tile;

use self::backward::Results;
pub use self::spec::AttentionSpec;
pub use self::step::{keep, step};
use self::tile::{OwnPlaces, PairOperands, SharedMatrix, TokenMatrix};

/// Elements of f32 scratch memory of a thread of [`forward()`]: `2 s d + 3 * 64 d + 64 * 64`, where `s` is `seq`
/// rounded up to 64, and `d` is `head_dim` rounded up to 16.
pub fn forward_scratch(spec: &AttentionSpec) -> usize {
    tile::scratch_len(spec, 2, 3, 1)
}

/// Elements of f32 scratch memory of a thread of [`backward()`]: `4 s d + 5 * 64 d + 2 * 64 * 64`, with the names of
/// [`forward_scratch`].
pub fn backward_scratch(spec: &AttentionSpec) -> usize {
    tile::scratch_len(spec, 4, 5, 2)
}

/// The elements of all threads, or those that a card needs.
fn scratch_of(compute: &Compute, spec: &AttentionSpec, of_thread: usize, of_card: usize) -> usize {
    if compute.is_card() { of_card } else { spec.num_parts(compute.processor()) * of_thread }
}

/// The number of real tokens of each row, which is `seq` if there are no lengths. Errors if a length is too large.
fn real_lengths<'a>(
    op: Op,
    spec: &AttentionSpec,
    lengths: Option<&'a [i64]>,
) -> Result<Cow<'a, [i64]>> {
    let Some(lengths) = lengths else { return Ok(vec![spec.seq as i64; spec.batch].into()) };
    let is_wrong = |len: &i64| !(0..=spec.seq as i64).contains(len);
    let Some(row) = lengths.iter().position(is_wrong) else { return Ok(lengths.into()) };
    let reason = format!("length {} of row {row} is not within 0..={}", lengths[row], spec.seq);
    Err(KernelError::Geometry { op: op.name, reason })
}

/// For each head and each query `i` of a row, over its keys `j <= i`:
/// `s[j] = (R_i q[i] . R_j k[j]) / sqrt(head_dim)`, `log_sum[i] = ln(sum over j of exp(s[j]))` and
/// `output[i] = sum over j of exp(s[j] - log_sum[i]) v[j]`. `R_i` is the rotation of position `i` of the table; the
/// position of a token is its place in its row.
///
/// Shapes: qkv [`AttentionSpec::qkv_shape`], not rotated; lengths (batch) of i64, the real tokens of each row, which come
/// first, or `None` if there is no padding; output [`AttentionSpec::output_shape`]; log_sums (batch * heads * seq), for
/// [`backward()`].
///
/// Types: all f32, all f64, or qkv and output in bf16 or f16 with log_sums and table in f32; everything is then computed in
/// f32, but for products in tiles. Overwrites output and log_sums. Padding is not read, and its output and log_sums are zero.
/// Errors if a length is not within `0..=seq`, or the table is too short.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn forward(
    compute: &Compute,
    qkv: &Tensor,
    lengths: Option<&Tensor>,
    table: &RotaryTable,
    spec: &AttentionSpec,
    output: &Tensor,
    log_sums: &Tensor,
) -> Result<()> {
    // Each of the seq * (seq + 1) / 2 pairs (i, j) with j <= i takes part in two products: queries by keys, weights by values.
    let products = [spec.batch, spec.heads, spec.seq, spec.seq + 1, spec.head_dim];
    let softmax = [Op::EXP / 2 + 2, spec.batch, spec.heads, spec.seq, spec.seq + 1];
    let op = Op::new("attention_forward").forward_product(products).elementwise(softmax);
    spec.check(op)?;
    table.check(op.name, spec.head_dim, spec.seq)?;
    let spec = *spec;
    macro_rules! forward {
        ($stored:ty, $scratch_len:expr, $body:ident($($kernel:expr)?)) => {{
            let operands = (
                read::<$stored>("qkv", qkv, spec.qkv_shape()),
                lengths.map(|lengths| read::<i64>("lengths", lengths, [spec.batch])),
                read::<<$stored as Stored>::Real>("table", table.values(), table.values().shape()),
                write::<$stored>("output", output, spec.output_shape()),
                write::<<$stored as Stored>::Real>("log_sums", log_sums, [spec.log_sums_len()]),
                scratch::<f32>($scratch_len),
            );
            let [card_needs, _] = card::needs::<$stored>(&spec);
            compute.launch_with_card(
                op.needs(card_needs),
                operands,
                move |cpu, (qkv, lengths, angles, y, log_sums, space)| {
                    let lengths = &*real_lengths(op, &spec, lengths)?;
                    let inputs = (qkv, lengths, angles);
                    $body($($kernel,)? cpu, &spec, inputs, (y, log_sums), space);
                    Ok(())
                },
                move |card, (qkv, lengths, angles, y, log_sums, _)| {
                    // SAFETY: the operands are those of this attention.
                    unsafe { card::forward(card, &spec, (qkv, lengths, angles), y, log_sums) }
                },
            )
        }};
    }
    let of_threads = scratch_of(compute, &spec, forward_scratch(&spec), 0);
    let ways = ways(compute, qkv, &spec);
    match qkv.dtype() {
        DType::F32 => forward!(f32, of_threads, forward_pairs((ways, forward::in_registers))),
        DType::BF16 => forward!(bf16, of_threads, forward_pairs((ways, forward::in_tiles))),
        DType::F16 => forward!(f16, of_threads, forward_pairs((ways, forward::in_registers))),
        DType::F64 => forward!(f64, 0, plain_forward()),
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}

/// Queries, keys and values; lengths; and the values of the rotary table.
type Inputs<'a, S> = (&'a [S], &'a [i64], &'a [<S as Stored>::Real]);

fn plain_forward(
    _: &Processor,
    spec: &AttentionSpec,
    (qkv, lengths, angles): Inputs<'_, f64>,
    (output, log_sums): (&mut [f64], &mut [f64]),
    _: &mut [f32],
) {
    plain::forward(spec, qkv, lengths, angles, output, log_sums);
}

/// The instructions for products. Tiles need whole blocks of elements of a head.
fn ways(compute: &Compute, qkv: &Tensor, spec: &AttentionSpec) -> Ways {
    let ways = compute.processor().ways(qkv.dtype());
    let is_whole = tile::width(spec).is_multiple_of(tiles::BLOCK);
    Ways { tiles: ways.tiles.filter(|_| is_whole), ..ways }
}

type ForwardPair<S> =
    fn(Ways, &PairOperands<'_, S>, usize, &mut [f32], &mut [f32], &mut OwnPlaces<'_, S>);
type BackwardPair<S> =
    fn(Ways, &PairOperands<'_, S>, &Results<'_, S>, usize, &mut [f32], &mut OwnPlaces<'_, S>);

fn forward_pairs<S: Stored<Real = f32>>(
    (ways, pair): (Ways, ForwardPair<S>),
    cpu: &Processor,
    spec: &AttentionSpec,
    (qkv, lengths, angles): Inputs<'_, S>,
    (output, log_sums): (&mut [S], &mut [f32]),
    space: &mut [f32],
) {
    let qkv = TokenMatrix::new(qkv, spec.qkv_shape());
    let operands = PairOperands { simd: ways.simd, spec, qkv, lengths, angles };
    let output = SharedMatrix::new(output, spec.output_shape());
    let group_len = spec.group() * spec.seq;
    let parts = batches(cpu, log_sums, group_len, spec.pairs()).into_iter();
    let parts = parts.zip(space.chunks_exact_mut(forward_scratch(spec))).collect();
    cpu.threads.for_each(parts, |((first, log_sums), space)| {
        for (n, log_sums) in log_sums.chunks_exact_mut(group_len.max(1)).enumerate() {
            // SAFETY: each pair occurs once, so no other thread has its columns.
            let mut output = unsafe { output.own_places() };
            pair(ways, &operands, first + n, space, log_sums, &mut output);
        }
    });
}

/// The gradient of queries, keys and values from `d_output`, and from what [`forward()`] read and wrote. With
/// `p[i, j] = exp(s[i, j] - log_sum[i])` and `d[i] = d_output[i] . output[i]`, for each head:
/// `dv[j] = sum over i >= j of p[i, j] d_output[i]`, `ds[i, j] = p[i, j] (d_output[i] . v[j] - d[i]) / sqrt(head_dim)`,
/// `dq[i] = R_i^T sum over j <= i of ds[i, j] R_j k[j]` and `dk[j] = R_j^T sum over i >= j of ds[i, j] R_i q[i]`. Heads that
/// share keys and values add to their gradients in the order of the heads.
///
/// Shapes: as for [`forward()`]; d_output as output, d_qkv as qkv. f32 and f64; gradients are bf16 or f16 if qkv is. Overwrites
/// d_qkv. Padding is not read, and its gradient is zero. Errors as [`forward()`].
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn backward(
    compute: &Compute,
    qkv: &Tensor,
    lengths: Option<&Tensor>,
    table: &RotaryTable,
    spec: &AttentionSpec,
    output: &Tensor,
    log_sums: &Tensor,
    d_output: &Tensor,
    d_qkv: &Tensor,
) -> Result<()> {
    // Two products for each of the forward pass.
    let products = [2, spec.batch, spec.heads, spec.seq, spec.seq + 1, spec.head_dim];
    let softmax = [2, spec.batch, spec.heads, spec.seq, spec.seq + 1];
    let op = Op::new("attention_backward").backward_product(products).elementwise(softmax);
    spec.check(op)?;
    table.check(op.name, spec.head_dim, spec.seq)?;
    let spec = *spec;
    macro_rules! backward {
        ($stored:ty, $scratch_len:expr, $body:ident($($kernel:expr)?)) => {{
            let operands = (
                read::<$stored>("qkv", qkv, spec.qkv_shape()),
                lengths.map(|lengths| read::<i64>("lengths", lengths, [spec.batch])),
                read::<<$stored as Stored>::Real>("table", table.values(), table.values().shape()),
                read::<$stored>("output", output, spec.output_shape()),
                read::<<$stored as Stored>::Real>("log_sums", log_sums, [spec.log_sums_len()]),
                read::<$stored>("d_output", d_output, spec.output_shape()),
                write::<$stored>("d_qkv", d_qkv, spec.qkv_shape()),
                scratch::<f32>($scratch_len),
            );
            let [_, card_needs] = card::needs::<$stored>(&spec);
            compute.launch_with_card(
                op.needs(card_needs),
                operands,
                move |cpu, (qkv, lengths, angles, output, log_sums, d_output, d_qkv, space)| {
                    let lengths = &*real_lengths(op, &spec, lengths)?;
                    let results = (output, log_sums, d_output);
                    let inputs = (qkv, lengths, angles);
                    $body($($kernel,)? cpu, &spec, inputs, results, d_qkv, space);
                    Ok(())
                },
                move |card, (qkv, lengths, angles, output, log_sums, d_output, d_qkv, space)| {
                    let (read, results) = ((qkv, lengths, angles), (output, log_sums, d_output));
                    // SAFETY: the operands are those of this attention.
                    unsafe { card::backward(card, &spec, read, results, d_qkv, space) }
                },
            )
        }};
    }
    let of_card = card::scratch_len(qkv.dtype(), &spec);
    let of_threads = scratch_of(compute, &spec, backward_scratch(&spec), of_card);
    let ways = ways(compute, qkv, &spec);
    match qkv.dtype() {
        DType::F32 => backward!(f32, of_threads, backward_pairs((ways, backward::in_registers))),
        DType::BF16 => backward!(bf16, of_threads, backward_pairs((ways, backward::in_tiles))),
        DType::F16 => backward!(f16, of_threads, backward_pairs((ways, backward::in_registers))),
        DType::F64 => backward!(f64, 0, plain_backward()),
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}

fn plain_backward(
    _: &Processor,
    spec: &AttentionSpec,
    (qkv, lengths, angles): Inputs<'_, f64>,
    results: (&[f64], &[f64], &[f64]),
    d_qkv: &mut [f64],
    _: &mut [f32],
) {
    plain::backward(spec, qkv, lengths, angles, results, d_qkv);
}

/// Results are output, log_sums and d_output.
fn backward_pairs<S: Stored<Real = f32>>(
    (ways, pair): (Ways, BackwardPair<S>),
    cpu: &Processor,
    spec: &AttentionSpec,
    (qkv, lengths, angles): Inputs<'_, S>,
    (output, log_sums, d_output): (&[S], &[f32], &[S]),
    d_qkv: &mut [S],
    space: &mut [f32],
) {
    let qkv = TokenMatrix::new(qkv, spec.qkv_shape());
    let operands = PairOperands { simd: ways.simd, spec, qkv, lengths, angles };
    let results = Results {
        output: TokenMatrix::new(output, spec.output_shape()),
        log_sums,
        d_output: TokenMatrix::new(d_output, spec.output_shape()),
    };
    let d_qkv = SharedMatrix::new(d_qkv, spec.qkv_shape());
    let parts = cpu.threads.split(spec.pairs()).into_iter();
    let parts = parts.zip(space.chunks_exact_mut(backward_scratch(spec))).collect();
    cpu.threads.for_each(parts, |(pairs, space)| {
        for n in pairs {
            // SAFETY: each pair occurs once, so no other thread has its columns.
            let mut d_qkv = unsafe { d_qkv.own_places() };
            pair(ways, &operands, &results, n, space, &mut d_qkv);
        }
    });
}
