//! The two limits of a processor: how many floating-point operations it can make in a second if it touches no memory, and how many
//! bytes of memory it can read and write.
//!
//! In: the vector instructions and the threads. Out: speeds, measured now by short loops of fused multiply-adds in registers, and by
//! copies. This module knows nothing of kernels.

use std::hint::black_box;
use std::time::Instant;

use paceline_memory::DType;

use crate::{Bf16Products, Compute, SimdLevel};

/// Steps of a loop: about a tenth of a millisecond.
const STEPS: usize = 20_000;

/// Repetitions for the peak of a rank, which takes some milliseconds.
const REPETITIONS: usize = 20;

/// Multiply-adds of a vector in a step. Each has a sum of its own, so that none waits for the one before. There are as many
/// as the processor has registers for beside the factor.
#[cfg(target_arch = "x86_64")]
const SUMS_AVX512: usize = 24;
#[cfg(target_arch = "x86_64")]
const SUMS_AVX2: usize = 12;
const SUMS_PORTABLE: usize = 48;

/// Floating-point operations per second of all threads of `compute`, measured at the same time: the best of several repetitions
/// of each, added up. For bf16 it is the speed of the instructions that `compute` uses for products.
pub fn of_threads(compute: &Compute, dtype: DType) -> f64 {
    let once = || match dtype {
        DType::BF16 if compute.bf16_products() != Bf16Products::Widened => {
            bf16_flops_per_s(compute.bf16_products())
        }
        _ => flops_per_s(compute.simd()),
    };
    let best = || (0..REPETITIONS).map(|_| once()).fold(0.0, f64::max);
    let mut speeds = vec![0.0; compute.threads().count()];
    compute.threads().for_each(speeds.iter_mut().collect(), |speed| *speed = best());
    speeds.iter().sum()
}

/// The bytes of each of the two arrays that the threads of a rank copy, which no cache of a core holds.
pub const COPIED_BYTES: usize = 64 << 20;

/// Copies for the speed of memory. The fastest one counts.
const COPIES: usize = 5;

/// Bytes per second that all threads of `compute` together read and write: the best of several copies of [`COPIED_BYTES`]. Bytes
/// that a processor reads only because it is about to overwrite them do not count.
pub fn memory_bytes_per_s(compute: &Compute) -> f64 {
    let (source, mut target) = (vec![1_u8; COPIED_BYTES], vec![2_u8; COPIED_BYTES]);
    let part = COPIED_BYTES.div_ceil(compute.threads().count());
    let once = |target: &mut [u8]| {
        let parts = source.chunks(part).zip(target.chunks_mut(part)).collect();
        let before = Instant::now();
        compute
            .threads()
            .for_each(parts, |(from, to): (&[u8], &mut [u8])| to.copy_from_slice(from));
        let seconds = before.elapsed().as_secs_f64();
        black_box(target);
        2.0 * COPIED_BYTES as f64 / seconds
    };
    (0..COPIES).map(|_| once(&mut target)).fold(0.0, f64::max)
}

/// Floating-point operations per second of this thread in f32, with these instructions: one repetition. A multiplication
/// and an addition count as one each. Take the best of several, because other work on the machine only slows them down.
///
/// Returns zero if the processor does not have the instructions.
pub fn flops_per_s(simd: SimdLevel) -> f64 {
    if !SimdLevel::available().contains(&simd) {
        return 0.0;
    }
    match simd {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => {
            // SAFETY: the processor has AVX-512, as checked above.
            speed(SUMS_AVX512 * 16, 2, || unsafe { fused_avx512(STEPS) })
        }
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => {
            // SAFETY: the processor has AVX2 and fused multiply-add, as checked above.
            speed(SUMS_AVX2 * 8, 2, || unsafe { fused_avx2(STEPS) })
        }
        _ => speed(SUMS_PORTABLE, 2, || portable(STEPS)),
    }
}

/// The same for products of bf16 with sums in f32.
pub fn bf16_flops_per_s(products: Bf16Products) -> f64 {
    if !(SimdLevel::Avx512.is_available() && products.is_available()) {
        return 0.0;
    }
    match products {
        #[cfg(target_arch = "x86_64")]
        Bf16Products::Amx => {
            // SAFETY: the processor has AMX, which the system permits, as checked above.
            speed(1, crate::amx::FLOP_PER_PRODUCT, || unsafe { crate::amx::multiply_tiles(STEPS) })
        }
        #[cfg(target_arch = "x86_64")]
        Bf16Products::Dots => {
            // SAFETY: the processor has AVX512-BF16, as checked above.
            speed(SUMS_AVX512 * 16, 4, || unsafe { dots(STEPS) })
        }
        _ => flops_per_s(SimdLevel::Avx512),
    }
}

/// The operations of `run`, which makes [`STEPS`] steps on `lanes` numbers, divided by its time.
fn speed(lanes: usize, flop_per_lane: usize, run: impl Fn()) -> f64 {
    let before = Instant::now();
    run();
    (STEPS * lanes * flop_per_lane) as f64 / before.elapsed().as_secs_f64()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fused_avx512(steps: usize) {
    use std::arch::x86_64::*;
    let x = black_box(_mm512_set1_ps(0.5));
    // The compiler must not see that all sums are equal.
    let mut sums = black_box([_mm512_setzero_ps(); SUMS_AVX512]);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(x, x, *sum);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_avx2(steps: usize) {
    use std::arch::x86_64::*;
    let x = black_box(_mm256_set1_ps(0.5));
    let mut sums = black_box([_mm256_setzero_ps(); SUMS_AVX2]);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(x, x, *sum);
        }
    }
    black_box(sums);
}

/// 24 dot products of pairs per step.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots(steps: usize) {
    use std::arch::x86_64::*;
    // SAFETY: both types are any 512 bits.
    let x: __m512bh = unsafe { std::mem::transmute(black_box(_mm512_set1_epi32(0x3f00_3f00))) };
    let mut sums = black_box([_mm512_setzero_ps(); SUMS_AVX512]);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    black_box(sums);
}

/// A multiplication and an addition, which plain code does not fuse.
fn portable(steps: usize) {
    let x = black_box(0.5f32);
    let mut sums = black_box([0.0f32; SUMS_PORTABLE]);
    for _ in 0..steps {
        for sum in &mut sums {
            // Depends on the sum, so that the multiplication is not moved out of the loop.
            *sum = *sum * x + x;
        }
    }
    black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_a_speed_whatever_the_number_of_threads() {
        for threads in [1, 3] {
            let compute = Compute::new(threads, paceline_memory::Allocator::new()).unwrap();
            let speed = memory_bytes_per_s(&compute);
            assert!(speed.is_finite() && speed > 1e6, "{speed}");
        }
    }

    #[test]
    fn every_level_of_this_processor_has_a_peak() {
        for simd in SimdLevel::available() {
            let speed = flops_per_s(simd);
            assert!(speed.is_finite() && speed > 0.0, "{simd:?}: {speed}");
        }
        for products in Bf16Products::ALL {
            assert!(bf16_flops_per_s(products) >= 0.0, "{products:?}");
        }
    }
}
