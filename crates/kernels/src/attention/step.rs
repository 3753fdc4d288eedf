//! Attention of one new token per row to the tokens before it, whose keys and values are kept: generation of text.
//!
//! Input: queries, keys and values of the new token, and the cache of rotated keys and of values. Output: the mean of the
//! values that the token attends to; its own key and value are in the cache then. This file does not know where
//! the token comes from, or what is made of the output.
//!
//! Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019, which describes the cache.

use paceline_memory::Tensor;

use super::AttentionSpec;
use crate::card::attention as on_card;
use crate::compute::batches;
use crate::real::for_real;
use crate::rotary::{RotaryTable, turn};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Op, Real, Result, lanes, read, scratch, update, write};

impl AttentionSpec {
    /// Shape of the cache of keys, and of that of values: (batch, kv_heads, seq, head_dim). Here `seq` is the largest
    /// number of tokens.
    pub fn cache_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq, self.head_dim]
    }
}

/// The output of [`forward`](super::forward()) for the token at `position` of each row, if the cache has the keys and values
/// of the tokens before it. Writes the rotated key and the value of the token to place `position` of the cache, and does
/// not read the places behind it. So calls with positions 0, 1, 2, ... need no other beginning than memory for the cache.
///
/// Shapes: qkv (batch, (heads + 2 * kv_heads) * head_dim), not rotated; keys and values [`AttentionSpec::cache_shape`];
/// output (batch, heads * head_dim). f32 and f64, like the table. Overwrites output. Errors if the position is not below
/// `seq`, or if the table is too short. Each thread takes `position + 1 + head_dim` elements of scratch memory. A card takes
/// `position + 1` for each head of each row, and is off as for [`forward`](super::forward()); what it puts into the cache has
/// the processor's bits.
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
    let scratch_len = position + 1 + spec.head_dim;
    // Elements of the cache, and of the output, of a head of keys.
    let (cache_len, output_len) = (spec.seq * spec.head_dim, spec.group() * spec.head_dim);
    for_real!(op.name, qkv.dtype(), T => {
        let operands = (
            read::<T>("qkv", qkv, [spec.batch, spec.qkv_shape()[1]]),
            read::<T>("table", table.values(), table.values().shape()),
            update::<T>("keys", keys, spec.cache_shape()),
            update::<T>("values", values, spec.cache_shape()),
            write::<T>("output", output, [spec.batch, spec.output_shape()[1]]),
            scratch::<T>(match compute.is_card() {
                true => spec.batch * spec.heads * (position + 1),
                false => spec.num_parts(compute.processor()) * scratch_len,
            }),
        );
        compute.launch_with_card(op, operands, move |cpu, (qkv, angles, keys, values, output, space)| {
            let angles = &angles[position * spec.head_dim..][..spec.head_dim];
            let keys = batches(cpu, keys, cache_len, spec.pairs());
            let values = batches(cpu, values, cache_len, spec.pairs());
            let output = batches(cpu, output, output_len, spec.pairs());
            let caches = keys.into_iter().zip(values).zip(output);
            let parts = caches.zip(space.chunks_exact_mut(scratch_len)).collect();
            cpu.threads.for_each(parts, |((((first, keys), (_, values)), (_, output)), space)| {
                let token = Token { spec: &spec, qkv, angles, position, first };
                pairs::<T>(cpu.simd, token, keys, values, output, space);
            });
            Ok(())
        }, move |card, (qkv, angles, keys, values, output, scores)| {
            let (read, cache) = ((qkv, angles), (keys, values));
            // SAFETY: the operands are those of this attention, and the scratch memory has the scores.
            unsafe { on_card::step(card, &spec, position, read, cache, output, scores) }
        })
    })
}

/// What the new tokens of all rows bring, and the pair of a row and a head of keys at which a thread begins.
struct Token<'a, T> {
    spec: &'a AttentionSpec,
    qkv: &'a [T],
    /// The row of the table for `position`.
    angles: &'a [T],
    position: usize,
    first: usize,
}

multiversion! {
    fn pairs<T: Real>(
        token: Token<'_, T>,
        keys: &mut [T],
        values: &mut [T],
        output: &mut [T],
        scratch: &mut [T],
    ) = pairs_body
}

/// The pairs whose caches are `keys` and `values`, one after the other.
#[inline(always)]
fn pairs_body<T: Real>(
    token: Token<'_, T>,
    keys: &mut [T],
    values: &mut [T],
    output: &mut [T],
    scratch: &mut [T],
) {
    let Token { spec, qkv, angles, position, first } = token;
    let AttentionSpec { heads, kv_heads, seq, head_dim, .. } = *spec;
    let (group, len) = (spec.group(), position + 1);
    let (query, scores) = scratch.split_at_mut(head_dim);
    let (one, scale) = (T::from_f64(1.0), T::from_f64(spec.scale()));
    let caches = keys.chunks_exact_mut(seq * head_dim).zip(values.chunks_exact_mut(seq * head_dim));
    let outputs = output.chunks_exact_mut(group * head_dim);
    for (n, ((keys, values), output)) in caches.zip(outputs).enumerate() {
        let (row, kv_head) = ((first + n) / kv_heads, (first + n) % kv_heads);
        let qkv = &qkv[row * spec.qkv_shape()[1]..][..spec.qkv_shape()[1]];
        let head = |at: usize| &qkv[at * head_dim..][..head_dim];
        let place = position * head_dim..len * head_dim;
        turn(head(heads + kv_head), angles, one, &mut keys[place.clone()]);
        values[place].copy_from_slice(head(heads + kv_heads + kv_head));
        for (at, output) in output.chunks_exact_mut(head_dim).enumerate() {
            turn(head(kv_head * group + at), angles, scale, query);
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(head_dim)) {
                *score = lanes::sum(head_dim, |j| query[j] * key[j]);
            }
            let most = lanes::max(scores);
            scores.iter_mut().for_each(|score| *score = (*score - most).fast_exp());
            let sum = lanes::sum(len, |j| scores[j]);
            output.fill(T::default());
            for (weight, value) in scores.iter().zip(values.chunks_exact(head_dim)) {
                for (output, value) in output.iter_mut().zip(value) {
                    *output += *weight * *value;
                }
            }
            output.iter_mut().for_each(|output| *output = *output / sum);
        }
    }
}
