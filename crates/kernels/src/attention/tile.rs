//! Tiles: rows of heads that are copied into scratch memory, and results that threads write side by side.
//!
//! In: matrices with a row for each token, and scratch memory. Out: packed tiles. This file does not know what is computed.
//!
//! Tiles are of f32, whatever the matrices are stored in. The rows of a tile have `width` elements: `head_dim` rounded up to 16.
//! Elements after `head_dim`, and rows after the last token, are zero: products in tiles of AMX need the zeros, and old contents
//! would slow registers down.

use std::marker::PhantomData;
use std::ops::Range;

use super::AttentionSpec;
use crate::SimdLevel;
use crate::rotary::{turn, turn_back};
use crate::simd::{Vector, prefetch, vectorized};
use crate::stored::Stored;

/// The number of queries, and of keys, of a tile.
pub(super) const SIDE: usize = 64;

const MOST_LANES: usize = 16;

pub(super) fn lanes(level: SimdLevel) -> usize {
    match level {
        SimdLevel::Avx512 => 16,
        SimdLevel::Avx2 => 8,
        SimdLevel::Portable => 4,
    }
}

/// Elements of a row of a tile.
pub(super) fn width(spec: &AttentionSpec) -> usize {
    spec.head_dim.next_multiple_of(MOST_LANES)
}

/// Elements of scratch memory: matrices of all tokens, matrices of the rows of a tile, and squares of a tile.
pub(super) fn scratch_len(spec: &AttentionSpec, all: usize, tiles: usize, squares: usize) -> usize {
    let tokens = spec.seq.next_multiple_of(SIDE);
    (all * tokens + tiles * SIDE).saturating_mul(width(spec)) + squares * SIDE * SIDE
}

/// Takes the next `len` elements of scratch memory.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    taken
}

/// The tensors and sizes that all threads read.
#[derive(Clone, Copy)]
pub(super) struct PairOperands<'a, S> {
    pub(super) simd: SimdLevel,
    pub(super) spec: &'a AttentionSpec,
    pub(super) qkv: TokenMatrix<'a, S>,
    pub(super) lengths: &'a [i64],
    pub(super) angles: &'a [f32],
}

impl<'a, S: Stored<Real = f32>> PairOperands<'a, S> {
    /// Prefetches the tile that follows a tile of queries: the next one of this head, or the first one of the next head.
    #[inline(always)]
    pub(super) fn prefetch_next(
        &self,
        matrix: TokenMatrix<'_, S>,
        row: usize,
        head: usize,
        first: usize,
    ) {
        let (spec, len) = (self.spec, self.lengths[row] as usize);
        let (row, head, first) = if first + SIDE < len {
            (row, head, first + SIDE)
        } else {
            (row + (head + 1) / spec.heads, (head + 1) % spec.heads, 0)
        };
        matrix.prefetch(spec, row, first, head * spec.head_dim);
    }

    /// Prefetches a tile of the keys and values of the head of keys after `kv_head`.
    #[inline(always)]
    pub(super) fn prefetch_next_keys(&self, row: usize, kv_head: usize, first: usize) {
        let spec = self.spec;
        let (row, kv_head) = (row + (kv_head + 1) / spec.kv_heads, (kv_head + 1) % spec.kv_heads);
        for head in [spec.heads + kv_head, spec.heads + spec.kv_heads + kv_head] {
            self.qkv.prefetch(spec, row, first, head * spec.head_dim);
        }
    }

    /// The cosines and sines of a position.
    #[inline(always)]
    pub(super) fn angles(&self, token: usize) -> &'a [f32] {
        &self.angles[token * self.spec.head_dim..][..self.spec.head_dim]
    }

    /// Copies the elements of tokens from `column` on into the rows of `to`, rotated and times `factor`. The rows after
    /// the tokens are zero.
    pub(super) fn pack_rotated(
        &self,
        row: usize,
        tokens: Range<usize>,
        column: usize,
        factor: f32,
        to: &mut [f32],
    ) {
        vectorized!(self.simd, pack_rotated, self, row, tokens, column, factor, to);
    }

    pub(super) fn pack(&self, row: usize, tokens: Range<usize>, column: usize, to: &mut [f32]) {
        vectorized!(self.simd, pack, self.qkv, self.spec, row, tokens, column, to);
    }
}

