//! Conversions between f32 and bf16 for loops of plain code.
//!
//! They have no branches, so that the compiler can use vector instructions. This file does not know whole
//! tensors.

use half::bf16;

/// The same value, exactly. A signaling NaN stays signaling until it is rounded or computed with, which saves a comparison
/// here and changes no result.
#[inline(always)]
pub fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest bf16, ties to even. A NaN becomes quiet and keeps the bits that fit, as in `bf16::from_f32` and in the
/// processors.
#[inline(always)]
pub fn round(x: f32) -> bf16 {
    let bits = x.to_bits();
    let upper = bits >> 16;
    // The addition carries into the upper 16 bits if the lower 16 are more than half a unit of the upper, or exactly half
    // and the upper bits are odd. A carry out of the largest finite value rightly gives infinity.
    let nearest = bits.wrapping_add(0x7FFF + (upper & 1)) >> 16;
    let quiet = upper | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every sign, exponent and upper fraction with lower fractions around the ties, and a million other values.
    fn f32_bits() -> impl Iterator<Item = u32> {
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let near_ties =
            (0..=0xFFFF_u32).flat_map(move |upper| lower.map(|lower| upper << 16 | lower));
        near_ties.chain((0..1_000_000_u32).map(|at| at.wrapping_mul(0x9E37_79B9)))
    }

    #[test]
    fn agrees_with_the_crate_half() {
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            // Signaling NaNs become quiet one step later than in `half`.
            let quiet = if x.is_nan() { 0x40_0000 } else { 0 };
            assert_eq!(widen(x).to_bits() | quiet, x.to_f32().to_bits(), "{bits:#x}");
            let again = bf16::from_f32(x.to_f32());
            assert_eq!(round(widen(x)).to_bits(), again.to_bits(), "{bits:#x}");
        }
        for bits in f32_bits() {
            let x = f32::from_bits(bits);
            assert_eq!(round(x).to_bits(), bf16::from_f32(x).to_bits(), "{bits:#x}");
        }
    }
}
