//! Attention of one new token per row to the tokens before it, whose keys and values are kept: generation of text.
//!
//! Input: queries, keys and values of the new token, and the cache of rotated keys and of values. Output: the mean of the
//! values that the token attends to; its own key and value are in the cache then. This file does not know where the token
//! comes from.
//!
//! Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019, which describes the cache.

use paceline_memory::Tensor;

use super::AttentionSpec;
use crate::rotary::{RotaryTable, turn};
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch, wide};
use crate::threads::batches;
use crate::{Compute, KernelError, Op, Real, Result, lanes, read, scratch, update, write};

/// The output of [`forward`](super::forward()) for the token at `position` of each row, if the cache has the keys and values
/// of the tokens before it. Writes the rotated key and the value of the token to place `position` of the cache, and does
/// not read the places after it. So calls with positions 0, 1, 2, ... can begin with any contents of the cache.
///
/// Shapes: qkv (batch, (heads + 2 * kv_heads) * head_dim), not rotated; keys and values [`AttentionSpec::cache_shape`];
/// output (batch, heads * head_dim). f32 and f64, like the table; or bf16 and f16 with a table of f32, in which everything is
/// computed. Overwrites output. Errors if the position is not below `seq`, or if the table is too short. Each thread takes
/// `position + 1 + head_dim` elements of scratch memory. A card has no kernel for it.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn step(
    compute: &Compute,
    qkv: &Tensor,
    table: &RotaryTable,
    spec: &AttentionSpec,
    position: usize,
    keys: &Tensor,
    values: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("attention_step");
    spec.check(op)?;
    if position >= spec.seq {
        let reason = format!("the cache has {} places, so it has no place {position}", spec.seq);
        return Err(KernelError::Geometry { op: op.name, reason });
    }
    table.check(op.name, spec.head_dim, position + 1)?;
    let spec = *spec;
    let scratch_len = spec.num_parts(compute.processor()) * (position + 1 + spec.head_dim);
    dispatch!(op.name, qkv.dtype(), S => {
        let operands = (
            read::<S>("qkv", qkv, [spec.batch, spec.qkv_shape()[1]]),
            read::<<S as Stored>::Real>("table", table.values(), table.values().shape()),
            update::<S>("keys", keys, spec.cache_shape()),
            update::<S>("values", values, spec.cache_shape()),
            write::<S>("output", output, [spec.batch, spec.output_shape()[1]]),
            scratch::<<S as Stored>::Real>(scratch_len),
        );
        compute.launch(op, operands, move |cpu, (qkv, angles, keys, values, output, space)| {
            // Elements of the cache, and of the output, of a head of keys.
            let (cache_len, output_len) = (spec.seq * spec.head_dim, spec.group() * spec.head_dim);
            let angles = &angles[position * spec.head_dim..][..spec.head_dim];
            let keys = batches(cpu, keys, cache_len, spec.pairs());
            let values = batches(cpu, values, cache_len, spec.pairs());
            let output = batches(cpu, output, output_len, spec.pairs());
            let caches = keys.into_iter().zip(values).zip(output);
            let parts = caches.zip(space.chunks_exact_mut(position + 1 + spec.head_dim)).collect();
            cpu.threads.for_each(parts, |((((first, keys), (_, values)), (_, output)), space)| {
                let token = Token { spec: &spec, qkv, angles, position, first };
                vectorized!(cpu.simd, pairs::<S>, token, keys, values, output, space);
            });
            Ok(())
        })
    })
}

/// The new tokens of all rows, and the first pair of a row and a head of keys that a thread computes.
struct Token<'a, S: Stored> {
    spec: &'a AttentionSpec,
    qkv: &'a [S],
    /// The row of the table for `position`.
    angles: &'a [S::Real],
    position: usize,
    first: usize,
}

