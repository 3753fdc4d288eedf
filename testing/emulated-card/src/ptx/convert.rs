//! `cvt`: from every scalar type to every other one, with all roundings.

use super::float::{HalfType, RoundingMode, flush, from_f32, from_f64, round_to_f32, saturate};
use super::scalar::{PtxType, ScalarKind};

/// A conversion, as its name says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOp {
    pub to: PtxType,
    pub from: PtxType,
    /// How a float is rounded: to the type, or to a whole number if `to_integer` is set.
    pub rounding: RoundingMode,
    /// Whether the value is rounded to a whole number (`.rni`, `.rzi`, `.rmi`, `.rpi`).
    pub to_integer: bool,
    /// Subnormal operands and results become zero.
    pub flush: bool,
    /// The result is clamped: floats to [0, 1], integers to their range.
    pub saturate: bool,
    /// Negative results and NaN become zero (`.relu`).
    pub relu: bool,
}

impl ConvertOp {
    /// The converted bits.
    pub fn apply(&self, bits: u64) -> u64 {
        match (self.from.is_float(), self.to.is_float()) {
            (true, true) => self.float_to_float(self.float_operand(bits)),
            (true, false) => self.float_to_integer(self.float_operand(bits)),
            (false, true) => self.integer_to_float(self.from.extend(bits)),
            (false, false) => self.integer_to_integer(self.from.extend(bits)),
        }
    }

    /// Two f32 as a pair of 16 bits; the first operand is the high half.
    pub fn pack(&self, high: u64, low: u64) -> u64 {
        self.apply(high) << 16 | self.apply(low)
    }

    fn float_operand(&self, bits: u64) -> f64 {
        match (self.from.kind, self.from.bytes) {
            (ScalarKind::Float, 8) => f64::from_bits(bits),
            (ScalarKind::Float, 4) => {
                let value = f32::from_bits(bits as u32);
                f64::from(if self.flush { flush(value) } else { value })
            }
            (ScalarKind::Float, _) => f64::from(HalfType::F16.value(bits)),
            _ => f64::from(HalfType::Bf16.value(bits)),
        }
    }

    fn whole(&self, value: f64) -> f64 {
        match self.rounding {
            RoundingMode::Nearest => value.round_ties_even(),
            RoundingMode::Zero => value.trunc(),
            RoundingMode::Down => value.floor(),
            RoundingMode::Up => value.ceil(),
        }
    }

    fn float_to_float(&self, value: f64) -> u64 {
        let mut value = if self.to_integer { self.whole(value) } else { value };
        if self.relu && (value.is_nan() || value < 0.0) {
            value = 0.0;
        }
        let half = match self.to.kind {
            ScalarKind::Brain => Some(HalfType::Bf16),
            _ => (self.to.bytes == 2).then_some(HalfType::F16),
        };
        if self.saturate {
            value = if value > 0.0 { value.min(1.0) } else { 0.0 };
        }
        match half {
            // A half from an f32 or a half: the operand is an f32 exactly.
            Some(half) if self.rounding == RoundingMode::Zero && !self.to_integer => {
                half.bits_toward_zero(value as f32)
            }
            Some(half) => half.bits_of_f64(value),
            None if self.to.bytes == 8 => from_f64(value),
            None => {
                let result = if self.to_integer || value.is_nan() {
                    value as f32
                } else {
                    round_to_f32(value, 0.0, self.rounding)
                };
                let result = if self.flush { flush(result) } else { result };
                from_f32(if self.saturate { saturate(result) } else { result })
            }
        }
    }

    /// Rust's casts clamp as a card does. A NaN becomes zero, or the highest bit for 64-bit results.
    fn float_to_integer(&self, value: f64) -> u64 {
        if value.is_nan() && self.to.bytes == 8 {
            return 1 << 63;
        }
        let value = self.whole(value);
        let bits = 8 * self.to.bytes as u32;
        if self.to.is_signed() {
            let limit = i64::MAX >> (64 - bits);
            return self.to.truncate((value as i64).clamp(-limit - 1, limit) as u64);
        }
        (value as u64).min(u64::MAX >> (64 - bits))
    }

