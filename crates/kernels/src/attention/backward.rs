//! The backward pass of one row of the batch and one head of keys, tile by tile, whatever qkv is stored in.
//!
//! In: qkv, the results of the forward pass and their gradient, and scratch memory of
//! [`backward_scratch`](super::backward_scratch). Out: the columns of the gradient of qkv that belong to the head of keys.
//! This file does not know how threads share the pairs.
//!
//! Tiles of queries are on the outside, head by head; tiles of keys up to the diagonal are on the inside. The gradients of
//! all keys and values stay in scratch memory until every head of the group has added to them.

use std::ops::Range;

use super::forward::start_of;
use super::product::{HeadTokens, Products, ScoreSquare, ways_of};
use super::tile::{
    OwnPlaces, PairOperands, SIDE, TokenMatrix, pack, put, put_turned_back, take, width,
};
use crate::exp::exp;
use crate::simd::vectorized;
use crate::stored::Stored;

/// Results of the forward pass, and the gradient of its output.
#[derive(Clone, Copy)]
pub(super) struct Results<'a, S> {
    pub(super) output: TokenMatrix<'a, S>,
    pub(super) log_sums: &'a [f32],
    pub(super) d_output: TokenMatrix<'a, S>,
}

ways_of! {
    /// Writes the places of the pair in the gradient of qkv.
    fn in_registers, in_tiles<S>(
        operands: &PairOperands<'_, S>,
        results: &Results<'_, S>,
        pair: usize,
        scratch: &mut [f32],
        d_qkv: &mut OwnPlaces<'_, S>,
    ) = pair_with
}

/// # Safety
///
/// The processor is that of the products.
#[inline(always)]
unsafe fn pair_with<P: Products, S: Stored<Real = f32>>(
    mut products: P,
    operands: &PairOperands<'_, S>,
    results: &Results<'_, S>,
    pair: usize,
    mut scratch: &mut [f32],
    d_qkv: &mut OwnPlaces<'_, S>,
) {
    let (simd, spec) = (operands.simd, operands.spec);
    let (row, kv_head) = (pair / spec.kv_heads, pair % spec.kv_heads);
    let (len, head_dim, width) = (operands.lengths[row] as usize, spec.head_dim, width(spec));
    let all = spec.seq.next_multiple_of(SIDE) * width;
    let used = len.next_multiple_of(SIDE) * width;
    let k = &mut take(&mut scratch, all)[..used]; // of all tokens, rotated
    let v = &mut take(&mut scratch, all)[..used]; // of all tokens
    let dk = &mut take(&mut scratch, all)[..used]; // (tokens, width), of the rotated keys
    let dv = &mut take(&mut scratch, all)[..used]; // (tokens, width)
    let q = take(&mut scratch, SIDE * width); // (SIDE, width), rotated and scaled
    let q_turned = take(&mut scratch, SIDE * width);
    let dy = take(&mut scratch, SIDE * width); // (SIDE, width)
    let dy_turned = take(&mut scratch, SIDE * width);
    let dq = take(&mut scratch, SIDE * width); // of the rotated and scaled queries
    let p = take(&mut scratch, SIDE * SIDE); // (keys, queries)
    let ds = take(&mut scratch, SIDE * SIDE); // (keys, queries)

    let k_column = (spec.heads + kv_head) * head_dim;
    let v_column = k_column + spec.kv_heads * head_dim;
    // SAFETY: the caller guarantees the processor.
    unsafe {
        products.pack_keys(operands, HeadTokens { row, len, column: k_column }, true, q, k);
        products.pack_values(operands, HeadTokens { row, len, column: v_column }, true, q, v);
    }
    dk.fill(0.0);
    dv.fill(0.0);
    let scale = spec.scale() as f32;
    for head in kv_head * spec.group()..(kv_head + 1) * spec.group() {
        let column = head * head_dim;
        for first in (0..len).step_by(SIDE) {
            let queries = SIDE.min(len - first);
            let tokens = first..first + queries;
            operands.pack_rotated(row, tokens.clone(), column, scale, q);
            vectorized!(simd, pack, results.d_output, spec, row, tokens.clone(), column, &mut *dy);
            for matrix in [operands.qkv, results.d_output, results.output] {
                operands.prefetch_next(matrix, row, head, first);
            }
            let places = row * spec.seq + first..row * spec.seq + first + queries;
            d_qkv.prefetch(places.clone(), column, head_dim);
            if head % spec.group() == 0 {
                operands.prefetch_next_keys(row, kv_head, first);
                d_qkv.prefetch(places.clone(), k_column, head_dim);
                d_qkv.prefetch(places, v_column, head_dim);
            }
            // SAFETY: the caller guarantees the processor.
            unsafe {
                products.turn(width, true, q, q_turned);
                products.turn(width, true, dy, dy_turned);
            }
            // Behind the last query, numbers need only be finite: products in registers end with it, and in tiles it is zero there.
            let (mut log_sums, mut dots) = ([0.0f32; SIDE], [0.0f32; SIDE]);
            let from = (row * spec.heads + head) * spec.seq + first;
            log_sums[..queries].copy_from_slice(&results.log_sums[from..from + queries]);
            vectorized!(
                simd,
                dots_of_rows,
                results.output,
                operands,
                row,
                tokens.clone(),
                column,
                &*dy,
                &mut dots
            );
            for at in ScoreSquare::on_diagonal(operands, first, queries).up_to_diagonal() {
                // SAFETY: the caller guarantees the processor.
                unsafe {
                    products.scores(&at, k, q_turned, p);
                    products.scores(&at, v, dy_turned, ds);
                }
                vectorized!(simd, gradient_of_scores, &mut *p, &mut *ds, &at, &log_sums, &dots);
                let tiles = [[&*q, &*q_turned], [&*dy, &*dy_turned]];
                // SAFETY: as above.
                unsafe { products.add_gradients(&at, [p, ds], k, tiles, [dk, dv], dq) };
            }
            // SAFETY: as above. The queries are not needed any more.
            let dq = unsafe { products.rows(width, dq, q) };
            vectorized!(
                simd,
                put_turned_back,
                &mut *d_qkv,
                operands,
                row,
                tokens,
                column,
                scale,
                dq
            );
        }
        d_qkv.clear(spec, row, len..spec.seq, column);
    }
    vectorized!(simd, put_turned_back, &mut *d_qkv, operands, row, 0..len, k_column, 1.0, dk);
    for (first, dv) in (0..len).step_by(SIDE).zip(dv.chunks_exact(SIDE * width)) {
        let divisors = &[1.0; SIDE][..SIDE.min(len - first)];
        vectorized!(simd, put, &mut *d_qkv, spec, row * spec.seq + first, v_column, dv, divisors);
    }
    for column in [k_column, v_column] {
        d_qkv.clear(spec, row, len..spec.seq, column);
    }
}

