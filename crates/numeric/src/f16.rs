//! Conversions between f32 and f16 (IEEE half precision) for loops of plain code.
//!
//! They have no branches, so that the compiler can use vector instructions. This file does not know whole tensors.

use half::f16;

/// The same value, exactly. A NaN becomes quiet.
#[inline(always)]
pub fn widen(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    // Exponent and fraction at their places in an f32, whose exponents are 112 larger. The product is exact, and makes
    // normal numbers of denormal ones.
    let magnitude = f32::from_bits((bits & 0x7FFF) << 13) * f32::from_bits((127 + 112) << 23);
    let with_infinity = if magnitude >= 65536.0 { 0x7F80_0000 } else { 0 };
    let quiet = if magnitude > 65536.0 { 0x40_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | with_infinity | quiet | (bits & 0x8000) << 16)
}

/// The nearest f16, ties to even; infinity from 65520 on. A NaN becomes quiet and keeps the bits that fit, as in
/// `f16::from_f32` and in the processors.
#[inline(always)]
pub fn round(x: f32) -> f16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // The least normal f16 is 2^-14. Below, adding 0.5 leaves the bits that a denormal f16 has, rounded.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    // The exponent gets 112 smaller. The addition carries if the 13 lower bits are more than half a unit, or exactly half
    // and the rest is odd. A carry out of the largest finite value gives infinity.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xFFF + odd).wrapping_sub(112 << 23) >> 13;
    let finite = if magnitude < (127 - 14) << 23 { denormal } else { normal };
    let quiet = 0x7E00 | (magnitude >> 13 & 0x3FF);
    let special = if magnitude > 0x7F80_0000 { quiet } else { 0x7C00 };
    let rounded = if magnitude >= (127 + 16) << 23 { special } else { finite };
    f16::from_bits((rounded | (bits >> 16 & 0x8000)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_crate_half() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            assert_eq!(widen(x).to_bits(), x.to_f32_const().to_bits(), "{bits:#x}");
            let again = f16::from_f32_const(x.to_f32_const());
            assert_eq!(round(widen(x)).to_bits(), again.to_bits(), "{bits:#x}");
        }
        // Every sign, exponent and upper fraction with lower fractions around the ties, and a million other values.
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0xFFFF];
        let near_ties = (0..=0xFFFF_u32).flat_map(|upper| lower.map(|lower| upper << 16 | lower));
        let others = (0..1_000_000_u32).map(|at| at.wrapping_mul(0x9E37_79B9));
        for bits in near_ties.chain(others) {
            let x = f32::from_bits(bits);
            assert_eq!(round(x).to_bits(), f16::from_f32_const(x).to_bits(), "{bits:#x}");
        }
    }
}
