//! Formats numbers so that they fit the columns of nccl-tests' table, or as C's `printf` does.

/// The number with two decimals, with fewer if `width` is too small, or with a power of ten if even that
/// is too wide.
pub fn fitted(value: f64, width: usize) -> String {
    let plain = (0..=2).rev().map(|decimals| format!("{value:.decimals$}"));
    plain.into_iter().find(|text| text.len() <= width).unwrap_or_else(|| {
        let digits = usize::from(width >= 7);
        exponential(&format!("{value:.digits$e}"))
    })
}

/// The number as C's `%g` writes it: with six significant digits, without trailing zeros of a fraction,
/// and with a power of ten if the number is below 1e-4 or has more than six digits.
pub fn general(value: f64) -> String {
    let scientific = format!("{value:.5e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |text: &str| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text.to_owned()
        }
    };
    if (-4..6).contains(&exponent) {
        trimmed(&format!("{value:.*}", (5 - exponent) as usize))
    } else {
        exponential(&format!("{}e{exponent}", trimmed(digits)))
    }
}

/// Turns Rust's `1.2e5` into C's `1.2e+05`.
fn exponential(rust: &str) -> String {
    match rust.split_once('e') {
        Some((digits, power)) => match power.strip_prefix('-') {
            Some(power) => format!("{digits}e-{power:0>2}"),
            None => format!("{digits}e+{power:0>2}"),
        },
        None => rust.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_c_writes_them() {
        let all = [0.0, 1.0, 21.072_14, 0.000_012_345_67, 123_456.0, 1_234_567.0, 1e6, 0.5, 1e-4];
        assert_eq!(
            all.map(general),
            ["0", "1", "21.0721", "1.23457e-05", "123456", "1.23457e+06", "1e+06", "0.5", "0.0001"]
        );
    }

    #[test]
    fn a_column_holds_as_many_decimals_as_fit() {
        let times = [0.0, 9.876, 9999.99, 14594.41, 323_195.2, 9_999_999.0, 12_345_678.0];
        assert_eq!(
            times.map(|time| fitted(time, 7)),
            ["0.00", "9.88", "9999.99", "14594.4", "323195", "9999999", "1.2e+07"]
        );
        let speeds = [999.99, 1234.56, 123_456.0, 12_345_678.0].map(|speed| fitted(speed, 6));
        assert_eq!(speeds, ["999.99", "1234.6", "123456", "1e+07"]);
        // A number that rounding makes longer loses a decimal and keeps its column.
        assert_eq!(fitted(9999.999, 7), "10000.0");
    }
}
