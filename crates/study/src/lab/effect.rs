//! The effect of a change on a figure: a ratio, with the interval in which it lies.
//!
//! In each round every variant runs once, so a round gives one ratio of a variant to the base. The ratios of all rounds have a
//! mean and, by Student's t distribution of their logarithms, a 95 % interval. If the interval contains 1, there is no effect:
//! these rounds cannot distinguish it from noise.

use paceline_table::stats::{Ratio, paired_ratio, ratio_of_logarithms};
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
        Self::new(paired_ratio(base, variant), base.len().min(variant.len()))
    }

    /// The same, from the logarithms of the ratios.
    pub fn of_logarithms(all: &[f64]) -> Option<Self> {
        Self::new(ratio_of_logarithms(all.to_vec()), all.len())
    }

    fn new(of: Option<Ratio>, rounds: usize) -> Option<Self> {
        let Ratio { ratio, low, high } = of.filter(|_| rounds >= MIN_ROUNDS)?;
        Some(Self { ratio, low, high, rounds })
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
    }

    #[test]
    fn too_few_rounds_and_figures_of_zero_have_none() {
        assert_eq!(Effect::of(&[1.0, 1.0], &[2.0, 2.0]), None);
        assert_eq!(Effect::of(&[0.0, 1.0, 1.0], &[1.0, 1.0, 1.0]), None);
    }
}
