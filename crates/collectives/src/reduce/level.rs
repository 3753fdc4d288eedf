//! Finds out which vector instructions this processor has.

/// The vector instructions that the loops are compiled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// The instructions that every processor of this architecture has.
    Portable,
    /// AVX2 and the conversions of F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with the instructions for bytes, 16-bit and 64-bit integers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Every level of this architecture, ending with the best.
    #[cfg(target_arch = "x86_64")]
    pub(super) const ALL: &[Level] = &[Level::Portable, Level::Avx2, Level::Avx512];
    /// Every level of this architecture, ending with the best.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const ALL: &[Level] = &[Level::Portable];

    pub(super) fn is_available(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// The best level of this processor.
    pub(super) fn best() -> Level {
        let available = Level::ALL.iter().rev().find(|level| level.is_available());
        available.copied().unwrap_or(Level::Portable)
    }
}
