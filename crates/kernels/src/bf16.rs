//! Conversions between f32 and bf16 for loops of plain code.
//!
//! They have no branches, so that the compiler can use vector instructions. Conversions of whole tensors are in
//! [`cast`](crate::cast).

use half::bf16;

/// The same value, exactly.
#[inline(always)]
pub(crate) fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest bf16, ties to even. NaN stays NaN, and becomes a quiet one.
#[inline(always)]
pub(crate) fn round(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_crate_half() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
            let x = bf16::from_bits(high);
            assert!(widen(x) == x.to_f32() || x.is_nan() && widen(x).is_nan(), "{high:x}");
        }
    }
}
