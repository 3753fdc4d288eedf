//! Sixteen bytes that are compared together.
//!
//! Input: bytes. Output: which of them equal a byte, as a bit for each. On x86-64 these are the instructions of SSE2, which
//! every such processor has; elsewhere the compiler decides how to vectorize.

#[cfg(target_arch = "x86_64")]
use safe_arch::{bitor_m128i, cmp_eq_mask_i8_m128i, m128i, move_mask_i8_m128i, set_splat_i8_m128i};

/// Bytes, or a mask: all ones or all zeros for each byte.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Sixteen(m128i);

#[cfg(target_arch = "x86_64")]
impl Sixteen {
    #[inline(always)]
    pub(super) fn new(bytes: [u8; 16]) -> Self {
        Self(m128i::from(bytes))
    }

    #[inline(always)]
    pub(super) fn splat(byte: u8) -> Self {
        Self(set_splat_i8_m128i(byte as i8))
    }

    /// Ones for the bytes that equal `byte`.
    #[inline(always)]
    pub(super) fn is(self, byte: u8) -> Self {
        Self(cmp_eq_mask_i8_m128i(self.0, Self::splat(byte).0))
    }

    #[inline(always)]
    pub(super) fn or(self, other: Self) -> Self {
        Self(bitor_m128i(self.0, other.0))
    }

    /// The highest bit of each byte; that of the first byte is the lowest.
    #[inline(always)]
    pub(super) fn bits(self) -> u64 {
        u64::from(move_mask_i8_m128i(self.0) as u32)
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy)]
pub(super) struct Sixteen([u8; 16]);

#[cfg(not(target_arch = "x86_64"))]
impl Sixteen {
    pub(super) fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub(super) fn splat(byte: u8) -> Self {
        Self([byte; 16])
    }

    pub(super) fn is(self, byte: u8) -> Self {
        Self(self.0.map(|own| if own == byte { 0xff } else { 0 }))
    }

    pub(super) fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] | other.0[at]))
    }

    pub(super) fn bits(self) -> u64 {
        self.0.iter().rev().fold(0, |bits, byte| bits << 1 | u64::from(byte >> 7))
    }
}