    fn integer_to_float(&self, value: u64) -> u64 {
        let exact =
            if self.from.is_signed() { i128::from(value as i64) } else { i128::from(value) };
        match (self.to.kind, self.to.bytes) {
            (ScalarKind::Float, 8) => from_f64(match self.rounding {
                RoundingMode::Nearest => exact as f64,
                _ => directed_f64(exact, self.rounding),
            }),
            (ScalarKind::Float, 4) => {
                let near = exact as f64;
                let error = (exact - near as i128) as f64;
                from_f32(round_to_f32(near, error, self.rounding))
            }
            (ScalarKind::Brain, _) => HalfType::Bf16.bits_of_f64(exact as f64),
            _ => HalfType::F16.bits_of_f64(exact as f64),
        }
    }

    fn integer_to_integer(&self, value: u64) -> u64 {
        if !self.saturate {
            // Results stay sign-extended, for a register that is wider than the type.
            return self.to.extend(value);
        }
        let value =
            if self.from.is_signed() { i128::from(value as i64) } else { i128::from(value) };
        let bits = 8 * self.to.bytes as u32;
        let (low, high) = if self.to.is_signed() {
            (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
        } else {
            (0, (1i128 << bits) - 1)
        };
        value.clamp(low, high) as u64
    }
}

fn directed_f64(exact: i128, rounding: RoundingMode) -> f64 {
    let near = exact as f64;
    let (above, below) = (near as i128 > exact, (near as i128) < exact);
    let (down, up) = match rounding {
        RoundingMode::Nearest => (false, false),
        RoundingMode::Down => (true, false),
        RoundingMode::Up => (false, true),
        RoundingMode::Zero => (exact > 0, exact < 0),
    };
    if down && above {
        near.next_down()
    } else if up && below {
        near.next_up()
    } else {
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(to: &str, from: &str, rounding: RoundingMode, to_integer: bool, bits: u64) -> u64 {
        let scalar = |name| PtxType::parse(name).unwrap();
        let (to, from) = (scalar(to), scalar(from));
        let (flush, saturate, relu) = (false, false, false);
        ConvertOp { to, from, rounding, to_integer, flush, saturate, relu }.apply(bits)
    }

    #[test]
    fn conversions_round_once() {
        use RoundingMode::*;
        let f = |x: f32| u64::from(x.to_bits());
        assert_eq!(convert("s32", "f32", Zero, true, f(-2.7)), 0xffff_fffe);
        assert_eq!(convert("s32", "f32", Nearest, true, f(2.5)), 2);
        assert_eq!(convert("u32", "f32", Zero, true, f(-1.0)), 0);
        assert_eq!(convert("s8", "f32", Zero, true, f(300.0)), 127);
        assert_eq!(convert("f32", "u32", Nearest, false, 0xffff_ffff), f(4_294_967_296.0));
        assert_eq!(convert("f32", "u32", Zero, false, 0xffff_ffff), f(4_294_967_040.0));
        assert_eq!(convert("f32", "s64", Nearest, false, u64::MAX), f(-1.0));
        // 2^24 + 1 + 2^-30: a tie in f32 but for the last bit of the f64.
        let above_tie = 16_777_217.0f64.next_up().to_bits();
        assert_eq!(convert("f32", "f64", Nearest, false, above_tie), f(16_777_218.0));
        assert_eq!(convert("f32", "f64", Zero, false, 0.1f64.to_bits()), f(0.1f32.next_down()));
        assert_eq!(
            convert("f32", "u64", Nearest, false, (1 << 40) + (1 << 16) + 1),
            f(1_099_511_758_848.0)
        );
        assert_eq!(convert("bf16", "f32", Nearest, false, f(1.0)), 0x3f80);
        assert_eq!(convert("f16", "f64", Nearest, false, 65_519.0f64.to_bits()), 0x7bff);
        assert_eq!(convert("f32", "f32", Down, true, f(-0.5)), f(-1.0));
        assert_eq!(convert("s64", "s32", Nearest, false, 0xffff_ffff), u64::MAX);
        assert_eq!(convert("u64", "u8", Nearest, false, 0x1ff), 0xff);
        assert_eq!(convert("f64", "s64", Down, false, (1 << 53) + 1), (2.0f64.powi(53)).to_bits());
    }
}
