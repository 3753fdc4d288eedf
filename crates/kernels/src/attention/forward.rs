//! The forward pass of one row of the batch and one head of keys, tile by tile, whatever qkv is stored in.
//!
//! In: qkv, and scratch memory of [`forward_scratch`](super::forward_scratch). Out: the columns of the output that belong to
//! the head of keys, and their log_sums. This file does not know how threads share the pairs.
//!
//! For a tile of queries, keys are visited from the first tile to the diagonal. The largest score so far, the sum of the
//! exponentials relative to it and the output that is not divided yet are kept for each query, and corrected when the
//! largest score grows (the online softmax). Scores are stored transposed, a row for each key, so that all these are
//! computed lane by lane.

use super::product::{HeadTokens, Products, ScoreSquare, ways_of};
use super::tile::{OwnPlaces, PairOperands, SIDE, put, take, width};
use crate::SimdLevel;
use crate::exp::exp;
use crate::simd::vectorized;
use crate::stored::Stored;

ways_of! {
    /// Writes log_sums of the pair (heads of the group, seq) and its places of the output.
    fn in_registers, in_tiles<S>(
        operands: &PairOperands<'_, S>,
        pair: usize,
        scratch: &mut [f32],
        log_sums: &mut [f32],
        output: &mut OwnPlaces<'_, S>,
    ) = pair_with
}

/// # Safety
///
/// The processor is that of the products.
#[inline(always)]
unsafe fn pair_with<P: Products, S: Stored<Real = f32>>(
    mut products: P,
    operands: &PairOperands<'_, S>,
    pair: usize,
    mut scratch: &mut [f32],
    log_sums: &mut [f32],
    output: &mut OwnPlaces<'_, S>,
) {
    let (simd, spec) = (operands.simd, operands.spec);
    let (row, kv_head) = (pair / spec.kv_heads, pair % spec.kv_heads);
    let (len, head_dim, width) = (operands.lengths[row] as usize, spec.head_dim, width(spec));
    let all = spec.seq.next_multiple_of(SIDE) * width;
    let used = len.next_multiple_of(SIDE) * width;
    let k = &mut take(&mut scratch, all)[..used]; // of all tokens, rotated
    let v = &mut take(&mut scratch, all)[..used]; // of all tokens
    let q = take(&mut scratch, SIDE * width); // (SIDE, width), rotated and scaled
    let q_turned = take(&mut scratch, SIDE * width);
    let sums = take(&mut scratch, SIDE * width); // the output before the division
    let square = take(&mut scratch, SIDE * SIDE); // (keys, queries)

    let k_column = (spec.heads + kv_head) * head_dim;
    let v_column = k_column + spec.kv_heads * head_dim;
    // SAFETY: the caller guarantees the processor.
    unsafe {
        products.pack_keys(operands, HeadTokens { row, len, column: k_column }, false, q, k);
        products.pack_values(operands, HeadTokens { row, len, column: v_column }, false, q, v);
    }
    let scale = spec.scale() as f32;
    for (n, log_sums) in log_sums.chunks_exact_mut(spec.seq).enumerate() {
        let column = (kv_head * spec.group() + n) * head_dim;
        for first in (0..len).step_by(SIDE) {
            let (queries, begin) = (SIDE.min(len - first), row * spec.seq + first);
            operands.pack_rotated(row, first..first + queries, column, scale, q);
            operands.prefetch_next(operands.qkv, row, kv_head * spec.group() + n, first);
            if n == 0 {
                operands.prefetch_next_keys(row, kv_head, first);
            }
            output.prefetch(begin..begin + queries, column, head_dim);
            // SAFETY: the caller guarantees the processor.
            unsafe { products.turn(width, false, q, q_turned) };
            let diagonal = ScoreSquare::on_diagonal(operands, first, queries);
            // SAFETY: as above.
            let softmax =
                unsafe { attend(&mut products, simd, diagonal, [k, v, q_turned], square, sums) };
            // SAFETY: as above. The queries are not needed any more.
            let sums = unsafe { products.rows(width, sums, q) };
            let divisors = &softmax.sums[..queries];
            vectorized!(simd, put, &mut *output, spec, begin, column, sums, divisors);
            let log_sums = log_sums[first..].iter_mut();
            for ((to, most), divisor) in log_sums.zip(softmax.largest).zip(divisors) {
                *to = most + divisor.ln();
            }
        }
        output.clear(spec, row, len..spec.seq, column);
        log_sums[len..].fill(0.0);
    }
}

