//! What both passes are made of: rows that are copied into tiles, products of tiles, and results that threads write side
//! by side.
//!
//! In: qkv, and scratch memory. Out: packed tiles, and sums in scratch memory. This file does not know what is multiplied.
//!
//! The rows of a tile are `width` elements long: `head_dim` rounded up to 16. What lies behind `head_dim` is zero.
//!
//! Each element of a product is one sum in the order of the inner index, started at zero, which is then stored or added.
//! So its bits do not depend on its place in a tile, nor on which other elements are computed.

use std::marker::PhantomData;
use std::ops::Range;

use super::AttentionSpec;
use crate::rotary::turn;
use crate::simd::{Vector, prefetch};

/// The number of queries, and of keys, of a tile.
pub(super) const SIDE: usize = 64;

/// The most lanes of a register.
const MOST_LANES: usize = 16;

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

/// What all threads read.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub(super) spec: &'a AttentionSpec,
    pub(super) qkv: Rows<'a>,
    pub(super) lengths: &'a [i64],
    pub(super) angles: &'a [f32],
}

impl<'a> Operands<'a> {
    /// Asks for what comes behind a tile of queries: the next tile of this head, or the first one of the next head. With
    /// the first head of a group also for a tile of the keys and values of the next group.
    #[inline(always)]
    pub(super) fn prefetch_next(&self, matrix: Rows<'_>, row: usize, head: usize, first: usize) {
        let (spec, len) = (self.spec, self.lengths[row] as usize);
        let (row, head, first) = match first + SIDE < len {
            true => (row, head, first + SIDE),
            false => (row + (head + 1) / spec.heads, (head + 1) % spec.heads, 0),
        };
        matrix.prefetch(spec, row, first, head * spec.head_dim);
    }

    /// Asks for a tile of the keys and values of the head of keys behind `kv_head`.
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

    /// Copies the elements of tokens from `column` on into the rows of `to`, rotated and times `factor`. The rows behind
    /// the tokens are zero.
    #[inline(always)]
    pub(super) fn pack_rotated(
        &self,
        row: usize,
        tokens: Range<usize>,
        column: usize,
        factor: f32,
        to: &mut [f32],
    ) {
        let (head_dim, width) = (self.spec.head_dim, width(self.spec));
        let (rows, rest) = to.split_at_mut(tokens.len() * width);
        // A loop and no closure, which would be compiled without vector instructions if it were not inlined.
        for (token, to) in tokens.zip(rows.chunks_exact_mut(width)) {
            let from = self.qkv.head(self.spec, row, token, column);
            turn(from, self.angles(token), factor, &mut to[..head_dim]);
            to[head_dim..].fill(0.0);
        }
        rest.fill(0.0);
    }

    /// Copies the elements of tokens from `column` on into the rows of `to`. The rows behind the tokens are zero.
    #[inline(always)]
    pub(super) fn pack(&self, row: usize, tokens: Range<usize>, column: usize, to: &mut [f32]) {
        self.qkv.pack(self.spec, row, tokens, column, to);
    }
}

/// A row-major matrix with a row for each token of the batch.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    elems: &'a [f32],
    columns: usize,
}

impl<'a> Rows<'a> {
    /// Panics if the sizes do not agree.
    pub(super) fn new(elems: &'a [f32], [rows, columns]: [usize; 2]) -> Self {
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
    ) -> &'a [f32] {
        &self.elems[(row * spec.seq + token) * self.columns + column..][..spec.head_dim]
    }

    /// Asks for the elements of a tile of tokens from `column` on, if they exist. Heads of a token lie far from those of the
    /// next token, which processors do not foresee.
    #[inline(always)]
    pub(super) fn prefetch(&self, spec: &AttentionSpec, row: usize, first: usize, column: usize) {
        if row < spec.batch {
            for token in first..spec.seq.min(first + SIDE) {
                prefetch(self.head(spec, row, token, column).as_ptr(), spec.head_dim);
            }
        }
    }

    /// Copies the elements of tokens from `column` on into the rows of `to`. The rows behind the tokens are zero.
    #[inline(always)]
    pub(super) fn pack(
        &self,
        spec: &AttentionSpec,
        row: usize,
        tokens: Range<usize>,
        column: usize,
        to: &mut [f32],
    ) {
        let width = width(spec);
        let (rows, rest) = to.split_at_mut(tokens.len() * width);
        for (token, to) in tokens.zip(rows.chunks_exact_mut(width)) {
            to[..spec.head_dim].copy_from_slice(self.head(spec, row, token, column));
            to[spec.head_dim..].fill(0.0);
        }
        rest.fill(0.0);
    }
}

