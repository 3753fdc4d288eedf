//! One small interface for three kinds of vector registers, and loops of plain code compiled for each of them.
//!
//! This file does not know what the loops compute. Which level a kernel uses is up to [`Compute`](crate::Compute).

use half::bf16;

use crate::SimdLevel;

/// A register of f32 lanes.
///
/// # Safety
///
/// The methods may only run on a processor that has the instructions; loads and stores touch
/// `LANES` elements at the given address, which needs no alignment.
pub(crate) unsafe trait Vector: Copy {
    const LANES: usize;
    /// The number of registers that a kernel may fill with running sums.
    const ACCUMULATORS: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// The nearest bf16 of each lane, as [`Vector::store_bf16`] writes it, as f32.
    unsafe fn round_to_bf16(self) -> Self;
    /// Writes the nearest bf16 of each lane, ties to even, as [`paceline_numeric::bf16::round`] does.
    unsafe fn store_bf16(self, to: *mut bf16);
    unsafe fn add(self, addend: Self) -> Self;
    /// `self * factor + addend`, rounded once if the processor can do so.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Transposes a square of `LANES` rows: row `i` is read at `from + i * from_row`, and column `i` is written at
    /// `to + i * to_row`, in this order. The two do not overlap.
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::Vector;

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    // SAFETY: each method is one instruction, which needs no more than the trait's contract.
    unsafe impl Vector for Avx512 {
        const LANES: usize = 16;
        const ACCUMULATORS: usize = 28;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm512_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller guarantees the processor and 16 elements.
            Self(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller guarantees the processor and 16 elements.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: the caller guarantees the processor and 16 elements.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        unsafe fn round_to_bf16(self) -> Self {
            // SAFETY: the caller guarantees the processor.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let quiet = _mm512_set1_epi32(0x40_0000);
                let nearest = _mm512_mask_or_epi32(sum, is_nan, bits, quiet);
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                Self(_mm512_castsi512_ps(_mm512_and_si512(nearest, upper)))
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut bf16) {
            // SAFETY: the caller guarantees the processor and 16 elements.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let upper = _mm512_srli_epi32::<16>(bits);
                let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
                let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let nearest = _mm512_srli_epi32::<16>(sum);
                let quiet = _mm512_set1_epi32(0x40);
                let nearest = _mm512_mask_or_epi32(nearest, is_nan, upper, quiet);
                _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(nearest));
            }
        }
        #[inline(always)]
        unsafe fn add(self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm512_add_ps(self.0, addend.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
            // SAFETY: the caller guarantees the processor and 16 elements at 16 places each.
            unsafe {
                // Loops and no closures: a closure would be compiled without the instructions if it were not inlined.
                let mut rows = [_mm512_setzero_si512(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_loadu_si512(from.add(i * from_row).cast());
                }
                for (i, column) in transpose_16x16(rows).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(i * to_row).cast(), column);
                }
            }
        }
    }

    /// The transpose of 16 x 16 numbers of 32 bits.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn transpose_16x16(r: [__m512i; 16]) -> [__m512i; 16] {
        // SAFETY: the caller guarantees the processor.
        unsafe {
            let zero = _mm512_setzero_si512();
            let (mut s, mut t) = ([zero; 16], [zero; 16]);
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            for i in 0..4 {
                s[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
                s[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
                s[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
                s[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
            }
            // `s[4 i + j]` has columns j, j + 4, j + 8 and j + 12 of rows 4 i to 4 i + 3.
            for j in 0..4 {
                let even = _mm512_shuffle_i32x4::<0x88>(s[j], s[j + 4]);
                let odd = _mm512_shuffle_i32x4::<0xdd>(s[j], s[j + 4]);
                let even_below = _mm512_shuffle_i32x4::<0x88>(s[j + 8], s[j + 12]);
                let odd_below = _mm512_shuffle_i32x4::<0xdd>(s[j + 8], s[j + 12]);
                t[j] = _mm512_shuffle_i32x4::<0x88>(even, even_below);
                t[j + 8] = _mm512_shuffle_i32x4::<0xdd>(even, even_below);
                t[j + 4] = _mm512_shuffle_i32x4::<0x88>(odd, odd_below);
                t[j + 12] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_below);
            }
            t
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    // SAFETY: each method is one instruction, which needs no more than the trait's contract.
    unsafe impl Vector for Avx2 {
        const LANES: usize = 8;
        const ACCUMULATORS: usize = 12;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm256_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller guarantees the processor and 8 elements.
            Self(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller guarantees the processor and 8 elements.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: the caller guarantees the processor and 8 elements.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        unsafe fn round_to_bf16(self) -> Self {
            // SAFETY: the caller guarantees the processor.
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
                let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
                let (sum, quiet) = (_mm256_castsi256_ps(sum), _mm256_castsi256_ps(quiet));
                let upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
                Self(_mm256_and_ps(_mm256_blendv_ps(sum, quiet, is_nan), upper))
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut bf16) {
            // SAFETY: the caller guarantees the processor and 8 elements.
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let upper = _mm256_srli_epi32::<16>(bits);
                let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
                let sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
                let nearest = _mm256_blendv_epi8(_mm256_srli_epi32::<16>(sum), quiet, is_nan);
                let (low, high) =
                    (_mm256_castsi256_si128(nearest), _mm256_extracti128_si256::<1>(nearest));
                _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
            }
        }
        #[inline(always)]
        unsafe fn add(self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm256_add_ps(self.0, addend.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
            // SAFETY: the caller guarantees the processor and 8 elements at 8 places each.
            unsafe {
                // No closures, as above.
                let mut rows = [_mm256_setzero_ps(); 8];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm256_loadu_ps(from.add(i * from_row));
                }
                // In each half of a register: pairs of one column, then fours of one column.
                let mut fours = rows;
                for i in (0..8).step_by(4) {
                    let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                    let ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
                    let cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
                    fours[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
                    fours[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
                    let ab = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
                    let cd = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
                    fours[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
                    fours[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
                }
                // Now the halves.
                for i in 0..4 {
                    let lower = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
                    _mm256_storeu_ps(to.add(i * to_row), lower);
                }
                for i in 0..4 {
                    let upper = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
                    _mm256_storeu_ps(to.add((4 + i) * to_row), upper);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, transpose_16x16};

/// Four lanes of plain code, which a compiler can keep in a register on every processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 4]);

// SAFETY: plain code; loads and stores touch four elements.
unsafe impl Vector for Portable {
    const LANES: usize = 4;
    const ACCUMULATORS: usize = 12;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 4])
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees four elements; an array of them has their alignment.
        Self(unsafe { from.cast::<[f32; 4]>().read() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees four elements.
        unsafe { to.cast::<[f32; 4]>().write(self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller guarantees four elements; an array of them has their alignment.
        Self(unsafe { from.cast::<[bf16; 4]>().read() }.map(paceline_numeric::bf16::widen))
    }
    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        use paceline_numeric::bf16::{round, widen};
        Self(self.0.map(|x| widen(round(x))))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        // SAFETY: the caller guarantees four elements.
        unsafe { to.cast::<[bf16; 4]>().write(self.0.map(paceline_numeric::bf16::round)) };
    }
    #[inline(always)]
    unsafe fn add(self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] + addend.0[i]))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Every 64-bit Arm has a fused form. On other processors it may be a function call, so there the product is rounded, too.
        Self(std::array::from_fn(|i| {
            if cfg!(target_arch = "aarch64") {
                self.0[i].mul_add(factor.0[i], addend.0[i])
            } else {
                self.0[i] * factor.0[i] + addend.0[i]
            }
        }))
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: the caller guarantees four elements at four places each.
        let rows: [Self; 4] =
            std::array::from_fn(|i| unsafe { Self::load(from.add(i * from_row)) });
        for i in 0..4 {
            // SAFETY: as above.
            unsafe { Self(rows.map(|row| row.0[i])).store(to.add(i * to_row)) };
        }
    }
}

/// Asks the processor to bring `len` elements closer. A hint: nothing is read, so the address may be any.
#[inline(always)]
pub(crate) fn prefetch<T>(from: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len).step_by(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and cannot fail, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}

/// Calls a function with the vector instructions of a level: `vectorized!(level, f, a, b)` is `f(a, b)`. The function must be
/// `#[inline(always)]`: it is compiled once for each level, and the compiler uses the instructions on its loops.
macro_rules! vectorized {
    (@ $level:expr, $f:expr, [$value:expr $(, $more:expr)*] [$($done:tt)*] $name:ident $($rest:ident)*) => {
        $crate::simd::vectorized!(@ $level, $f, [$($more),*] [$($done)* $name $value,] $($rest)*)
    };
    (@ $level:expr, $f:expr, [] [$($name:ident $value:expr,)+] $($rest:ident)*) => {
        $crate::simd::VectorArguments::call(
            ($($value,)+),
            $level,
            #[inline(always)]
            |$($name),+| $f($($name),+),
        )
    };
    ($level:expr, $f:expr, $($value:expr),+ $(,)?) => {
        $crate::simd::vectorized!(@ $level, $f, [$($value),+] [] a b c d e f g)
    };
}
pub(crate) use vectorized;

/// Arguments of a function that is called by [`vectorized!`]. They are passed one by one, because the compiler has to know that no
/// `&mut` argument overlaps with another one; a closure would hide that.
pub(crate) trait VectorArguments<F> {
    type Output;
    fn call(self, level: SimdLevel, f: F) -> Self::Output;
}

macro_rules! vector_arguments {
    ($($name:ident)+) => {
        impl<$($name,)+ R, F: Fn($($name),+) -> R> VectorArguments<F> for ($($name,)+) {
            type Output = R;
            #[inline(always)]
            #[allow(non_snake_case)]
            fn call(self, level: SimdLevel, f: F) -> R {
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512<$($name,)+ R>(f: impl Fn($($name),+) -> R, $($name: $name),+) -> R {
                    f($($name),+)
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2<$($name,)+ R>(f: impl Fn($($name),+) -> R, $($name: $name),+) -> R {
                    f($($name),+)
                }
                let ($($name,)+) = self;
                match level {
                    // SAFETY: a level is only ever chosen from `SimdLevel::available`.
                    #[cfg(target_arch = "x86_64")]
                    SimdLevel::Avx512 => unsafe { avx512(f, $($name),+) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    SimdLevel::Avx2 => unsafe { avx2(f, $($name),+) },
                    _ => f($($name),+),
                }
            }
        }
    };
}
vector_arguments!(A1 A2);
vector_arguments!(A1 A2 A3);
vector_arguments!(A1 A2 A3 A4);
vector_arguments!(A1 A2 A3 A4 A5);
vector_arguments!(A1 A2 A3 A4 A5 A6);
vector_arguments!(A1 A2 A3 A4 A5 A6 A7);
