//! The vector instructions of a process: the best of its processor, or those that a user holds it to.
//!
//! A process is held to instructions by the variable `PACELINE_SIMD` or by `--simd`, before it computes anything. This file does not know
//! whether the processor can multiply as `avx512-bf16` and `amx` ask: kernels do.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::SimdLevel;

/// The instructions to which a process is held. `None` until something asks for them first.
static HELD: OnceLock<Option<Instructions>> = OnceLock::new();

/// Vector instructions that a process can be held to: a level, and at the highest one a way to multiply in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instructions {
    /// Plain code.
    Portable,
    /// The best with fused multiply-add; products in bf16 are products in f32. All processors that have it give the same bits.
    Fma,
    /// AVX2; products in bf16 are products in f32.
    Avx2,
    /// AVX-512; products in bf16 are products in f32.
    Avx512,
    /// AVX-512, with AVX512-BF16 for products in bf16.
    Avx512Bf16,
    /// AVX-512, with AMX for products in bf16.
    Amx,
}

impl Instructions {
    /// The environment variable that names those of a process.
    pub const VARIABLE: &str = "PACELINE_SIMD";
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Fma, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Fma => "fma",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        }
    }

    /// The level of all loops but the products in bf16.
    pub fn level(self) -> SimdLevel {
        match self {
            Self::Portable => SimdLevel::Portable,
            Self::Fma if SimdLevel::Avx512.is_available() => SimdLevel::Avx512,
            Self::Fma | Self::Avx2 => SimdLevel::Avx2,
            Self::Avx512 | Self::Avx512Bf16 | Self::Amx => SimdLevel::Avx512,
        }
    }

    /// The instructions to which this process is held; `None` if it computes with the best of its processor. A name in the
    /// variable that is not known is ignored here: commands refuse it when they start.
    pub fn held() -> Option<Self> {
        *HELD.get_or_init(|| std::env::var(Self::VARIABLE).ok()?.parse().ok())
    }

    /// Holds this process to these instructions, whatever the variable names. Errors with what the process computes with
    /// already, if that differs: [`Instructions::held`].
    pub fn hold(self) -> Result<(), Option<Self>> {
        let held = *HELD.get_or_init(|| Some(self));
        if held == Some(self) { Ok(()) } else { Err(held) }
    }
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Instructions {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|of| of.name() == name);
        found.ok_or_else(|| format!("pass one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}
