//! The effect of a change on a figure: a ratio, with the interval in which it lies.
//!
//! In each round every variant runs once, so a round gives one ratio of a variant to the base. The ratios of all rounds have a
//! mean and, by Student's t distribution of their logarithms, a 95 % interval. If the interval contains 1, there is no effect:
//! these rounds cannot distinguish it from noise.

use paceline_table::stats::{STUDENT_975, Summary};
use serde::{Deserialize, Serialize};

use crate::rank::MIN_ROUNDS;

/// The ratio of a variant to the base.
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
    /// The effect, from the base's figure and the variant's in each round; `None` if there are fewer rounds than
    /// [`MIN_ROUNDS`], or if a figure is not above zero.
    pub fn of(base: &[f64], variant: &[f64]) -> Option<Self> {
        let ratios = base.iter().zip(variant).map(|(base, variant)| (variant / base).ln());
        Self::of_logarithms(&ratios.collect::<Vec<f64>>())
    }

    /// The same, from the logarithms of the ratios.
    pub fn of_logarithms(all: &[f64]) -> Option<Self> {
        let rounds = all.len();
        if rounds < MIN_ROUNDS || all.iter().any(|of| !of.is_finite()) {
            return None;
        }
        let of = Summary::of(all.to_vec())?;
        let (mean, half) =
            (of.mean, STUDENT_975[(rounds - 2).min(STUDENT_975.len() - 1)] * of.error());
        Some(Self {
            ratio: mean.exp(),
            low: (mean - half).exp(),
            high: (mean + half).exp(),
            rounds,
        })
    }

    /// Whether the rounds cannot distinguish it from noise.
    pub fn is_none(&self) -> bool {
        (self.low..=self.high).contains(&1.0)
    }

    /// Half the width of the interval, in percent of the ratio.
    pub fn half_width_pct(&self) -> f64 {
        50.0 * (self.high - self.low) / self.ratio
    }

    /// The effect in words.
    pub fn words(&self) -> String {
        let Self { ratio, low, high, .. } = self;
        if self.is_none() {
            format!("none ({low:.2}-{high:.2})")
        } else {
            format!("{ratio:.2}x ({low:.2}-{high:.2})")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_is_a_ratio_with_its_interval() {
        let base = [100.0, 104.0, 98.0, 101.0, 97.0];
        let faster: Vec<f64> = base.iter().map(|of| of * 1.25).collect();
        let effect = Effect::of(&base, &faster).unwrap();
        assert!((effect.ratio - 1.25).abs() < 1e-9 && effect.low > 1.2499 && !effect.is_none());
        // Machine noise that both share does not widen it; noise of their own does.
        let noisy = Effect::of(&base, &[101.0, 97.0, 103.0, 96.0, 104.0]).unwrap();
        assert!(noisy.is_none() && noisy.words().starts_with("none ("), "{noisy:?}");
        // Student: ratios with logarithms 0, 0.1, 0.2 have the mean 0.1 and the error 0.1 / sqrt(3).
        let known = Effect::of_logarithms(&[0.0, 0.1, 0.2]).unwrap();
        let half = 4.303 * 0.1 / 3f64.sqrt();
        assert!((known.high.ln() - 0.1 - half).abs() < 1e-9, "{known:?}");
    }

    #[test]
    fn too_few_rounds_and_figures_of_zero_have_none() {
        assert_eq!(Effect::of(&[1.0, 1.0], &[2.0, 2.0]), None);
        assert_eq!(Effect::of(&[0.0, 1.0, 1.0], &[1.0, 1.0, 1.0]), None);
        assert_eq!(Effect::of(&[1.0, 1.0, 1.0], &[1.0, f64::NAN, 1.0]), None);
    }
}
