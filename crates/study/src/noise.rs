//! The one rule of noise: whether two cases differ by more than the rounds vary, and by how much.
//!
//! **The rule.** In each round every case runs once, so a round gives one ratio of a case to another. The logarithms of these
//! ratios have a mean and, by Student's t distribution, a 95 % interval. If the interval of the ratio contains 1, or with fewer
//! than three rounds, the cases are not said to differ. Changes of the machine's speed between rounds cancel out.

use paceline_observe::figures::figure::Better;
use paceline_table::stats::{self, STUDENT_975, ratio_of_logarithms};
use serde::{Deserialize, Serialize};

/// With fewer rounds than this, nothing is said to differ.
pub const MIN_ROUNDS: usize = 3;

/// An interval that contains 1 and this ratio, up or down, is too wide: neither a difference nor its absence is known.
const UNCLEAR: f64 = 1.1;

/// The rule in words.
pub const RULE: &str = "Cases differ if the 95 % interval of their ratio, round by round, excludes 1 (Student's t of its logarithms).";

/// The rule in words, for this many rounds.
pub fn rule(rounds: usize) -> String {
    if rounds < MIN_ROUNDS {
        return format!(
            "With fewer than {MIN_ROUNDS} rounds nothing is said to differ; pass more --rounds."
        );
    }
    RULE.to_owned()
}

/// A figure over the rounds of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many values there are.
    pub rounds: usize,
}

impl Spread {
    /// The spread of `values`; `None` if one is missing or there are none.
    pub fn of(values: impl IntoIterator<Item = Option<f64>>) -> Option<Self> {
        let values = values.into_iter().collect::<Option<Vec<f64>>>()?;
        let median = stats::median(values.iter().copied())?;
        let (min, max) = (
            values.iter().copied().fold(median, f64::min),
            values.iter().copied().fold(median, f64::max),
        );
        Some(Self { median, min, max, rounds: values.len() })
    }

    /// A value that follows from the medians of others.
    pub fn exactly(value: f64) -> Self {
        Self { median: value, min: value, max: value, rounds: 1 }
    }
}

/// The median of `values`; `None` if one is missing or there are none.
pub fn median(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    Spread::of(values).map(|spread| spread.median)
}

/// The ratio of a case to another, with the interval in which it lies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// The geometric mean of the ratios.
    pub ratio: f64,
    /// The low end of the 95 % interval.
    pub low: f64,
    /// Its high end.
    pub high: f64,
    /// How many rounds there were.
    pub rounds: usize,
}

impl Effect {
    /// The effect, from a figure of base and variant in each round; `None` with fewer rounds than [`MIN_ROUNDS`], or if a figure
    /// is not above zero.
    pub fn of(base: &[f64], variant: &[f64]) -> Option<Self> {
        Self::of_logarithms(&logarithms(base, variant))
    }

    /// The same, from the logarithms of the ratios.
    pub fn of_logarithms(all: &[f64]) -> Option<Self> {
        let rounds = all.len();
        let [ratio, low, high] = ratio_of_logarithms(all).filter(|_| rounds >= MIN_ROUNDS)?;
        Some(Self { ratio, low, high, rounds })
    }

    /// Whether the rounds cannot distinguish it from noise.
    pub fn is_none(&self) -> bool {
        (self.low..=self.high).contains(&1.0)
    }

    /// Whether it is none, but for the rounds could as well be of a tenth.
    pub fn is_unclear(&self) -> bool {
        self.is_none() && (self.low * UNCLEAR < 1.0 || self.high > UNCLEAR)
    }

    /// How many rounds tell an effect of a tenth from none, if further rounds vary like these.
    pub fn needed_rounds(&self) -> usize {
        let point = STUDENT_975[self.rounds.clamp(MIN_ROUNDS, STUDENT_975.len()) - 2];
        let error = (self.high / self.low).ln() / 2.0 / point;
        // Of many rounds, an interval takes two errors to each side.
        (self.rounds as f64 * (2.0 * error / UNCLEAR.ln()).powi(2)).ceil() as usize
    }

    /// Half the width of the interval, in percent of the ratio.
    pub fn half_width_pct(&self) -> f64 {
        50.0 * (self.high - self.low) / self.ratio
    }

    /// The effect in words.
    pub fn words(&self) -> String {
        let Self { ratio, low, high, .. } = self;
        if self.is_unclear() {
            format!("unclear ({low:.2}-{high:.2})")
        } else if self.is_none() {
            format!("none ({low:.2}-{high:.2})")
        } else {
            format!("{ratio:.2}x ({low:.2}-{high:.2})")
        }
    }
}