/// Writes the transpose of `from` (SIDE, width) to `to` (width, SIDE).
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn transpose<V: Vector>(width: usize, from: &[f32], to: &mut [f32]) {
    assert!(from.len() >= SIDE * width && to.len() >= SIDE * width);
    assert!(width.is_multiple_of(V::LANES));
    for i in (0..SIDE).step_by(V::LANES) {
        for j in (0..width).step_by(V::LANES) {
            // SAFETY: both squares lie within the lengths that were checked, because LANES divides SIDE and the
            // width; the slices do not overlap; the caller guarantees the processor.
            unsafe {
                let (from, to) =
                    (from.as_ptr().add(i * width + j), to.as_mut_ptr().add(j * SIDE + i));
                V::transpose(from, width, to, SIDE);
            }
        }
    }
}

/// The left operand of a product: row `r` and inner index `k` are at `r * row + k * step`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) elems: &'a [f32],
    pub(super) row: usize,
    pub(super) step: usize,
}

/// The right operand of a product: inner index `k` and column `n` are at `k * row + n`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) elems: &'a [f32],
    pub(super) row: usize,
}

/// `c[r, n] (+)= sum over k < steps of a[r, k] * b[k, n]` for `R` rows and `columns` columns, a multiple of the lanes.
/// The rows of `c` are `c_row` elements apart. At most `C` registers of a row are computed at a time.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn product<V: Vector, const R: usize, const C: usize>(
    a: Left<'_>,
    b: Right<'_>,
    steps: usize,
    columns: usize,
    c: &mut [f32],
    c_row: usize,
    accumulate: bool,
) {
    // The tiles below read and write through addresses. These checks bound all of them.
    let last = steps.saturating_sub(1);
    assert!(steps == 0 || (R - 1) * a.row + last * a.step < a.elems.len());
    assert!(steps == 0 || last * b.row + columns <= b.elems.len());
    assert!((R - 1) * c_row + columns <= c.len());
    assert!(columns.is_multiple_of(V::LANES));
    let (mut n, end) = (0, columns);
    while n < end {
        let registers = ((end - n) / V::LANES).min(C);
        // SAFETY: `registers` registers from column `n` on are within the columns that were checked; the caller
        // guarantees the processor.
        unsafe {
            let (b_at, c_at) = (b.elems.as_ptr().add(n), c.as_mut_ptr().add(n));
            let place = (a, b_at, b.row, steps, c_at, c_row, accumulate);
            match registers {
                1 => registers_of::<V, R, 1>(place),
                2 if C > 2 => registers_of::<V, R, 2>(place),
                _ => registers_of::<V, R, C>(place),
            }
        }
        n += registers * V::LANES;
    }
}

/// Where a tile of registers reads and writes: a, b, the row of b, the steps, c, the row of c, and whether it adds.
type Place<'a> = (Left<'a>, *const f32, usize, usize, *mut f32, usize, bool);