#[inline(always)]
fn pack_rotated<S: Stored<Real = f32>>(
    operands: &PairOperands<'_, S>,
    row: usize,
    tokens: Range<usize>,
    column: usize,
    factor: f32,
    to: &mut [f32],
) {
    let (head_dim, width) = (operands.spec.head_dim, width(operands.spec));
    let (rows, rest) = to.split_at_mut(tokens.len() * width);
    // A loop and no closure, which would be compiled without vector instructions if it were not inlined.
    for (token, to) in tokens.zip(rows.chunks_exact_mut(width)) {
        let from = operands.qkv.head(operands.spec, row, token, column);
        turn(from, operands.angles(token), factor, &mut to[..head_dim]);
        to[head_dim..].fill(0.0);
    }
    rest.fill(0.0);
}

/// A row-major matrix with a row for each token of the batch.
#[derive(Clone, Copy)]
pub(super) struct TokenMatrix<'a, S> {
    elems: &'a [S],
    columns: usize,
}

impl<'a, S: Stored<Real = f32>> TokenMatrix<'a, S> {
    /// Panics if the sizes do not agree.
    pub(super) fn new(elems: &'a [S], [rows, columns]: [usize; 2]) -> Self {
        assert_eq!(Some(elems.len()), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Self { elems, columns }
    }

    /// The elements of a token from `column` on, one head of them.
    #[inline(always)]
    pub(super) fn head(
        &self,
        spec: &AttentionSpec,
        row: usize,
        token: usize,
        column: usize,
    ) -> &'a [S] {
        &self.elems[(row * spec.seq + token) * self.columns + column..][..spec.head_dim]
    }

    /// Prefetches the elements of a tile of tokens from `column` on, if they exist. Heads of a token lie far from those of the
    /// next token, which processors do not foresee.
    #[inline(always)]
    pub(super) fn prefetch(&self, spec: &AttentionSpec, row: usize, first: usize, column: usize) {
        if row < spec.batch {
            let at = (row * spec.seq + first) * self.columns + column;
            let start = self.elems.as_ptr().wrapping_add(at);
            for token in 0..SIDE.min(spec.seq - first) {
                prefetch(start.wrapping_add(token * self.columns), spec.head_dim);
            }
        }
    }
}

/// Copies the elements of tokens from `column` on into the rows of `to`. The rows after the tokens are zero.
#[inline(always)]
pub(super) fn pack<S: Stored<Real = f32>>(
    from: TokenMatrix<'_, S>,
    spec: &AttentionSpec,
    row: usize,
    tokens: Range<usize>,
    column: usize,
    to: &mut [f32],
) {
    let width = width(spec);
    let (rows, rest) = to.split_at_mut(tokens.len() * width);
    for (token, to) in tokens.zip(rows.chunks_exact_mut(width)) {
        let (elems, behind) = to.split_at_mut(spec.head_dim);
        for (to, x) in elems.iter_mut().zip(from.head(spec, row, token, column)) {
            *to = x.load();
        }
        behind.fill(0.0);
    }
    rest.fill(0.0);
}

/// Compiles a function of registers once for each level, and makes a function that chooses between them:
/// `at_level!(fn name(a: A, ...) = body)`.
macro_rules! at_level {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::SimdLevel, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) {
                // SAFETY: this function has the instructions.
                unsafe { $body::<$crate::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) {
                // SAFETY: this function has the instructions.
                unsafe { $body::<$crate::simd::Avx2>($($arg),*) }
            }
            // SAFETY: a level is only ever chosen from `SimdLevel::available`, and every processor has what is portable.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx2 => avx2($($arg),*),
                    _ => $body::<$crate::simd::Portable>($($arg),*),
                }
            }
        }
    };
}
pub(super) use at_level;

at_level! {
    /// Writes the transpose of `from` (rows, columns) to `to` (columns, rows). Both sizes are multiples of the lanes.
    pub(super) fn transpose(size: [usize; 2], from: &[f32], to: &mut [f32]) = transpose_of
}

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn transpose_of<V: Vector>(
    [rows, columns]: [usize; 2],
    from: &[f32],
    to: &mut [f32],
) {
    assert!(from.len() >= rows * columns && to.len() >= rows * columns);
    assert!(rows.is_multiple_of(V::LANES) && columns.is_multiple_of(V::LANES));
    for i in (0..rows).step_by(V::LANES) {
        for j in (0..columns).step_by(V::LANES) {
            // SAFETY: both squares lie within the lengths that were checked, because LANES divides both sizes; the slices do
            // not overlap; the caller guarantees the processor.
            unsafe {
                let (from, to) =
                    (from.as_ptr().add(i * columns + j), to.as_mut_ptr().add(j * rows + i));
                V::transpose(from, columns, to, rows);
            }
        }
    }
}

