//! Turns the flags of a sweep into the list of message sizes.
//!
//! Sizes are whole numbers of elements, read as by nccl-tests: `1K` is 1024 bytes. 1 MB is 1e6 bytes.

use std::iter::successors;

use paceline_failure::{Result, usage};

/// The most sizes of a sweep; more are taken for a mistake.
const MOST_SIZES: usize = 10_000;

/// How a sweep gets from one size to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// By adding this number of bytes.
    Increment(u64),
    /// By multiplying by this factor.
    Factor(u64),
}

/// Reads a size such as `8`, `1k`, `32M` or `1.5G`, in powers of 1024, for `flag`.
pub fn parse_size(flag: &str, text: &str) -> Result<u64> {
    let trimmed = text.trim();
    let (digits, unit) = match trimmed.char_indices().last() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 1_u64 << 10),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&trimmed[..at], 1 << 30),
        _ => (trimmed, 1),
    };
    let example = "a number of bytes such as 8, 1K, 32M or 1G";
    number(flag, text, digits.trim_end(), unit as f64, example)
}

/// Reads a size in MB of 1e6 bytes, for `flag`.
pub fn parse_size_mb(flag: &str, text: &str) -> Result<u64> {
    number(flag, text, text.trim(), 1e6, "a number of MB such as 1, 0.5 or 100")
}

fn number(flag: &str, text: &str, digits: &str, unit: f64, example: &str) -> Result<u64> {
    // Rust would also parse "inf" and "nan", which are not sizes.
    let plain = digits.chars().all(|digit| digit.is_ascii_digit() || digit == '.');
    let value: Option<f64> = digits.parse().ok().filter(|_| plain);
    let Some(value) = value else {
        return usage(format!("{flag} {text}: give {example}"));
    };
    let bytes = value * unit;
    // Above 2^53, an f64 cannot hold every whole number. No memory is that large either.
    if bytes > (1_u64 << 53) as f64 {
        return usage(format!("{flag} {text}: too large; give {example}"));
    }
    if bytes < 1.0 {
        return usage(format!("{flag} {text}: less than one byte; give {example}"));
    }
    // Rounded, because 0.3 x 1e6 may be slightly less than 300000.
    Ok(bytes.round() as u64)
}

/// The sizes from `begin` to `end`, both inclusive, rounded down to whole elements of `elem_bytes` bytes, without
/// duplicates.
pub fn sweep(begin: u64, end: u64, step: Step, elem_bytes: u64) -> Result<Vec<u64>> {
    if begin == 0 {
        return usage("-b 0: begin with one byte at least");
    }
    if begin > end {
        return usage(format!(
            "-b {begin} -e {end}: the first size is larger than the last; exchange them"
        ));
    }
    match step {
        Step::Factor(factor) if factor < 2 => {
            return usage(format!("-f {factor}: sizes would not grow; give a factor of 2 or more"));
        }
        Step::Increment(0) => {
            return usage("-i 0: sizes would not grow; give an increment of 1 or more");
        }
        _ => {}
    }
    if begin < elem_bytes {
        return usage(format!(
            "-b {begin}: less than one element; begin with {elem_bytes} bytes at least"
        ));
    }
    // A next size that overflows is beyond the end too.
    let next = |size: &u64| match step {
        Step::Increment(bytes) => size.checked_add(bytes),
        Step::Factor(factor) => size.checked_mul(factor),
    };
    let mut sizes: Vec<u64> = Vec::new();
    for size in successors(Some(begin), next).take_while(|size| *size <= end) {
        let whole = size - size % elem_bytes;
        if sizes.last() != Some(&whole) {
            sizes.push(whole);
        }
        if sizes.len() > MOST_SIZES {
            return usage(format!(
                "-b {begin} -e {end}: more than {MOST_SIZES} sizes; give a larger -i, or a factor -f"
            ));
        }
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use paceline_failure::Failure;

    use super::*;

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        match result {
            Err(Failure::Usage(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sizes_are_read_with_binary_prefixes() {
        for (text, bytes) in [
            ("8", 8),
            ("1K", 1024),
            ("1k", 1024),
            ("32M", 32 << 20),
            ("1 g", 1 << 30),
            ("1.5K", 1536),
            (" 64 ", 64),
        ] {
            assert_eq!(parse_size("-b", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn sizes_in_mb_are_decimal() {
        for (text, bytes) in [("1", 1_000_000), ("0.3", 300_000), ("1024", 1_024_000_000)] {
            assert_eq!(parse_size_mb("--size-mb", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_answered_with_the_flag_and_an_example() {
        for text in
            ["", "K", "1T", "-1", "1e3", "nan", "inf", "0x10", "1KB", "1.2.3", "\u{663}", "\u{e9}"]
        {
            let said = message(parse_size("-e", text));
            assert!(said.starts_with(&format!("-e {text}: give a number")), "{said}");
        }
        assert!(message(parse_size("-e", "0")).contains("less than one byte"));
        assert!(message(parse_size("-e", "99999999999G")).contains("too large"));
        assert!(message(parse_size_mb("--size-mb", "1M")).contains("MB such as"));
        assert!(message(parse_size_mb("--size-mb", "0")).contains("less than one byte"));
    }

    #[test]
    fn a_sweep_reaches_its_end() {
        assert_eq!(sweep(8, 128, Step::Factor(2), 4).unwrap(), [8, 16, 32, 64, 128]);
        assert_eq!(sweep(8, 100, Step::Factor(4), 4).unwrap(), [8, 32]);
        assert_eq!(sweep(100, 400, Step::Increment(100), 4).unwrap(), [100, 200, 300, 400]);
        assert_eq!(sweep(64, 64, Step::Factor(2), 4).unwrap(), [64]);
    }

    #[test]
    fn sizes_are_whole_elements_and_not_repeated() {
        assert_eq!(sweep(5, 15, Step::Increment(1), 4).unwrap(), [4, 8, 12]);
        assert_eq!(sweep(9, 40, Step::Factor(2), 8).unwrap(), [8, 16, 32]);
    }

    #[test]
    fn a_sweep_at_the_end_of_all_numbers_ends() {
        let sizes = sweep(1 << 62, u64::MAX, Step::Factor(3), 1).unwrap();
        assert_eq!(sizes, [1 << 62, 3 << 62]);
        let sizes = sweep(u64::MAX - 3, u64::MAX, Step::Increment(4), 1).unwrap();
        assert_eq!(sizes, [u64::MAX - 3]);
    }

    #[test]
    fn sweeps_that_cannot_be_are_answered_with_the_flag() {
        for (begin, end, step, flag) in [
            (0, 8, Step::Factor(2), "-b 0: "),
            (2, 8, Step::Factor(2), "-b 2: less than one element"),
            (16, 8, Step::Factor(2), "-b 16 -e 8: "),
            (8, 16, Step::Factor(0), "-f 0: "),
            (8, 16, Step::Factor(1), "-f 1: "),
            (8, 16, Step::Increment(0), "-i 0: "),
            (8, 1 << 30, Step::Increment(4), "-b 8 -e 1073741824: more than 10000 sizes"),
        ] {
            let said = message(sweep(begin, end, step, 4));
            assert!(said.starts_with(flag), "{said}");
        }
    }
}
