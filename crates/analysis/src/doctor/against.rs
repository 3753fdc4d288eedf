//! The same job before and after a change: the parts that got faster, and whether the promised gain came.
//!
//! Input: the diagnoses of both. Output: an [`Against`]. Times are milliseconds per step. A difference of steps counts if it is
//! larger than three times its standard error, as in the comparison of names.

use super::{Advice, Cause, Diagnosis};
use crate::stats::Summary;

/// A difference counts if it is larger than this many times its standard error.
const ERRORS: f64 = 3.0;

/// A cause in both traces.
#[derive(Clone, Debug, PartialEq)]
pub struct CauseRow {
    /// The cause.
    pub cause: &'static Cause,
    /// Its title.
    pub title: String,
    /// The gain that its removal promised before: both ends of the range.
    pub promised_ms: Option<(f64, f64)>,
    /// The gain that its removal would bring afterwards.
    pub left_ms: Option<(f64, f64)>,
}

impl CauseRow {
    /// The verdict on it in a word.
    pub fn became(&self) -> &'static str {
        match (self.promised_ms, self.left_ms) {
            (Some(_), None) => "gone",
            (Some(_), Some(_)) => "stayed",
            (None, _) => "new",
        }
    }
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
        let (cause, title) = (of.cause, of.title.clone());
        let (promised_ms, left_ms) = (find(before, cause), find(after, cause));
        causes.push(CauseRow { cause, title, promised_ms, left_ms });
    }
    // A cause whose gain shrank by more than half was acted upon too.
    let middle = |(low, high): (f64, f64)| (low + high) / 2.0;
    let followed = causes.iter().filter_map(|row| {
        let promised = row.promised_ms?;
        let is_less = |left| middle(left) < middle(promised) / 2.0;
        row.left_ms.is_none_or(is_less).then_some(promised)
    });
    let promised_ms = followed.reduce(|all, of| (all.0.max(of.0), all.1 + of.1));
    let gained_ms = step_ms[0] - step_ms[1];
    let error = |of: &Diagnosis| {
        let lengths = Summary::of(of.lengths_ms.clone()).filter(|of| of.count > 1);
        lengths.map(|of| of.error())
    };
    let error_ms = error(before).zip(error(after)).map(|(a, b)| a.hypot(b));
    Some(Against { step_ms, gained_ms, error_ms, promised_ms, causes })
}

impl Against {
    /// The result in sentences.
    pub fn words(&self) -> String {
        let [before, after] = self.step_ms;
        let (gained_ms, more) =
            (self.gained_ms, if self.gained_ms >= 0.0 { "less" } else { "more" });
        let head = format!(
            "A step takes {:.2} ms {more}: {before:.2} before and {after:.2} after",
            gained_ms.abs()
        );
        let error = match self.error_ms {
            Some(ms) => format!(" (standard error {ms:.2})"),
            None => " (one step, so the spread is unknown)".to_owned(),
        };
        let Some((low, high)) = self.promised_ms else {
            return format!("{head}{error}. No advice was followed");
        };
        let slack = ERRORS * self.error_ms.unwrap_or(0.0);
        let what_came = if gained_ms.abs() <= slack {
            "; the difference is within the spread of the steps"
        } else if gained_ms < low - slack {
            "; less came"
        } else if gained_ms > high + slack {
            "; more came"
        } else {
            ", and they came"
        };
        format!("{head}{error}. {low:.2} to {high:.2} ms were promised{what_came}")
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
        let became: Vec<_> = with(&[85.0]).causes.iter().map(CauseRow::became).collect();
        assert_eq!(became, ["gone", "stayed"]);
        for (lengths, words) in [
            ([85.0, 86.0, 84.0], "10.00 to 20.00 ms were promised, and they came"),
            ([70.0, 71.0, 69.0], "10.00 to 20.00 ms were promised; more came"),
            ([95.0, 96.0, 94.0], "10.00 to 20.00 ms were promised; less came"),
            ([100.0, 102.0, 99.0], "the difference is within the spread of the steps"),
        ] {
            let said = with(&lengths).words();
            assert!(said.ends_with(words), "{said}");
        }
        let words = with(&[85.0, 86.0, 84.0]).words();
        assert!(words.starts_with("A step takes 15.00 ms less"), "{words}");
        let nothing = against(&before, &before).unwrap().words();
        assert!(nothing.ends_with("No advice was followed"), "{nothing}");
    }
}
