//! Parsers of the numbers that flags take. A flag states its range where it is defined, so a value on the command line, in a file
//! or in a sweep is checked alike, and the error names the flag and the remedy.

use std::fmt::Display;
use std::str::FromStr;

/// Numbers of at least `least`.
pub fn at_least<T: RangedNumber>(least: T) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parsed(text, |number| *number >= least, || format!("pass {least} or more"))
}

/// Numbers above zero.
pub fn above_zero(text: &str) -> Result<f64, String> {
    parsed(text, |number| *number > 0.0, || "pass a number above zero".into())
}

/// Numbers above zero, up to 1.
pub fn part(text: &str) -> Result<f64, String> {
    parsed(
        text,
        |number| *number > 0.0 && *number <= 1.0,
        || "pass a number above 0, up to 1".into(),
    )
}

/// Numbers from `least` to `most`, both included.
pub fn within<T: RangedNumber>(least: T, most: T) -> impl Fn(&str) -> Result<T, String> + Clone {
    let remedy = move || format!("pass a number from {least} to {most}");
    move |text| parsed(text, |number| (least..=most).contains(number), remedy)
}

/// The type of a number that flags take.
pub trait RangedNumber: FromStr<Err: Display> + PartialOrd + Display + Copy + 'static {}

impl RangedNumber for u64 {}
impl RangedNumber for usize {}
impl RangedNumber for f64 {}

fn parsed<T: RangedNumber>(
    text: &str,
    is_in_range: impl Fn(&T) -> bool,
    remedy: impl Fn() -> String,
) -> Result<T, String> {
    let number: T = text.parse().map_err(|error: T::Err| error.to_string())?;
    if text.parse().is_ok_and(|number: f64| !number.is_finite()) {
        return Err("pass a finite number".into());
    }
    if is_in_range(&number) { Ok(number) } else { Err(remedy()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_of_their_range_are_refused_with_the_range() {
        assert_eq!(at_least(1)("1"), Ok(1_usize));
        assert_eq!(at_least(1_u64)("0"), Err("pass 1 or more".into()));
        assert_eq!(within(0.0, 1e6)("1e6"), Ok(1e6));
        assert_eq!(within(2, 9)("10"), Err::<usize, _>("pass a number from 2 to 9".into()));
        assert_eq!(above_zero("-1"), Err("pass a number above zero".into()));
        for text in ["nan", "inf", "1e999"] {
            assert_eq!(above_zero(text), Err("pass a finite number".into()), "{text}");
        }
        // A specification keeps the word, and reads it without a parser of ours.
        assert!(at_least(1_usize)(" 2").is_err());
        assert!(above_zero("0").is_err() && part("1.1").is_err() && at_least(1_u64)("x").is_err());
    }
}
