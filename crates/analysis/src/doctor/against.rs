//! The same job before and after a change: the parts that got faster, and whether the promised gain came.
//!
//! Input: the diagnoses of both. Output: an [`Against`]. Times are milliseconds per step. Steps are compared by their medians. A
//! difference counts if the steps in pairs say so, in the order of the recordings. A change was made if at most half of the time that
//! shows its cause is left: what else limits the steps decides how much the rest would gain.

use super::{Cause, Diagnosis};
use crate::stats::{median, ratio_of_logarithms};

/// Of this many recorded steps, the first one is left out: it has the start of the profiler in it.
const MANY_STEPS: usize = 4;

/// A gain that misses the promise by less than this part of a step is as promised.
const NEAR: f64 = 0.01;

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
    /// Whether the advice was followed.
    pub is_followed: bool,
}

impl CauseRow {
    /// The verdict on it in a word.
    pub fn became(&self) -> &'static str {
        match (self.promised_ms, self.left_ms) {
            (Some(_), None) if self.is_followed => "gone",
            (Some(_), _) => "stayed",
            (None, _) => "new",
        }
    }

    /// The promise, if it was acted upon.
    fn followed(&self) -> Option<(f64, f64)> {
        self.promised_ms.filter(|_| self.is_followed)
    }
}

/// Two diagnoses side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Against {
    /// The median length of a step before and after.
    pub step_ms: [f64; 2],
    /// The gain of a step.
    pub gained_ms: f64,
    /// The test of the gain; `None` if one of them has a single step.
    pub test: Option<Test>,
    /// The gain that the causes that are gone had promised together: the largest low end, and the sum of the high ends.
    pub promised_ms: Option<(f64, f64)>,
    /// The causes of both.
    pub causes: Vec<CauseRow>,
}

/// Whether steps differ by more than noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Test {
    /// The number of pairs of steps.
    pub pairs: usize,
    /// Whether the difference is more than noise.
    pub is_seen: bool,
    /// The smallest difference that would have been more than noise.
    pub least_ms: f64,
}

impl Test {
    /// Compares steps in pairs.
    fn of(before_ms: &[f64], after_ms: &[f64], step_ms: [f64; 2]) -> Option<Self> {
        let pairs = before_ms.iter().zip(after_ms);
        let logarithms: Vec<f64> = pairs.map(|(before, after)| (after / before).ln()).collect();
        let [middle, _, high] = ratio_of_logarithms(&logarithms)?;
        // The medians are shown, so they are held against the interval.
        let (ratio, half) = (step_ms[1] / step_ms[0], high / middle);
        let is_seen = !(1.0 / half..=half).contains(&ratio);
        let least_ms = step_ms[0] * if ratio > 1.0 { half - 1.0 } else { 1.0 - 1.0 / half };
        Some(Self { pairs: logarithms.len(), is_seen, least_ms })
    }
}

/// Compares two diagnoses; `None` if the steps of one of them could not be replayed.
pub fn against<'a>(before: &'a Diagnosis, after: &'a Diagnosis) -> Option<Against> {
    // Steps before the recordings, if both know them: the profiler slows the host down.
    let is_before = [before, after].iter().all(|of| of.scale().is_some());
    let is_many = [before, after].iter().all(|of| of.lengths_ms.len() >= MANY_STEPS);
    let lengths_of = |of: &'a Diagnosis| {
        if is_before { &of.unrecorded_ms[..] } else { &of.lengths_ms[usize::from(is_many)..] }
    };
    let [were_ms, are_ms] = [before, after].map(lengths_of);
    let median = |lengths: &[f64]| median(lengths.iter().copied());
    let step_ms = [median(were_ms)?, median(are_ms)?];
    let by = |of: &Diagnosis| of.scale().filter(|_| !is_before).unwrap_or(1.0);
    let find = |all: &Diagnosis, cause: &Cause| {
        let found = all.advice.iter().find(|of| of.cause == cause)?;
        Some((found.gain.low_ms / by(all), found.gain.high_ms / by(all)))
    };
    let mut causes: Vec<CauseRow> = Vec::new();
    for of in before.advice.iter().chain(&after.advice) {
        if causes.iter().any(|row| row.cause == of.cause) {
            continue;
        }
        let (cause, title) = (of.cause, of.title.clone());
        let (promised_ms, left_ms) = (find(before, cause), find(after, cause));
        let middle = |range: Option<(f64, f64)>| range.map_or(0.0, |(low, high)| low + high);
        // As parts of a step, because a machine may be slower in one recording. Runs of paceline are judged by the gains.
        let [was, is] = [(before, promised_ms), (after, left_ms)]
            .map(|(all, gain)| all.share(cause).unwrap_or_else(|| middle(gain)));
        causes.push(CauseRow { cause, title, promised_ms, left_ms, is_followed: is < was / 2.0 });
    }
    let promised_ms = causes
        .iter()
        .filter_map(CauseRow::followed)
        .reduce(|all, of| (all.0.max(of.0), all.1 + of.1));
    let gained_ms = step_ms[0] - step_ms[1];
    let test = Test::of(were_ms, are_ms, step_ms);
    Some(Against { step_ms, gained_ms, test, promised_ms, causes })
}