/// A row-major matrix that threads write into, each in its own places.
pub(super) struct SharedMatrix<'a, S> {
    start: *mut S,
    rows: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [S]>,
}

// SAFETY: the matrix is borrowed for writing as long as this value lives, and `SharedMatrix::own_places` makes its callers see to
// it that no place is used twice at a time.
unsafe impl<S: Stored> Sync for SharedMatrix<'_, S> {}

impl<'a, S: Stored> SharedMatrix<'a, S> {
    /// Panics if the sizes do not agree.
    pub(super) fn new(elems: &'a mut [S], [rows, columns]: [usize; 2]) -> Self {
        assert_eq!(Some(elems.len()), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Self { start: elems.as_mut_ptr(), rows, columns, borrowed: PhantomData }
    }

    /// The places of a thread.
    ///
    /// # Safety
    ///
    /// Nobody else uses any place that is asked of the result as long as that lives.
    pub(super) unsafe fn own_places(&self) -> OwnPlaces<'_, S> {
        OwnPlaces(self)
    }
}

/// The places of a [`SharedMatrix`] that a thread writes.
pub(super) struct OwnPlaces<'a, S>(&'a SharedMatrix<'a, S>);

impl<S: Stored> OwnPlaces<'_, S> {
    /// Prefetches the elements of a tile of rows, which will be written soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, rows: Range<usize>, column: usize, len: usize) {
        for row in rows {
            prefetch(self.0.start.wrapping_add(row * self.0.columns + column), len);
        }
    }

    /// `len` elements of a row from `column` on. Panics if they are not all in the row.
    #[inline(always)]
    fn place(&mut self, row: usize, column: usize, len: usize) -> &mut [S] {
        let SharedMatrix { start, rows, columns, .. } = *self.0;
        assert!(row < rows && len <= columns && column <= columns - len);
        // SAFETY: the elements are within the borrowed matrix. This value gives no second slice meanwhile, and whoever made it
        // promised that nobody else has one.
        unsafe { std::slice::from_raw_parts_mut(start.add(row * columns + column), len) }
    }

    /// Writes zeros to a head from `column` on, for tokens of a row of the batch.
    pub(super) fn clear(
        &mut self,
        spec: &AttentionSpec,
        row: usize,
        tokens: Range<usize>,
        column: usize,
    ) {
        for token in tokens {
            let place = self.place(row * spec.seq + token, column, spec.head_dim);
            place.fill(S::default());
        }
    }
}

/// Writes rows of a tile to their places, from a row and a column on, each divided by its divisor.
#[inline(always)]
pub(super) fn put<S: Stored<Real = f32>>(
    to: &mut OwnPlaces<'_, S>,
    spec: &AttentionSpec,
    first: usize,
    column: usize,
    rows: &[f32],
    divisors: &[f32],
) {
    for ((row, from), divisor) in (first..).zip(rows.chunks_exact(width(spec))).zip(divisors) {
        let to = to.place(row, column, spec.head_dim);
        for (to, x) in to.iter_mut().zip(from) {
            *to = S::store(x / divisor);
        }
    }
}

/// Writes the gradients of tokens of a row of the batch, rotated back and times `factor`, to their places from a column on.
#[inline(always)]
pub(super) fn put_turned_back<S: Stored<Real = f32>>(
    to: &mut OwnPlaces<'_, S>,
    operands: &PairOperands<'_, S>,
    row: usize,
    tokens: Range<usize>,
    column: usize,
    factor: f32,
    rows: &[f32],
) {
    let AttentionSpec { seq, head_dim, .. } = *operands.spec;
    for (token, from) in tokens.zip(rows.chunks_exact(width(operands.spec))) {
        let to = to.place(row * seq + token, column, head_dim);
        turn_back(&from[..head_dim], operands.angles(token), factor, to);
    }
}
