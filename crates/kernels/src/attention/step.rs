//! Attention of one new token per row to the tokens before it, whose keys and values are kept: generation of text.
//!
//! Input: queries, keys and values of the new token, and the cache of rotated keys and of values. Output: the mean of the
//! values that the token attends to; its own key and value are in the cache then. This file does not know where
//! the token comes from, or what is made of the output.
//!
//! Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019, which describes the cache.

use paceline_memory::{DType, Device, Tensor};

use super::{AttentionSpec, OP};
use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::{self, MetaScratch};
use crate::rotary::{RotaryTable, turn};
use crate::simd::multiversion;
use crate::{Compute, KernelError, Real, Result, lanes};

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
/// `seq`, or if the table is too short. Each f32 thread takes `position + 1 + head_dim` elements of scratch memory.
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
    let _time = compute.time_old("attention_step", [qkv]);
    spec.check()?;
    if position >= spec.seq {
        let reason = format!("the cache has {} places, so it has no place {position}", spec.seq);
        return Err(KernelError::Geometry { op: OP, reason });
    }
    expect_shape(OP, "qkv", qkv.shape(), [spec.batch, spec.qkv_shape()[1]])?;
    expect_shape(OP, "keys", keys.shape(), spec.cache_shape())?;
    expect_shape(OP, "values", values.shape(), spec.cache_shape())?;
    expect_shape(OP, "output", output.shape(), [spec.batch, spec.output_shape()[1]])?;
    table.check(OP, spec.head_dim, position + 1)?;
    let scratch_len = position + 1 + spec.head_dim;
    // Elements of the cache, and of the output, of a head of keys.
    let (cache_len, output_len) = (spec.seq * spec.head_dim, spec.group() * spec.head_dim);
    match compute.device_of(OP, [qkv, table.values(), keys, values, output])? {
        Device::Cpu => match qkv.dtype() {
            DType::F32 => {
                let (qkv, angles) = (qkv.read::<f32>()?, table.values().read::<f32>()?);
                let angles = &angles[position * spec.head_dim..][..spec.head_dim];
                let (mut keys, mut values) = (keys.write()?, values.write()?);
                let mut output = output.write()?;
                let keys = batches(compute, &mut keys, cache_len, spec.pairs());
                let values = batches(compute, &mut values, cache_len, spec.pairs());
                let output = batches(compute, &mut output, output_len, spec.pairs());
                let items = keys.into_iter().zip(values).zip(output).collect();
                compute.threads.for_each(items, |(((first, keys), (_, values)), (_, output))| {
                    let mut scratch = compute.scratch(scratch_len)?;
                    let token = Token { spec, qkv: &qkv, angles, position, first };
                    pairs_f32(compute.simd, token, keys, values, output, &mut scratch);
                    Ok(())
                })
            }
            DType::F64 => {
                let (qkv, angles) = (qkv.read::<f64>()?, table.values().read::<f64>()?);
                let angles = &angles[position * spec.head_dim..][..spec.head_dim];
                let (mut keys, mut values) = (keys.write()?, values.write()?);
                let token = Token { spec, qkv: &qkv, angles, position, first: 0 };
                let mut scratch = vec![0.0; scratch_len];
                pairs_body(token, &mut keys, &mut values, &mut output.write()?, &mut scratch);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let dtype = meta::float(OP, qkv)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [qkv, table.values()])?;
            let mut pretended = pretended.writes(dtype, [keys, values, output])?;
            super::pretend_scratch(&mut pretended, compute, spec, dtype, scratch_len)
        }
    }
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
    fn pairs_f32(
        token: Token<'_, f32>,
        keys: &mut [f32],
        values: &mut [f32],
        output: &mut [f32],
        scratch: &mut [f32],
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
