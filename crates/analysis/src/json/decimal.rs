//! Converts decimal numbers of JSON to integers exactly, without floating point.

/// The value of a decimal number times `10^places`, rounded to the nearest integer, with halves rounded away
/// from zero. `None` if the text is not a number by JSON's grammar, or if the result does not fit in 127
/// bits. Only the first 36 significant digits count.
pub fn scaled(number: &[u8], places: i32) -> Option<i128> {
    let (negative, digits) = match number {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    // The fast path: profilers write only up to 18 digits, which fit in 64 bits.
    let (mut mantissa, num_whole) = leading(0, digits);
    let mut num_fraction = 0;
    if let Some(b'.') = digits.get(num_whole) {
        (mantissa, num_fraction) = leading(mantissa, &digits[num_whole + 1..]);
        if num_fraction == 0 {
            return None;
        }
    }
    if num_whole == 0 {
        return None;
    }
    let len = num_whole + num_fraction + usize::from(num_fraction > 0);
    let magnitude = if len == digits.len() && len <= 18 {
        match places - num_fraction as i32 {
            0 => u128::from(mantissa),
            exponent => shifted(u128::from(mantissa), exponent)?,
        }
    } else {
        long(digits, places)?
    };
    let value = i128::try_from(magnitude).ok()?;
    Some(if negative { -value } else { value })
}

/// Appends the digits at the start of `text` to a number, and returns how many they are. With more than 18
/// digits the number cannot be used.
fn leading(mut number: u64, mut text: &[u8]) -> (u64, usize) {
    let len = text.len();
    while let Some((eight, rest)) = text.split_first_chunk::<8>()
        && num_digits(eight) == 8
    {
        number = number.wrapping_mul(100_000_000).wrapping_add(eight_digits(*eight));
        text = rest;
    }
    while let [byte @ b'0'..=b'9', rest @ ..] = text {
        number = number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
        text = rest;
    }
    (number, len - text.len())
}

/// How many digits are at the start of a text.
#[inline]
pub(super) fn num_digits(text: &[u8]) -> usize {
    let (eights, rest) = text.as_chunks::<8>();
    for (eight, at) in eights.iter().zip((0..).step_by(8)) {
        // Digits become 0 to 9, and all others more. The addition takes these over 127. It may carry into the
        // bytes after the first one that is not a digit, and they do not count.
        let values = u64::from_le_bytes(*eight) ^ (EACH * 0x30);
        let others = (values.wrapping_add(EACH * (0x80 - 10)) | values) & (EACH * 0x80);
        if others != 0 {
            return at + others.trailing_zeros() as usize / 8;
        }
    }
    text.len() - rest.len() + rest.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// The value of eight digits: neighbors are put together in three steps.
fn eight_digits(digits: [u8; 8]) -> u64 {
    let ones = u64::from_le_bytes(digits) ^ (EACH * 0x30);
    let twos = (ones * 10 + (ones >> 8)) & 0x00ff_00ff_00ff_00ff;
    let fours = (twos * 100 + (twos >> 16)) & 0x0000_ffff_0000_ffff;
    (fours * 10_000 + (fours >> 32)) & 0xffff_ffff
}

/// A one in each byte.
const EACH: u64 = 0x0101_0101_0101_0101;

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
    fn eight_digits_at_a_time_agree_with_single_ones() {
        for (len, point) in (1..=40).flat_map(|len| (0..=len).map(move |point| (len, point))) {
            let mut text: Vec<u8> = (0..len).map(|at| b'0' + (7 * at + len) as u8 % 10).collect();
            assert_eq!(num_digits(&text), len);
            if (1..len).contains(&point) {
                text.insert(point, b'.');
                assert_eq!(num_digits(&text), point);
            }
            for places in [-3, 0, 3] {
                let expected = long(&text, places).and_then(|value| value.try_into().ok());
                assert_eq!(
                    scaled(&text, places),
                    expected,
                    "{} with {places}",
                    text.escape_ascii()
                );
            }
            for byte in 0..=255u8 {
                text[point.min(len - 1)] = byte;
                let expected = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
                assert_eq!(num_digits(&text), expected, "{}", text.escape_ascii());
            }
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
