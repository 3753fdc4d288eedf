//! Converts decimal numbers of JSON to integers exactly, without floating point.

/// The value of a decimal number times `10^places`, rounded to the nearest integer, with halves rounded away
/// from zero. `None` if the text is not a number by JSON's grammar, or if the result does not fit in 127
/// bits. Only the first 36 significant digits count.
pub fn scaled(number: &[u8], places: i32) -> Option<i128> {
    let (negative, digits) = match number {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let (mut mantissa, mut at, mut exponent) = (0u64, 0, places);
    // The fast path: profilers write only up to 18 digits, which fit in 64 bits.
    let mut point = None;
    while let Some(&byte) = digits.get(at) {
        match byte {
            b'0'..=b'9' if at < 18 => mantissa = 10 * mantissa + u64::from(byte - b'0'),
            b'.' if point.is_none() && at > 0 => point = Some(at),
            _ => break,
        }
        at += 1;
    }
    if at == 0 || point == Some(at - 1) {
        return None;
    }
    let magnitude = if at == digits.len() {
        if let Some(point) = point {
            exponent = exponent.checked_sub(i32::try_from(at - point - 1).ok()?)?;
        }
        shifted(u128::from(mantissa), exponent)?
    } else {
        long(digits, places)?
    };
    let value = i128::try_from(magnitude).ok()?;
    Some(if negative { -value } else { value })
}

/// [`scaled`] for numbers with an exponent or many digits.
fn long(digits: &[u8], places: i32) -> Option<u128> {
    let (mantissa, exponent) = match digits.iter().position(|b| matches!(b, b'e' | b'E')) {
        None => (digits, 0),
        Some(at) => {
            let text = std::str::from_utf8(&digits[at + 1..]).ok()?;
            // The exponent must be well formed and fit in `i32`. A number with a larger exponent is of no
            // use.
            let exponent = text.parse::<i32>().ok()?;
            (&digits[..at], exponent)
        }
    };
    let (whole, fraction) = match mantissa.iter().position(|&b| b == b'.') {
        None => (mantissa, &[][..]),
        Some(at) if at > 0 && at + 1 < mantissa.len() => (&mantissa[..at], &mantissa[at + 1..]),
        Some(_) => return None,
    };
    if whole.is_empty() || !whole.iter().chain(fraction).all(u8::is_ascii_digit) {
        return None;
    }
    let (mut value, mut significant, mut dropped) = (0u128, 0, 0i32);
    for &digit in whole.iter().chain(fraction) {
        if significant < 36 {
            value = 10 * value + u128::from(digit - b'0');
            significant += u32::from(value > 0);
        } else {
            dropped = dropped.checked_add(1)?;
        }
    }
    let exponent = exponent
        .checked_add(places)?
        .checked_add(dropped)?
        .checked_sub(i32::try_from(fraction.len()).ok()?)?;
    shifted(value, exponent)
}

/// `value * 10^exponent`, rounded to the nearest integer.
fn shifted(value: u128, exponent: i32) -> Option<u128> {
    if value == 0 {
        return Some(0);
    }
    match u32::try_from(exponent) {
        Ok(up) => value.checked_mul(10u128.checked_pow(up)?),
        Err(_) => match 10u128.checked_pow(exponent.unsigned_abs()) {
            // The result is less than one half, because no value has that many digits.
            None => Some(0),
            Some(divisor) => {
                let (quotient, rest) = (value / divisor, value % divisor);
                Some(quotient + u128::from(rest >= divisor - rest))
            }
        },
    }
}

/// Converts microseconds to nanoseconds.
pub fn micros_ns(number: &[u8]) -> Option<i64> {
    scaled(number, 3)?.try_into().ok()
}

/// A number rounded to an integer, which may be negative.
pub fn signed(number: &[u8]) -> Option<i64> {
    scaled(number, 0)?.try_into().ok()
}

/// A number rounded to an integer; `None` if it is negative.
pub fn unsigned(number: &[u8]) -> Option<u64> {
    scaled(number, 0)?.try_into().ok()
}

/// A finite number as the nearest floating-point number.
pub fn float(number: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(number).ok()?.parse().ok()?;
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_become_nanoseconds_exactly() {
        for (text, ns) in [
            ("0", 0),
            ("-0", 0),
            ("7", 7_000),
            ("123.456", 123_456),
            ("-0.001", -1),
            ("4399414808115.986", 4_399_414_808_115_986),
            ("1790857026000000.123", 1_790_857_026_000_000_123),
            ("9223372036854775.807", i64::MAX),
            ("-9223372036854775.808", i64::MIN),
            ("0.0004", 0),
            ("0.0005", 1),
            ("-0.0005", -1),
            ("1.9995", 2_000),
            ("1.2345678901234567890123456789012345678901234567890", 1_235),
            ("1e3", 1_000_000),
            ("1.5E+2", 150_000),
            ("25e-4", 3),
            ("1e-2000000000", 0),
            ("0e2000000000", 0),
            ("0000000000000000000000000000000000000000000000001", 1_000),
            ("4399414808115986000000000000000000000000e-27", 4_399_414_808_115_986),
        ] {
            assert_eq!(micros_ns(text.as_bytes()), Some(ns), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_or_does_not_fit_is_none() {
        for text in [
            "",
            "-",
            ".",
            "1.",
            ".5",
            "--1",
            "+1",
            "1e",
            "1e+",
            "1.e3",
            "1..2",
            "1.2.3",
            "0x10",
            "NaN",
            "12a",
            "1e1.5",
            "9223372036854775.808",
            "-9223372036854775.809",
            "1e30",
            "1e99999999999",
            "123456789012345678901234567890.",
        ] {
            assert_eq!(micros_ns(text.as_bytes()), None, "{text}");
        }
        assert_eq!(unsigned(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(unsigned(b"18446744073709551616"), None);
        assert_eq!(unsigned(b"-1"), None);
        assert_eq!(signed(b"-1"), Some(-1));
        assert_eq!(float(b"12.5"), Some(12.5));
        assert_eq!(float(b"inf"), None);
    }
}
