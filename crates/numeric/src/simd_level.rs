//! The levels of vector instructions, and which of them this processor has.
//!
//! This file does not know the loops that are compiled for a level.

use crate::Instructions;

/// The vector instructions that a loop is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimdLevel {
    /// 512-bit registers, 32 of them: AVX-512 with the instructions for bytes, 16-bit and 64-bit integers.
    Avx512,
    /// 256-bit registers, 16 of them: AVX2 with fused multiply-add, and the conversions of F16C.
    Avx2,
    /// Plain code, compiled for every processor of the architecture.
    Portable,
}

impl SimdLevel {
    /// All levels, best first.
    pub const ALL: [Self; 3] = [SimdLevel::Avx512, SimdLevel::Avx2, SimdLevel::Portable];

    /// The best level of this processor.
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|level| level.is_available()).unwrap_or(SimdLevel::Portable)
    }

    /// The level of this process: the one that it is held to, or the best of this processor.
    pub fn of_process() -> Self {
        let held = Instructions::held().map(Instructions::level);
        held.filter(|level| level.is_available()).unwrap_or_else(Self::detect)
    }

    /// All levels that this processor can run, best first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    /// Whether this processor can run code of this level.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            // Every processor with fused multiply-add has F16C too.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            SimdLevel::Avx512 | SimdLevel::Avx2 => false,
            SimdLevel::Portable => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_level_comes_first_and_plain_code_always_runs() {
        let available = SimdLevel::available();
        assert_eq!(available[0], SimdLevel::detect());
        assert_eq!(available.last(), Some(&SimdLevel::Portable));
    }
}
