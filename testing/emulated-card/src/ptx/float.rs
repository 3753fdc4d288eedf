//! Floats as the card computes them: rounding in every direction, halves, and bfloat16.
//!
//! Sums and products of f32 are computed in f64, where a product is exact and a sum has a known error, so each
//! directed rounding is exact too. Approximate functions of the card (`ex2.approx`) are computed in f64 and rounded:
//! they are closer than a card's.

use half::{bf16, f16};

/// The direction of a rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundingMode {
    /// To the nearest value, ties to even: `.rn`.
    Nearest,
    /// Toward zero: `.rz`.
    Zero,
    /// Toward minus infinity: `.rm`.
    Down,
    /// Toward plus infinity: `.rp`.
    Up,
}

/// An f32 from the bits of a register.
#[inline(always)]
pub fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// An f64 from the bits of a register.
#[inline(always)]
pub fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// The bits of a result. Every NaN that arithmetic makes is the same one on a card.
#[inline(always)]
pub fn from_f32(value: f32) -> u64 {
    if value.is_nan() { 0x7fff_ffff } else { u64::from(value.to_bits()) }
}

/// The bits of a result.
#[inline(always)]
pub fn from_f64(value: f64) -> u64 {
    value.to_bits()
}

/// Replaces a subnormal number by zero, as `.ftz` does with operands and results.
#[inline(always)]
pub fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// Clamps to [0, 1] as `.sat` does: a NaN becomes zero.
#[inline(always)]
pub fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// The smaller value; a NaN loses, and -0 is smaller than +0.
#[inline(always)]
pub fn min_f32(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
}

