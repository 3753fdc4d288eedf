//! One small interface for three kinds of vector registers, and the choice between them.

/// Which vector instructions a kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimdLevel {
    /// 512-bit registers, 32 of them.
    Avx512,
    /// 256-bit registers with fused multiply-add, 16 of them.
    Avx2,
    /// Plain code, compiled for every processor of the architecture.
    Portable,
}

impl SimdLevel {
    /// The best level of this processor.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All levels that this processor can run, best first.
    pub fn available() -> Vec<Self> {
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if has_avx512 {
                levels.push(SimdLevel::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(SimdLevel::Avx2);
            }
        }
        levels.push(SimdLevel::Portable);
        levels
    }
}

/// Whether this processor has AVX512-BF16, which adds products of pairs of bf16 to f32. Few kernels use it, so it is no
/// level of its own.
pub(crate) fn has_bf16_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512bf16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether AVX512-BF16 is faster on this processor than AVX-512 on widened numbers. AMD's processors (Zen 4 and Zen 5) do
/// twice as many operations per second with it as with f32. On Intel's Xeons with AMX, it does half as many: 120 GFLOP/s
/// against 235, see the example `products`.
pub(crate) fn prefers_bf16_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        let is_amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes)
            == [*b"Auth", *b"enti", *b"cAMD"];
        is_amd && has_bf16_dots()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

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
    /// `self * factor + addend`, rounded once if the processor can do so.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

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
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
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
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: the caller guarantees the processor.
            Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

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
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Rounds twice: a fused form would be a function call on processors without one.
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] + addend.0[i]))
    }
}

/// Compiles a function of plain code once per level, so that the compiler may use that level's
/// instructions on its loops: `multiversion!(fn name(level, a: A, b: B) = body)` makes `name` from
/// an `#[inline(always)]` function `body(a, b)`. Plain code gives the same bits at every level,
/// because the compiler neither reorders floating-point operations nor fuses them.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:path) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::SimdLevel, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            match level {
                // SAFETY: a level is only ever chosen from `SimdLevel::available`.
                #[cfg(target_arch = "x86_64")]
                $crate::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;