/// `R` rows of `C` registers.
///
/// # Safety
///
/// All places that are described are valid, those of c for writing, and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn registers_of<V: Vector, const R: usize, const C: usize>(place: Place<'_>) {
    let (a, b, b_row, steps, c, c_row, accumulate) = place;
    // SAFETY: as required of the caller.
    unsafe {
        let mut sums = [[V::zero(); C]; R];
        for k in 0..steps {
            let mut right = [V::zero(); C];
            for (n, right) in right.iter_mut().enumerate() {
                *right = V::load(b.add(k * b_row + n * V::LANES));
            }
            let left = a.elems.as_ptr().add(k * a.step);
            for (r, row) in sums.iter_mut().enumerate() {
                let left = V::splat(*left.add(r * a.row));
                for (sum, right) in row.iter_mut().zip(right) {
                    *sum = left.mul_add(right, *sum);
                }
            }
        }
        for (r, row) in sums.into_iter().enumerate() {
            for (n, mut sum) in row.into_iter().enumerate() {
                let to = c.add(r * c_row + n * V::LANES);
                if accumulate {
                    sum = sum.mul_add(V::splat(1.0), V::load(to));
                }
                sum.store(to);
            }
        }
    }
}

/// The scores of a square, transposed: `to[j, i] = keys[j] . queries[i]`, for the first `keys_len` keys and `columns`
/// queries. `queries` is transposed, (width, SIDE). On the diagonal, places far above it (`i < j`) may be left out.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "two operands and their sizes")]
pub(super) unsafe fn scores<V: Vector, const R: usize, const C: usize>(
    width: usize,
    head_dim: usize,
    keys: &[f32],
    keys_len: usize,
    queries: &[f32],
    columns: usize,
    is_diagonal: bool,
    to: &mut [f32],
) {
    for j in (0..keys_len).step_by(R) {
        let from = if is_diagonal { j / V::LANES * V::LANES } else { 0 };
        let a = Left { elems: &keys[j * width..], row: width, step: 1 };
        let b = Right { elems: &queries[from..], row: SIDE };
        let to = &mut to[j * SIDE + from..];
        // SAFETY: the caller guarantees the processor.
        unsafe { product::<V, R, C>(a, b, head_dim, columns - from, to, SIDE, false) };
    }
}

/// A row-major matrix that threads write into, each in its own places.
pub(super) struct Grid<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: the matrix is borrowed for writing as long as this value lives, and `Grid::place` makes its callers see to
// it that no place is used twice at a time.
unsafe impl Sync for Grid<'_> {}

impl<'a> Grid<'a> {
    /// Panics if the sizes do not agree.
    pub(super) fn new(elems: &'a mut [f32], [rows, columns]: [usize; 2]) -> Self {
        assert_eq!(Some(elems.len()), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Self { start: elems.as_mut_ptr(), rows, columns, borrowed: PhantomData }
    }

    /// Asks for the places of a tile of rows, which will be written soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, rows: Range<usize>, column: usize, len: usize) {
        for row in rows {
            prefetch(self.start.wrapping_add(row * self.columns + column), len);
        }
    }

    /// `len` elements of a row from `column` on. Panics if they are not all in the row.
    ///
    /// # Safety
    ///
    /// No other slice of the same elements exists as long as the result is used.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees that there is no other slice")]
    pub(super) unsafe fn place(&self, row: usize, column: usize, len: usize) -> &mut [f32] {
        assert!(row < self.rows && len <= self.columns && column <= self.columns - len);
        // SAFETY: the elements are within the borrowed matrix, and the caller guarantees that there is no other slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.columns + column), len) }
    }
}

/// Compiles a function that is generic over registers, rows and columns of a product, once for each level, and makes a
/// function that chooses between them: `at_level!(fn name(a: A, ...) = body)`.
macro_rules! at_level {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(super) unsafe fn $name(level: $crate::SimdLevel, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: as required of the caller, and this function has the instructions.
                unsafe { $body::<$crate::simd::Avx512, 8, 2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $body::<$crate::simd::Avx2, 4, 2>($($arg),*) }
            }
            // SAFETY: a level is only ever chosen from `SimdLevel::available`; the rest is required of the caller.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx2 => avx2($($arg),*),
                    _ => $body::<$crate::simd::Portable, 4, 2>($($arg),*),
                }
            }
        }
    };
}
pub(super) use at_level;
