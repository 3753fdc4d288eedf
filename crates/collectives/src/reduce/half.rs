//! Conversions between f32 and f16, with the same bits at every vector level.
//!
//! They round to nearest, ties to even. A NaN becomes quiet and keeps the bits that fit, as in the crate
//! `half` and in the processors. Those of bf16 are plain code, see [`paceline_numeric::bf16`].

use half::f16;
use paceline_numeric::SimdLevel;

/// Converts all values of `from` into `to`, which is as long. The processor has `level`.
pub(super) fn widen_f16(level: SimdLevel, from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "one result for each value");
    let done = match level {
        // SAFETY: the processor has the level that the loops run at, and the lengths agree.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { x86::widen_avx512(from, to) },
        // SAFETY: as for AVX-512.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { x86::widen_avx2(from, to) },
        _ => 0,
    };
    for (x, y) in from[done..].iter().zip(&mut to[done..]) {
        *y = x.to_f32_const();
    }
}

/// Converts all values of `from` into `to`, which is as long. The processor has `level`.
pub(super) fn narrow_f16(level: SimdLevel, from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "one result for each value");
    let done = match level {
        // SAFETY: the processor has the level that the loops run at, and the lengths agree.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { x86::narrow_avx512(from, to) },
        // SAFETY: as for AVX-512.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { x86::narrow_avx2(from, to) },
        _ => 0,
    };
    for (x, y) in from[done..].iter().zip(&mut to[done..]) {
        *y = f16::from_f32_const(*x);
    }
}

/// Each function converts all whole vectors and returns the number of converted values.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    /// Rounds to nearest, ties to even, whatever rounding mode the processor is in.
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    macro_rules! conversion {
        ($name:ident, $features:literal, $lanes:literal, $from:ty, $to:ty, |$x:ident, $y:ident| $convert:expr) => {
            /// # Safety
            ///
            /// The processor has the features, and `to` is at least as long as `from`.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(from: &[$from], to: &mut [$to]) -> usize {
                let done = from.len() / $lanes * $lanes;
                for start in (0..done).step_by($lanes) {
                    // SAFETY: the vector of values from `start` on lies within both slices, and
                    // these loads and stores need no alignment. f16 is stored as its 16 bits.
                    unsafe {
                        let $x = from.as_ptr().add(start);
                        let $y = to.as_mut_ptr().add(start);
                        $convert
                    }
                }
                done
            }
        };
    }

    conversion!(widen_avx2, "avx2,f16c", 8, f16, f32, |x, y| {
        _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(x.cast())))
    });
    conversion!(narrow_avx2, "avx2,f16c", 8, f32, f16, |x, y| {
        _mm_storeu_si128(y.cast(), _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(x)))
    });
    conversion!(widen_avx512, "avx512f", 16, f16, f32, |x, y| {
        _mm512_storeu_ps(y, _mm512_cvtph_ps(_mm256_loadu_si256(x.cast())))
    });
    conversion!(narrow_avx512, "avx512f", 16, f32, f16, |x, y| {
        _mm256_storeu_si256(y.cast(), _mm512_cvtps_ph::<NEAREST>(_mm512_loadu_ps(x)))
    });
}
