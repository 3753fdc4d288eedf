//! The gain of a change, with the spread of the steps from which it was computed; and the choice between changes.
//!
//! The gain of each step goes in. This module does not know how it was computed.

use paceline_table::stats::quantile;
use serde::Serialize;

/// With fewer steps, nothing is promised.
const MIN_STEPS: usize = 5;
/// The interval holds the middle four fifths of the steps.
const TAIL: f64 = 0.1;

/// The gain per step in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The median over the steps.
    pub ms: f64,
    /// A tenth of the steps gain less.
    pub low_ms: f64,
    /// A tenth of the steps gain more.
    pub high_ms: f64,
    /// The number of steps.
    pub steps: usize,
}

impl Gain {
    /// The gain from that of each step; `None` if there are too few steps.
    pub fn of(steps: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = steps.into_iter().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |part| quantile(&sorted, part);
        (sorted.len() >= MIN_STEPS).then_some(())?;
        Some(Self {
            ms: at(0.5)?,
            low_ms: at(TAIL)?,
            high_ms: at(1.0 - TAIL)?,
            steps: sorted.len(),
        })
    }

    /// A gain over `steps` steps, when only the mean is known.
    pub fn steady(ms: f64, steps: usize) -> Self {
        Self { ms, low_ms: ms, high_ms: ms, steps }
    }

    /// A gain between these ends, over `steps` steps.
    pub fn between(low_ms: f64, high_ms: f64, steps: usize) -> Self {
        Self { ms: (low_ms + high_ms) / 2.0, low_ms, high_ms, steps }
    }

    /// Whether the spread leaves a gain, and the usual gain is more than `least_ms`.
    pub fn holds(&self, least_ms: f64) -> bool {
        self.low_ms > 0.0 && self.ms > least_ms
    }

    /// In words: `6.90 ms less (6.10 to 7.70 in 8 of 10 steps)`.
    pub fn words(&self, less: &str) -> String {
        let Self { ms, low_ms, high_ms, .. } = self;
        format!("{ms:.2} ms {less} ({low_ms:.2} to {high_ms:.2} in 8 of 10 steps)")
    }
}

/// A change, and its effect on a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// The change, as a sentence names it: by its flags, for example.
    pub change: String,
    /// The gain of the step.
    pub gain: Gain,
    /// The exposed communication that the change removes, in milliseconds: a median over the steps. It may be negative.
    pub removes_ms: f64,
    /// Work that the change adds to the step, and its milliseconds.
    pub costs: Option<(&'static str, f64)>,
    /// Another effect of the change, as a sentence.
    pub also: Option<String>,
    /// Whether the weights differ afterwards by more than the order of a sum.
    pub changes_weights: bool,
}

impl Remedy {
    /// A change whose gain is exposed communication, and which does nothing else.
    pub fn new(change: impl Into<String>, gain: Gain) -> Self {
        let change = change.into();
        Self { change, gain, removes_ms: gain.ms, costs: None, also: None, changes_weights: false }
    }
}

/// The best of `changes`, which come in the order that decides between equals. Only those count whose gain holds. One that
/// comes later has to be better by more than `least_ms` at the lower end of its interval, so that noise does not choose.
pub fn best<T>(
    changes: impl IntoIterator<Item = T>,
    gain: impl Fn(&T) -> Gain,
    least_ms: f64,
) -> Option<T> {
    let holding = changes.into_iter().filter(|change| gain(change).holds(least_ms));
    holding.reduce(
        |best, change| {
            if gain(&change).low_ms > gain(&best).low_ms + least_ms { change } else { best }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_has_the_spread_of_the_steps() {
        let gain = Gain::of((0..=10).map(f64::from)).unwrap();
        assert_eq!(gain, Gain { ms: 5.0, low_ms: 1.0, high_ms: 9.0, steps: 11 });
        assert_eq!(gain.words("less"), "5.00 ms less (1.00 to 9.00 in 8 of 10 steps)");
        assert!(gain.holds(4.0) && !gain.holds(5.0));
        // The usual step gains, but the spread hides it.
        assert!(!Gain::of([-1.0, -1.0, 3.0, 3.0, 3.0, 3.0]).unwrap().holds(0.0));
        assert_eq!(Gain::of([1.0; 4]), None);
    }

    #[test]
    fn noise_does_not_choose_between_remedies() {
        let gain = |low_ms: &f64| Gain {
            ms: low_ms + 1.0,
            low_ms: *low_ms,
            high_ms: low_ms + 2.0,
            steps: 9,
        };
        let chosen = |first: f64, second: f64| best([first, second], gain, 0.5);
        for noise in [-0.4, -0.1, 0.0, 0.1, 0.4] {
            assert_eq!(chosen(3.0, 3.0 + noise), Some(3.0));
        }
        assert_eq!(chosen(3.0, 3.6), Some(3.6));
        assert_eq!((chosen(-0.1, 0.1), chosen(-0.1, -0.2)), (Some(0.1), None));
    }
}