/// Adds the values of all keys up to the diagonal to the sums, weighted for the queries of its square.
///
/// # Safety
///
/// The processor is that of the products.
#[inline(always)]
unsafe fn attend<P: Products>(
    products: &mut P,
    simd: SimdLevel,
    diagonal: ScoreSquare,
    [k, v, q_turned]: [&[f32]; 3],
    square: &mut [f32],
    sums: &mut [f32],
) -> Softmax {
    let mut softmax = Softmax::new();
    for at in diagonal.up_to_diagonal() {
        // SAFETY: required of the caller.
        unsafe { products.scores(&at, k, q_turned, square) };
        vectorized!(simd, add_scores, &mut softmax, &mut *square, &at);
        // SAFETY: as above.
        unsafe { products.add_values(&at, square, v, &softmax.factors, sums) };
    }
    softmax
}

/// The state of the online softmax of a tile of queries.
struct Softmax {
    /// The largest score of each query so far.
    largest: [f32; SIDE],
    /// The sum of `exp(score - largest)` of each query.
    sums: [f32; SIDE],
    /// `exp(largest before - largest)` of the last step.
    factors: [f32; SIDE],
}

impl Softmax {
    #[inline(always)]
    fn new() -> Self {
        let (largest, zeros) = ([f32::NEG_INFINITY; SIDE], [0.0; SIDE]);
        Self { largest, sums: zeros, factors: zeros }
    }
}

/// Replaces scores (keys, queries) by `exp(score - largest)`, and by zero above the diagonal. What lies further
/// above the diagonal than a register is long is left alone.
#[inline(always)]
fn add_scores(softmax: &mut Softmax, square: &mut [f32], at: &ScoreSquare) {
    let ScoreSquare { keys, is_diagonal, .. } = *at;
    let columns = at.columns.min(SIDE);
    let (rows, _) = square.as_chunks_mut::<SIDE>();
    // Four rows at a time, which shortens the chain of additions. Rows after the last key are above the diagonal.
    let (fours, _) = rows[..keys.next_multiple_of(4)].as_chunks_mut::<4>();
    if is_diagonal {
        for (n, four) in fours.iter_mut().enumerate() {
            for (j, row) in (4 * n..).zip(four) {
                row[start_of(n)..j].fill(f32::NEG_INFINITY);
            }
        }
    }
    let start = |n| if is_diagonal { start_of(n) } else { 0 };
    let before = softmax.largest;
    for (n, [a, b, c, d]) in fours.iter().enumerate() {
        for i in start(n)..columns {
            let most = larger(larger(a[i], b[i]), larger(c[i], d[i]));
            softmax.largest[i] = larger(softmax.largest[i], most);
        }
    }
    for ((factor, before), largest) in softmax.factors.iter_mut().zip(before).zip(softmax.largest) {
        *factor = exp(before - largest);
    }
    let mut sums = [0.0f32; SIDE];
    for (n, [a, b, c, d]) in fours.iter_mut().enumerate() {
        for i in start(n)..columns {
            let largest = softmax.largest[i];
            a[i] = exp(a[i] - largest);
            b[i] = exp(b[i] - largest);
            c[i] = exp(c[i] - largest);
            d[i] = exp(d[i] - largest);
            sums[i] += (a[i] + b[i]) + (c[i] + d[i]);
        }
    }
    for ((sum, factor), new) in softmax.sums.iter_mut().zip(softmax.factors).zip(sums) {
        *sum = *sum * factor + new;
    }
}

/// The first query that the keys `4 n..4 n + 4` of a square on the diagonal compute, with whole registers.
#[inline(always)]
pub(super) fn start_of(n: usize) -> usize {
    4 * n / 16 * 16
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}
