//! The instructions for matrix products in bf16: which a processor has, and which of them are the fastest.
//!
//! This file does not know how a product uses them.

use paceline_numeric::{Instructions, SimdLevel};

/// How matrix products in bf16 are computed where [`SimdLevel::Avx512`](crate::SimdLevel::Avx512) is used. The other levels
/// always widen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bf16Products {
    /// Operands are widened to f32, and multiplied like numbers in f32.
    Widened,
    /// AVX512-BF16: an instruction adds the products of pairs to 16 sums.
    Dots,
    /// AMX: an instruction adds the products of 16 pairs to each of 16 x 16 sums. The operating system has to permit it.
    Amx,
}

impl Bf16Products {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Widened, Self::Dots, Self::Amx];

    /// Whether this processor, with AVX-512, can use them.
    pub(crate) fn is_available(self) -> bool {
        match self {
            Self::Widened => true,
            Self::Dots => has_dots(),
            // Operands are packed with AVX512-BF16.
            Self::Amx => has_dots() && has_amx(),
        }
    }

    /// The way of this process: the one that it is held to, or the fastest.
    pub(crate) fn of_process() -> Self {
        let held = Instructions::held().map(Self::of);
        held.filter(|way| way.is_available()).unwrap_or_else(Self::fastest)
    }

    /// The way that these instructions ask for.
    fn of(instructions: Instructions) -> Self {
        match instructions {
            Instructions::Avx512Bf16 => Self::Dots,
            Instructions::Amx => Self::Amx,
            _ => Self::Widened,
        }
    }

    /// The fastest on this processor. AMX if there is AMX. AVX512-BF16 on AMD's processors (Zen 4 and Zen 5), which do
    /// twice as many operations per second with it as with f32. Intel's Xeons do half as many: 120 GFLOP/s against 235,
    /// see the example `products`.
    fn fastest() -> Self {
        if Self::Amx.is_available() {
            Self::Amx
        } else if is_amd() && Self::Dots.is_available() {
            Self::Dots
        } else {
            Self::Widened
        }
    }
}

/// All that a process on this processor can be held to.
pub fn available() -> Vec<Instructions> {
    let is_available =
        |of: &Instructions| of.level().is_available() && Bf16Products::of(*of).is_available();
    Instructions::ALL.into_iter().filter(is_available).collect()
}

/// The instructions of which a processor needs one to give the bits of this process, with any number of threads.
pub fn needed_for_same_bits(in_bf16: bool) -> &'static str {
    match (SimdLevel::of_process(), Bf16Products::of_process()) {
        (SimdLevel::Portable, _) => "only plain code (--simd portable)",
        (SimdLevel::Avx512, Bf16Products::Dots) if in_bf16 => "AVX512-BF16",
        (SimdLevel::Avx512, Bf16Products::Amx) if in_bf16 => "AMX",
        _ => "AVX2 or AVX-512",
    }
}

#[cfg(target_arch = "x86_64")]
fn has_dots() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    crate::amx::is_permitted()
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes) == [*b"Auth", *b"enti", *b"cAMD"]
}

#[cfg(not(target_arch = "x86_64"))]
fn has_dots() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_amx() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}