/// An effect in words, also if rounds are too few.
pub fn words(effect: Option<Effect>) -> String {
    effect.map_or("too few rounds".to_owned(), |effect| effect.words())
}

/// The logarithm of the ratio of a variant to the base in each round; empty if a figure is not above zero.
pub fn logarithms(base: &[f64], variant: &[f64]) -> Vec<f64> {
    let all = base.iter().zip(variant).map(|(base, variant)| (variant / base).ln());
    Some(all.collect())
        .filter(|all: &Vec<f64>| all.iter().all(|of| of.is_finite()))
        .unwrap_or_default()
}

/// The place of each case from its figure in each round: one plus the number of cases that are better by more than noise. Cases
/// can share a place. Cases without a figure have no place.
pub fn places(cases: &[Option<Vec<f64>>], better: Better) -> Vec<Option<usize>> {
    let beats = |one: &Vec<f64>, other: &Vec<f64>| {
        let effect = Effect::of(other, one).filter(|effect| !effect.is_none());
        effect.is_some_and(|effect| (effect.ratio > 1.0) == (better == Better::Higher))
    };
    let place = |of: &Vec<f64>| 1 + cases.iter().flatten().filter(|other| beats(other, of)).count();
    cases.iter().map(|of| of.as_ref().map(place)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([Some(3.0), Some(1.0), Some(2.0)]), Some(2.0));
        assert_eq!(median([Some(1.0), Some(4.0)]), Some(2.5));
        assert_eq!(median([Some(1.0), None]), None);
        assert_eq!(median([]), None);
        let of = Spread::of([3.0, 1.0, 2.5].map(Some)).unwrap();
        assert_eq!((of.min, of.median, of.max, of.rounds), (1.0, 2.5, 3.0, 3));
    }

    #[test]
    fn an_effect_is_a_ratio_with_its_interval() {
        let base = [100.0, 104.0, 98.0, 101.0, 97.0];
        let faster: Vec<f64> = base.iter().map(|of| of * 1.25).collect();
        let effect = Effect::of(&base, &faster).unwrap();
        assert!((effect.ratio - 1.25).abs() < 1e-9 && effect.low > 1.2499 && !effect.is_none());
        // Machine noise that both share does not widen it; noise of their own does.
        let noisy = Effect::of(&base, &[101.0, 97.0, 103.0, 96.0, 104.0]).unwrap();
        assert!(noisy.is_none() && noisy.words().starts_with("none ("), "{noisy:?}");
        let wild = Effect::of(&base, &[20.0, 300.0, 103.0, 96.0, 104.0]).unwrap();
        assert!(wild.is_unclear() && wild.words().starts_with("unclear ("), "{wild:?}");
        assert!(wild.needed_rounds() > 100 && noisy.needed_rounds() < 5, "{wild:?} {noisy:?}");
    }

    #[test]
    fn too_few_rounds_and_figures_of_zero_have_none() {
        assert_eq!(Effect::of(&[1.0, 1.0], &[2.0, 2.0]), None);
        assert_eq!(Effect::of(&[0.0, 1.0, 1.0], &[1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn equal_cases_share_a_place() {
        // A machine that gets slower slows all alike.
        let rounds = |ms: f64, noise: [f64; 3]| {
            Some([1.0, 1.5, 2.0].map(|slow| slow * ms).to_vec())
                .map(|all| all.iter().zip(noise).map(|(of, noise)| of * noise).collect())
        };
        let cases = [
            rounds(10.0, [1.0, 1.01, 0.99]),
            rounds(12.0, [1.0, 0.99, 1.01]),
            None,
            rounds(10.05, [0.99, 1.01, 1.0]),
        ];
        assert_eq!(places(&cases, Better::Lower), [Some(1), Some(3), None, Some(1)]);
        assert_eq!(places(&cases, Better::Higher), [Some(2), Some(1), None, Some(2)]);
        // A value that is the same in every round, such as a loss, differs by any amount.
        let losses = [Some(vec![0.5; 3]), Some(vec![0.6; 3]), Some(vec![0.5; 3])];
        assert_eq!(places(&losses, Better::Lower), [Some(1), Some(3), Some(1)]);
        // Two rounds say nothing.
        let two = [Some(vec![1.0, 1.1]), Some(vec![8.0, 9.5])];
        assert_eq!(places(&two, Better::Lower), [Some(1), Some(1)]);
    }
}