/// Replaces scores by probabilities, `p = exp(p - log_sum)`, and `ds` by the gradient of the scores,
/// `p (ds - product)`; both are zero above the diagonal, as far as products use them.
#[inline(always)]
fn gradient_of_scores(
    p: &mut [f32],
    ds: &mut [f32],
    at: &ScoreSquare,
    log_sums: &[f32; SIDE],
    products: &[f32; SIDE],
) {
    let ScoreSquare { keys, is_diagonal, .. } = *at;
    let columns = at.columns.min(SIDE);
    let ((p, _), (ds, _)) = (p.as_chunks_mut::<SIDE>(), ds.as_chunks_mut::<SIDE>());
    for (j, (p, ds)) in p.iter_mut().zip(ds).take(keys).enumerate() {
        let mut start = 0;
        if is_diagonal {
            start = start_of(j / 4);
            p[start..j].fill(f32::NEG_INFINITY);
            ds[start..j].fill(0.0);
        }
        for i in start..columns {
            p[i] = exp(p[i] - log_sums[i]);
            ds[i] = p[i] * (ds[i] - products[i]);
        }
    }
}

/// The scalar products of the rows of a tile and what a matrix has for the same tokens from a column on.
#[inline(always)]
fn dots_of_rows<S: Stored<Real = f32>>(
    matrix: TokenMatrix<'_, S>,
    operands: &PairOperands<'_, S>,
    row: usize,
    tokens: Range<usize>,
    column: usize,
    tile: &[f32],
    dots: &mut [f32; SIDE],
) {
    let spec = operands.spec;
    for ((to, elems), token) in dots.iter_mut().zip(tile.chunks_exact(width(spec))).zip(tokens) {
        *to = dot(&elems[..spec.head_dim], matrix.head(spec, row, token, column));
    }
}

/// The scalar product, in 16 sums whose additions overlap.
#[inline(always)]
fn dot<S: Stored<Real = f32>>(a: &[f32], b: &[S]) -> f32 {
    let mut sums = [0.0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b.load();
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b.load();
    }
    let mut len = 16;
    while len > 1 {
        len /= 2;
        for i in 0..len {
            sums[i] += sums[i + len];
        }
    }
    sums[0]
}