/// The pairs whose caches are `keys` and `values`, one after the other.
#[inline(always)]
fn pairs<S: Stored>(
    token: Token<'_, S>,
    keys: &mut [S],
    values: &mut [S],
    output: &mut [S],
    scratch: &mut [S::Real],
) {
    let Token { spec, qkv, angles, position, first } = token;
    let AttentionSpec { kv_heads, seq, head_dim, .. } = *spec;
    let (group, len) = (spec.group(), position + 1);
    let (query, scores) = scratch.split_at_mut(head_dim);
    let scale = wide::<S>(spec.scale());
    let caches = keys.chunks_exact_mut(seq * head_dim).zip(values.chunks_exact_mut(seq * head_dim));
    let outputs = output.chunks_exact_mut(group * head_dim);
    for (n, ((keys, values), output)) in caches.zip(outputs).enumerate() {
        let (row, kv_head) = ((first + n) / kv_heads, (first + n) % kv_heads);
        let qkv = &qkv[row * spec.qkv_shape()[1]..][..spec.qkv_shape()[1]];
        let head = |at: usize| &qkv[at * head_dim..][..head_dim];
        keep_token(spec, qkv, angles, kv_head, position, (keys, values));
        for (at, output) in output.chunks_exact_mut(head_dim).enumerate() {
            turn(head(kv_head * group + at), angles, scale, query);
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(head_dim)) {
                *score = lanes::dot(query, key);
            }
            let most = lanes::max(scores);
            scores.iter_mut().for_each(|score| *score = (*score - most).fast_exp());
            let sum = lanes::sum(len, |j| scores[j]);
            // Weighted in the memory of the query, which has the type that is computed with.
            let mean = &mut *query;
            mean.fill(S::Real::default());
            for (weight, value) in scores.iter().zip(values.chunks_exact(head_dim)) {
                for (mean, value) in mean.iter_mut().zip(value) {
                    *mean += *weight * value.load();
                }
            }
            output.iter_mut().zip(mean).for_each(|(y, mean)| *y = S::store(*mean / sum));
        }
    }
}

/// Puts the key of a head, rotated, and its value at their place in its caches.
#[inline(always)]
fn keep_token<S: Stored>(
    spec: &AttentionSpec,
    qkv: &[S],
    angles: &[S::Real],
    kv_head: usize,
    position: usize,
    (keys, values): (&mut [S], &mut [S]),
) {
    let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
    let head = |at: usize| &qkv[at * head_dim..][..head_dim];
    let place = position * head_dim..(position + 1) * head_dim;
    turn(head(heads + kv_head), angles, wide::<S>(1.0), &mut keys[place.clone()]);
    values[place].copy_from_slice(head(heads + kv_heads + kv_head));
}

/// Puts the rotated keys and the values of the first `tokens` tokens of each row into the cache, as `tokens` calls of [`step`]
/// do: the same bits. With [`forward`](super::forward()) this reads the beginning of a text in one pass.
///
/// Shapes: qkv (batch * tokens, (heads + 2 * kv_heads) * head_dim), row after row; keys and values as for [`step`].
/// Types and errors as there; a card has no kernel for it.
pub fn keep(
    compute: &Compute,
    qkv: &Tensor,
    table: &RotaryTable,
    spec: &AttentionSpec,
    tokens: usize,
    keys: &Tensor,
    values: &Tensor,
) -> Result<()> {
    let op = Op::new("attention_keep");
    spec.check(op)?;
    if tokens > spec.seq {
        let reason = format!("the cache has {} places, and {tokens} tokens are given", spec.seq);
        return Err(KernelError::Geometry { op: op.name, reason });
    }
    table.check(op.name, spec.head_dim, tokens)?;
    let spec = *spec;
    dispatch!(op.name, qkv.dtype(), S => {
        let operands = (
            read::<S>("qkv", qkv, [spec.batch * tokens, spec.qkv_shape()[1]]),
            read::<<S as Stored>::Real>("table", table.values(), table.values().shape()),
            update::<S>("keys", keys, spec.cache_shape()),
            update::<S>("values", values, spec.cache_shape()),
        );
        compute.launch(op, operands, move |_, (qkv, angles, keys, values)| {
            let (cache_len, columns) = (spec.seq * spec.head_dim, spec.qkv_shape()[1]);
            let caches = keys.chunks_exact_mut(cache_len).zip(values.chunks_exact_mut(cache_len));
            for (pair, (keys, values)) in caches.enumerate() {
                let (row, kv_head) = (pair / spec.kv_heads, pair % spec.kv_heads);
                for position in 0..tokens {
                    let qkv = &qkv[(row * tokens + position) * columns..][..columns];
                    let angles = &angles[position * spec.head_dim..][..spec.head_dim];
                    keep_token(&spec, qkv, angles, kv_head, position, (&mut *keys, &mut *values));
                }
            }
            Ok(())
        })
    })
}