impl Against {
    /// The result in sentences, the answer first.
    pub fn words(&self) -> String {
        let [before, after] = self.step_ms;
        let more = if self.gained_ms >= 0.0 { "less" } else { "more" };
        let gain = match format!("{:.2}", self.gained_ms.abs()) {
            ms if ms == "0.00" => "A step takes as long as before".to_owned(),
            ms => format!("A step takes {ms} ms {more}"),
        };
        let promise = match self.promised_ms {
            Some((low, high)) => {
                let followed = self.causes.iter().filter(|row| row.followed().is_some());
                let keys: Vec<String> =
                    followed.map(|row| format!("`{}`", row.cause.key)).collect();
                let (keys, came) = (keys.join(" and "), self.came(low, high));
                format!("; {low:.2} to {high:.2} ms were promised for {keys}{came}.")
            }
            None if self.test.is_some_and(|test| !test.is_seen) => {
                ", within the spread of the steps. No advice was followed.".to_owned()
            }
            None => ". No advice was followed.".to_owned(),
        };
        let test = match self.test {
            Some(Test { pairs, least_ms, .. }) => format!(
                "A difference of {least_ms:.2} ms would have been seen in {pairs} pairs of steps"
            ),
            None => "Too few steps can be compared in pairs, so the spread is unknown".to_owned(),
        };
        format!(
            "{gain}{promise} The median step took {before:.2} ms before and {after:.2} after. {test}"
        )
    }

    /// Whether a promised gain came.
    fn came(&self, low_ms: f64, high_ms: f64) -> &'static str {
        let least_ms = self.test.map_or(0.0, |test| test.least_ms);
        let slack_ms = least_ms.min(high_ms - low_ms).max(NEAR * self.step_ms[0]);
        if self.test.is_some_and(|test| !test.is_seen) {
            "; the difference is within the spread of the steps"
        } else if self.gained_ms < -slack_ms {
            ", but steps got slower"
        } else if self.gained_ms < low_ms - slack_ms {
            "; less came"
        } else if self.gained_ms > high_ms + slack_ms {
            "; more came"
        } else {
            ", and they came"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::gain::Gain;
    use crate::doctor::causes::{exposed, loader};
    use crate::doctor::{Advice, Evidence};

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
            ([85.0, 86.0, 84.0], "10.00 to 20.00 ms were promised for `loader`, and they came"),
            ([70.0, 71.0, 69.0], "10.00 to 20.00 ms were promised for `loader`; more came"),
            ([95.0, 96.0, 94.0], "10.00 to 20.00 ms were promised for `loader`; less came"),
            ([109.0, 110.0, 108.0], "promised for `loader`, but steps got slower"),
            ([100.0, 102.0, 99.0], "the difference is within the spread of the steps"),
        ] {
            let said = with(&lengths).words();
            assert!(said.contains(words), "{said}");
        }
        let words = with(&[85.0, 86.0, 84.0]).words();
        assert!(words.starts_with("A step takes 15.00 ms less; 10.00 to 20.00 ms"), "{words}");
        assert!(with(&[85.0]).words().ends_with("so the spread is unknown"));
        let nothing = against(&before, &before).unwrap().words();
        assert!(nothing.contains("No advice was followed"), "{nothing}");
    }

    /// A long first step and one outlier in five hide no gain of a fourth, and noise is none.
    #[test]
    fn steps_are_compared_by_medians_and_in_pairs() {
        let before = [176.08, 173.99, 176.92, 181.26, 176.47];
        let after = [181.56, 123.88, 126.82, 126.27, 163.46];
        let of = |before: &[f64], after: &[f64]| {
            against(&diagnosis(before, &[]), &diagnosis(after, &[])).unwrap()
        };
        let gain = of(&before, &after);
        assert!(
            (gain.step_ms[0] - 176.695).abs() < 1e-6 && (gain.step_ms[1] - 126.545).abs() < 1e-6
        );
        let Test { pairs, is_seen, least_ms } = gain.test.unwrap();
        assert!(pairs == 4 && is_seen, "{gain:?}");
        // Without the first steps, logarithms differ by -0.278, with a standard error of 0.0672 and 3.182 of these.
        assert!((least_ms - 176.695 * (1.0 - (-3.182f64 * 0.0672).exp())).abs() < 0.2, "{gain:?}");
        // With an even larger outlier, it would be noise.
        assert!(!of(&before, &[181.56, 123.88, 126.82, 126.27, 263.46]).test.unwrap().is_seen);
        // More steps than the other has pair with nothing.
        assert_eq!(of(&before, &after[..4]).test.unwrap().pairs, 3);
        let slower = of(&after, &before);
        assert!(slower.test.unwrap().is_seen && slower.gained_ms < 0.0, "{slower:?}");
        assert!(slower.words().starts_with("A step takes 50.15 ms more. "), "{slower:?}");
    }
}
