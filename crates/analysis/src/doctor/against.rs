//! The same job before and after a change: the parts that got faster, and whether the promised gain came.
//!
//! Input: the diagnoses of both. Output: an [`Against`]. Times are milliseconds per step. A difference of steps counts if it is
//! larger than three times its standard error, as in the comparison of names.

use super::{Advice, Cause, Diagnosis};
use crate::stats::Summary;

/// A difference counts if it is larger than this many times its standard error.
const ERRORS: f64 = 3.0;

/// Whether a cause is gone after a change, stayed, or is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Became {
    /// It was advised before and is not any more.
    Gone,
    /// It is advised in both.
    Stayed,
    /// It is advised only afterwards.
    New,
}

impl Became {
    /// The verdict in a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Stayed => "stayed",
            Self::New => "new",
        }
    }
}

/// A cause in both traces.
#[derive(Clone, Debug, PartialEq)]
pub struct CauseRow {
    /// The cause.
    pub cause: &'static Cause,
    /// Its title.
    pub title: String,
    /// Whether it is gone, stayed, or is new.
    pub became: Became,
    /// The gain that its removal promised before: both ends of the range.
    pub promised_ms: Option<(f64, f64)>,
    /// The gain that its removal would bring afterwards.
    pub left_ms: Option<(f64, f64)>,
}

/// Whether the promised gain came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No advice was followed.
    NothingPromised,
    /// Within the range.
    Came,
    /// More than was promised.
    More,
    /// Less than was promised.
    Less,
    /// The steps differ by less than their spread.
    Noise,
}

/// Two diagnoses side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Against {
    /// The mean length of a step before and after.
    pub step_ms: [f64; 2],
    /// The gain of a step.
    pub gained_ms: f64,
    /// The standard error of the gain; `None` if one of them has a single step.
    pub error_ms: Option<f64>,
    /// The gain that the causes that are gone had promised together: the largest low end, and the sum of the high ends.
    pub promised_ms: Option<(f64, f64)>,
    /// Whether the promised gain came.
    pub verdict: Verdict,
    /// The causes of both.
    pub causes: Vec<CauseRow>,
}

/// Compares two diagnoses; `None` if the steps of one of them could not be replayed.
pub fn against(before: &Diagnosis, after: &Diagnosis) -> Option<Against> {
    let step_ms = [before.step_ms?, after.step_ms?];
    let range = |of: &Advice| (of.gain.low_ms, of.gain.high_ms);
    let find =
        |all: &Diagnosis, cause: &Cause| all.advice.iter().find(|of| of.cause == cause).map(range);
    let mut causes: Vec<CauseRow> = Vec::new();
    for of in before.advice.iter().chain(&after.advice) {
        if causes.iter().any(|row| row.cause == of.cause) {
            continue;
        }
        let (promised_ms, left_ms) = (find(before, of.cause), find(after, of.cause));
        let became = match (promised_ms, left_ms) {
            (Some(_), None) => Became::Gone,
            (Some(_), Some(_)) => Became::Stayed,
            (None, _) => Became::New,
        };
        let title = of.title.clone();
        causes.push(CauseRow { cause: of.cause, title, became, promised_ms, left_ms });
    }
    // A cause whose gain shrank by more than half was acted upon too.
    let middle = |(low, high): (f64, f64)| (low + high) / 2.0;
    let followed = causes.iter().filter(|row| match (row.became, row.promised_ms, row.left_ms) {
        (Became::Gone, ..) => true,
        (Became::Stayed, Some(promised), Some(left)) => middle(left) < middle(promised) / 2.0,
        _ => false,
    });
    let promised_ms = followed
        .filter_map(|row| row.promised_ms)
        .reduce(|all, of| (all.0.max(of.0), all.1 + of.1));
    let gained_ms = step_ms[0] - step_ms[1];
    let error = |of: &Diagnosis| {
        let lengths = Summary::of(of.lengths_ms.clone()).filter(|of| of.count > 1);
        lengths.map(|of| of.error())
    };
    let error_ms = error(before).zip(error(after)).map(|(a, b)| a.hypot(b));
    let slack = ERRORS * error_ms.unwrap_or(0.0);
    let verdict = match promised_ms {
        None => Verdict::NothingPromised,
        Some(_) if gained_ms.abs() <= slack => Verdict::Noise,
        Some((low, _)) if gained_ms < low - slack => Verdict::Less,
        Some((_, high)) if gained_ms > high + slack => Verdict::More,
        Some(_) => Verdict::Came,
    };
    Some(Against { step_ms, gained_ms, error_ms, promised_ms, verdict, causes })
}

