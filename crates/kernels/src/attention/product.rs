//! Products of tiles, in registers.
//!
//! In: tiles. Out: sums in scratch memory. This file does not know what is multiplied.
//!
//! Each element of a product is one sum in the order of the inner index, started at zero, which is then stored or added.
//! So its bits do not depend on its place in a tile, nor on which other elements are computed.
//!
//! They are not those of `gemm`, which cannot leave out a triangle, and whose order of summation depends on the sizes.

use super::tile::SIDE;
use crate::simd::Vector;

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
type TileOperands<'a> = (Left<'a>, *const f32, usize, usize, *mut f32, usize, bool);

/// `R` rows of `C` registers.
///
/// # Safety
///
/// All places that are described are valid, those of c for writing, and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn registers_of<V: Vector, const R: usize, const C: usize>(place: TileOperands<'_>) {
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

/// Compiles a function that is generic over registers, rows and columns of a product, once for each level, and makes a
/// function that chooses between them: `at_level!(fn name(a: A, ...) = body)`.
///
/// The rows divide a tile and the lanes. TokenMatrix times columns are as many sums as additions that a processor has under way.
macro_rules! at_level {
    ($(#[$doc:meta])* fn $name:ident<$stored:ident>($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(super) unsafe fn $name<$stored: $crate::stored::Stored<Real = f32>>(
            level: $crate::SimdLevel,
            $($arg: $ty),*
        ) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512<$stored: $crate::stored::Stored<Real = f32>>($($arg: $ty),*) {
                // SAFETY: as required of the caller, and this function has the instructions.
                unsafe { $body::<$crate::simd::Avx512, $stored, 8, 2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2<$stored: $crate::stored::Stored<Real = f32>>($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $body::<$crate::simd::Avx2, $stored, 4, 2>($($arg),*) }
            }
            // SAFETY: a level is only ever chosen from `SimdLevel::available`; the rest is required of the caller.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::SimdLevel::Avx2 => avx2($($arg),*),
                    _ => $body::<$crate::simd::Portable, $stored, 4, 2>($($arg),*),
                }
            }
        }
    };
}
pub(super) use at_level;
