//! The transforms of Winograd's minimal filtering F(2x2, 3x3): small matrices that multiply squares of vectors from both sides.
//!
//! In: squares of vectors of channels in f32, by addresses. Out: the same, transformed. This file does not know what is
//! convolved. A transform adds and halves, so all levels give the same bits.
//!
//! Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), with the signs of the last row of `B` and
//! of `A` changed, so that no transform negates.

use crate::SimdLevel;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Vector};

/// A matrix with `M` rows and `N` columns.
pub(super) trait Matrix<const N: usize, const M: usize> {
    /// The product with a vector.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    unsafe fn multiply<V: Vector>(x: [V; N]) -> [V; M];
}

/// Of a square of the input: `B^T`.
pub(super) struct OfInput;
/// Of products: the sums of a square of the output, `A^T`.
pub(super) struct OfOutput;
/// Of a square of the output's gradient: `A`.
pub(super) struct OfOutputGradient;
/// Of the weights of a kernel: `G`.
pub(super) struct OfWeight;
/// Of products: the gradients of the weights of a kernel, `G^T`.
pub(super) struct OfWeightGradient;

/// `a - b`, rounded once.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn minus<V: Vector>(a: V, b: V) -> V {
    // SAFETY: as required of the caller. The product is exact.
    unsafe { b.mul_add(V::splat(-1.0), a) }
}

/// `x / 2`.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn half<V: Vector>(x: V) -> V {
    // SAFETY: as required of the caller.
    unsafe { x.mul_add(V::splat(0.5), V::zero()) }
}

macro_rules! matrix {
    ($name:ident: $n:literal -> $m:literal, $x:pat => $body:expr) => {
        impl Matrix<$n, $m> for $name {
            #[inline(always)]
            unsafe fn multiply<V: Vector>($x: [V; $n]) -> [V; $m] {
                // SAFETY: as required of the caller.
                unsafe { $body }
            }
        }
    };
}
matrix!(OfInput: 4 -> 4, [a, b, c, d] => [minus(a, c), b.add(c), minus(c, b), minus(d, b)]);
matrix!(OfOutput: 4 -> 2, [a, b, c, d] => [a.add(b).add(c), minus(b, c).add(d)]);
matrix!(OfOutputGradient: 2 -> 4, [a, b] => [a, a.add(b), minus(a, b), b]);
matrix!(OfWeight: 3 -> 4, [a, b, c] => {
    let ends = a.add(c);
    [a, half(ends.add(b)), half(minus(ends, b)), c]
});
matrix!(OfWeightGradient: 4 -> 3, [a, b, c, d] => {
    let sum = half(b.add(c));
    [a.add(sum), half(minus(b, c)), sum.add(d)]
});

/// Squares of vectors, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Squares {
    pub(super) from: *const f32,
    /// Elements from one row of a square to the next, from one column to the next, and from one square to the next.
    pub(super) from_strides: [usize; 3],
    pub(super) to: *mut f32,
    pub(super) to_strides: [usize; 3],
    /// The number of squares.
    pub(super) count: usize,
    /// Channels of a vector. Whole registers are read and written.
    pub(super) len: usize,
}

/// `T X T^T` for each square `X`.
///
/// # Safety
///
/// All addresses that `squares` describes are valid, those of `to` for writing, and the processor has `V`.
#[inline(always)]
unsafe fn body<V: Vector, T: Matrix<N, M>, const N: usize, const M: usize>(squares: &Squares) {
    let Squares { from_strides, to_strides, count, len, .. } = *squares;
    // SAFETY: as required of the caller.
    unsafe {
        for square in 0..count {
            for channel in (0..len).step_by(V::LANES) {
                let from = squares.from.add(square * from_strides[2] + channel);
                let to = squares.to.add(square * to_strides[2] + channel);
                let mut lines = [[V::zero(); N]; M];
                for j in 0..N {
                    let mut column = [V::zero(); N];
                    for (i, x) in column.iter_mut().enumerate() {
                        *x = V::load(from.add(i * from_strides[0] + j * from_strides[1]));
                    }
                    for (line, x) in lines.iter_mut().zip(T::multiply(column)) {
                        line[j] = x;
                    }
                }
                for (i, line) in lines.into_iter().enumerate() {
                    for (j, x) in T::multiply(line).into_iter().enumerate() {
                        x.store(to.add(i * to_strides[0] + j * to_strides[1]));
                    }
                }
            }
        }
    }
}

/// Transforms all squares.
///
/// # Safety
///
/// All addresses that `squares` describes are valid, those of `to` for writing, and the processor has the level.
pub(super) unsafe fn run<T: Matrix<N, M>, const N: usize, const M: usize>(
    level: SimdLevel,
    squares: &Squares,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512<T: Matrix<N, M>, const N: usize, const M: usize>(squares: &Squares) {
        // SAFETY: as required of the caller.
        unsafe { body::<Avx512, T, N, M>(squares) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<T: Matrix<N, M>, const N: usize, const M: usize>(squares: &Squares) {
        // SAFETY: as required of the caller.
        unsafe { body::<Avx2, T, N, M>(squares) }
    }
    // SAFETY: as required of the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => avx512::<T, N, M>(squares),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::<T, N, M>(squares),
            _ => body::<Portable, T, N, M>(squares),
        }
    }
}