impl Against {
    /// The result in sentences.
    pub fn words(&self) -> String {
        let [before, after] = self.step_ms;
        let head = if self.gained_ms >= 0.0 {
            format!(
                "A step takes {:.2} ms less: {before:.2} before and {after:.2} after",
                self.gained_ms
            )
        } else {
            format!(
                "A step takes {:.2} ms more: {before:.2} before and {after:.2} after",
                -self.gained_ms
            )
        };
        let error = match self.error_ms {
            Some(ms) => format!(" (standard error {ms:.2})"),
            None => " (one step, so the spread is unknown)".to_owned(),
        };
        let range = |(low, high): (f64, f64)| format!("{low:.2} to {high:.2} ms");
        let promise = match (self.promised_ms, self.verdict) {
            (None, _) => "No advice was followed".to_owned(),
            (Some(promised), Verdict::Noise) => {
                format!(
                    "{} were promised; the difference is within the spread of the steps",
                    range(promised)
                )
            }
            (Some(promised), Verdict::Less) => {
                format!("{} were promised; less came", range(promised))
            }
            (Some(promised), Verdict::More) => {
                format!("{} were promised; more came", range(promised))
            }
            (Some(promised), _) => format!("{} were promised, and they came", range(promised)),
        };
        format!("{head}{error}. {promise}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::gain::Gain;
    use crate::doctor::Evidence;
    use crate::doctor::causes::{exposed, loader};

    fn diagnosis(lengths_ms: &[f64], advice: &[(&'static Cause, f64, f64)]) -> Diagnosis {
        let step_ms = lengths_ms.iter().sum::<f64>() / lengths_ms.len() as f64;
        let of = |&(cause, low_ms, high_ms): &(&'static Cause, f64, f64)| Advice {
            cause,
            title: cause.title.to_owned(),
            change: String::new(),
            gain: Gain::between(low_ms, high_ms, lengths_ms.len()),
            step_ms,
            evidence: Evidence::default(),
        };
        Diagnosis {
            advice: advice.iter().map(of).collect(),
            step_ms: Some(step_ms),
            lengths_ms: lengths_ms.to_vec(),
            ..Diagnosis::default()
        }
    }

    #[test]
    fn a_promise_is_held_against_what_came() {
        let before = diagnosis(
            &[100.0, 101.0, 99.0],
            &[(&loader::CAUSE, 10.0, 20.0), (&exposed::CAUSE, 3.0, 6.0)],
        );
        let with = |lengths: &[f64]| {
            against(&before, &diagnosis(lengths, &[(&exposed::CAUSE, 3.0, 6.0)])).unwrap()
        };
        let came = with(&[85.0, 86.0, 84.0]);
        assert_eq!((came.verdict, came.promised_ms), (Verdict::Came, Some((10.0, 20.0))));
        assert_eq!(
            came.causes.iter().map(|of| of.became).collect::<Vec<_>>(),
            [Became::Gone, Became::Stayed]
        );
        assert!(came.words().starts_with("A step takes 15.00 ms less"), "{}", came.words());
        assert_eq!(with(&[70.0, 71.0, 69.0]).verdict, Verdict::More);
        assert_eq!(with(&[95.0, 96.0, 94.0]).verdict, Verdict::Less);
        assert_eq!(with(&[100.0, 102.0, 99.0]).verdict, Verdict::Noise);
        let nothing = against(&before, &before).unwrap();
        assert_eq!(nothing.verdict, Verdict::NothingPromised);
    }
}