/// The larger value; a NaN loses, and +0 is larger than -0.
#[inline(always)]
pub fn max_f32(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

/// As [`min_f32`].
#[inline(always)]
pub fn min_f64(a: f64, b: f64) -> f64 {
    if a == b { f64::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
}

/// As [`max_f32`].
#[inline(always)]
pub fn max_f64(a: f64, b: f64) -> f64 {
    if a == b { f64::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

/// The sum of two f64 and the part of the exact sum that it lacks (Knuth's two-sum).
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    (sum, if error.is_finite() { error } else { 0.0 })
}

/// Rounds `value + error` to f32, where `error` is below the last place of `value`.
pub fn round_to_f32(value: f64, error: f64, rounding: RoundingMode) -> f32 {
    let nearest = round_to_odd(value, error) as f32;
    let kept = f64::from(nearest);
    let above = kept > value || kept == value && error < 0.0;
    let below = kept < value || kept == value && error > 0.0;
    let (down, up) = match rounding {
        RoundingMode::Nearest => (false, false),
        RoundingMode::Down => (true, false),
        RoundingMode::Up => (false, true),
        RoundingMode::Zero => (value > 0.0, value < 0.0),
    };
    if down && above {
        nearest.next_down()
    } else if up && below {
        nearest.next_up()
    } else {
        nearest
    }
}

/// `value + error` as an f64 whose last bit is set if it is not exact. Rounding that to fewer bits is then the same as
/// rounding the exact sum.
fn round_to_odd(value: f64, error: f64) -> f64 {
    if error == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    if error > 0.0 { value.next_up() } else { value.next_down() }
}

/// An f64 as an f32 whose last bit is set if it is not exact.
fn odd_f32(value: f64) -> f32 {
    let nearest = value as f32;
    let kept = f64::from(nearest);
    if kept == value || !nearest.is_finite() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    if kept < value { nearest.next_up() } else { nearest.next_down() }
}

/// `a * b + c` with one rounding, in any direction.
pub fn fma_rounded(a: f32, b: f32, c: f32, rounding: RoundingMode) -> f32 {
    if rounding == RoundingMode::Nearest {
        return a.mul_add(b, c);
    }
    let product = f64::from(a) * f64::from(b);
    let (sum, error) = two_sum(product, f64::from(c));
    if sum == 0.0 && product != 0.0 && rounding == RoundingMode::Down {
        return -0.0;
    }
    round_to_f32(sum, error, rounding)
}

/// `a + b` with one rounding, in any direction.
pub fn add_rounded(a: f32, b: f32, rounding: RoundingMode) -> f32 {
    fma_rounded(a, 1.0, b, rounding)
}

/// `a * b` with one rounding, in any direction.
pub fn mul_rounded(a: f32, b: f32, rounding: RoundingMode) -> f32 {
    round_to_f32(f64::from(a) * f64::from(b), 0.0, rounding)
}

/// The two 16-bit float formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfType {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl HalfType {
    /// The value of the low 16 bits.
    #[inline(always)]
    pub fn value(self, bits: u64) -> f32 {
        match self {
            Self::F16 => f16::from_bits(bits as u16).to_f32(),
            Self::Bf16 => f32::from_bits((bits as u32) << 16),
        }
    }

    /// The bits of the value, rounded.
    #[inline(always)]
    pub fn bits(self, value: f32) -> u64 {
        if value.is_nan() {
            return 0x7fff;
        }
        u64::from(match self {
            Self::F16 => f16::from_f32(value).to_bits(),
            Self::Bf16 => bf16::from_f32(value).to_bits(),
        })
    }

    /// The bits of an f64, rounded once.
    pub fn bits_of_f64(self, value: f64) -> u64 {
        self.bits(odd_f32(value))
    }

    /// The bits of the value, rounded toward zero.
    pub fn bits_toward_zero(self, value: f32) -> u64 {
        let bits = self.bits(value);
        // One step of the magnitude back if rounding made it larger. An overflow becomes the largest number.
        if self.value(bits).abs() > value.abs() && value.is_finite() { bits - 1 } else { bits }
    }

    /// `a * b + c` with one rounding.
    pub fn fma(self, a: u64, b: u64, c: u64) -> u64 {
        let product = f64::from(self.value(a)) * f64::from(self.value(b));
        let (sum, error) = two_sum(product, f64::from(self.value(c)));
        self.bits_of_f64(round_to_odd(sum, error))
    }
}

/// An f32 rounded to the 10 bits of mantissa of TF32, ties away from zero, as tensor cores take it.
pub fn to_tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    f32::from_bits((value.to_bits() + 0x1000) & !0x1fff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_roundings_enclose_the_exact_result() {
        let mut random = crate::random::Random::new(5);
        for _ in 0..20_000 {
            let mut value = || {
                let x = random.next();
                f32::from_bits((x as u32 & 0x807f_ffff) | ((100 + (x >> 40) as u32 % 50) << 23))
            };
            let (a, b, c) = (value(), value(), value());
            let nearest = a.mul_add(b, c);
            let [down, up, zero] = [RoundingMode::Down, RoundingMode::Up, RoundingMode::Zero]
                .map(|r| fma_rounded(a, b, c, r));
            assert!(down <= nearest && nearest <= up, "{a} {b} {c}");
            assert!(down == up || down.next_up() == up, "{down} {up}");
            assert_eq!(zero, if nearest > 0.0 { down } else { up });
            assert_eq!(mul_rounded(a, b, RoundingMode::Nearest), a * b);
        }
        assert_eq!(add_rounded(1.0, 1e-30, RoundingMode::Up), 1.0f32.next_up());
        assert_eq!(add_rounded(1.0, -1e-30, RoundingMode::Zero), 1.0f32.next_down());
    }

    #[test]
    fn halves_are_rounded_once() {
        // Just above a tie: the low bits of the f64 decide.
        let tie = 1.0 + 0.5f64.powi(11);
        assert_eq!(HalfType::F16.bits_of_f64(tie), 0x3c00);
        assert_eq!(HalfType::F16.bits_of_f64(tie + 0.5f64.powi(50)), 0x3c01);
        assert_eq!(HalfType::Bf16.bits_toward_zero(f32::from_bits(0x3f80_ffff)), 0x3f80);
        assert_eq!(HalfType::F16.bits_toward_zero(1e9), 0x7bff);
        assert_eq!(HalfType::Bf16.bits(f32::NAN), 0x7fff);
        assert_eq!(to_tf32(1.0 + 0.5f32.powi(11)), 1.0 + 0.5f32.powi(10));
    }
}
