//! An axis: its range, where its ticks lie, and how they are labeled.

use crate::table::grouped;

/// How values are spaced along an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spacing {
    /// Equal lengths are equal differences, from zero on.
    #[default]
    Linear,
    /// Equal lengths are equal factors, of positive values.
    Logarithmic,
}

impl Spacing {
    pub(super) fn shows(self, value: f64) -> bool {
        (value > 0.0 || self == Spacing::Linear && value == 0.0) && value.is_finite()
    }
}

/// An axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// The quantity that it shows, without the unit. May be empty.
    pub label: String,
    /// The unit of the values. Ticks in `B` and `us` get decimal prefixes: 1 KB is 1000 bytes.
    pub unit: &'static str,
    /// How its values are spaced.
    pub spacing: Spacing,
}

impl Axis {
    /// An axis on which equal lengths are equal differences.
    pub fn linear(label: impl Into<String>, unit: &'static str) -> Self {
        Self { label: label.into(), unit, spacing: Spacing::Linear }
    }

    /// An axis on which equal lengths are equal factors.
    pub fn logarithmic(label: impl Into<String>, unit: &'static str) -> Self {
        Self { label: label.into(), unit, spacing: Spacing::Logarithmic }
    }
}

/// The most ticks of a linear axis after the one at zero.
const MAX_TICKS: u32 = 20;

/// The range and the ticks of an axis.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    spacing: Spacing,
    low: f64,
    high: f64,
    /// Ticks with a label.
    pub major: Vec<f64>,
    /// Ticks with a faint line only.
    pub minor: Vec<f64>,
}

impl Scale {
    /// An axis of `length` pixels that covers all `values`. They must be positive; on a linear axis they may be zero.
    pub fn new(spacing: Spacing, values: impl Iterator<Item = f64> + Clone, length: f64) -> Self {
        let high = values.clone().fold(0.0, f64::max);
        match spacing {
            Spacing::Logarithmic => Self::logarithmic(values.fold(high, f64::min), high),
            Spacing::Linear => {
                // Below this, values are too inexact for a step between ticks.
                let high = if high < f64::MIN_POSITIVE { 0.0 } else { high };
                let step = step(high, (length / 75.0).clamp(2.0, 8.0));
                // Whole values get whole ticks: half a rank means nothing.
                let are_whole = values.clone().all(|value| value.fract() == 0.0);
                let step = if are_whole { step.max(1.0) } else { step };
                let count = ((high / step * (1.0 + 1e-9)) as u32).min(MAX_TICKS);
                let major = (0..=count).map(|at| f64::from(at) * step).collect();
                Self { spacing, low: 0.0, high, major, minor: Vec::new() }
            }
        }
    }

    fn logarithmic(low: f64, high: f64) -> Self {
        // A margin of a twentieth of the range on each side, and at least a factor of ten, so that there is a tick.
        let room = (high / low).powf(0.05).max(1.25);
        let (mut low, mut high) = (low / room, high * room);
        if high / low < 10.0 {
            let widen = (10.0 / (high / low)).sqrt();
            (low, high) = (low / widen, high * widen);
        }
        // Zero and infinity have endless decades between them.
        (low, high) = (low.max(f64::MIN_POSITIVE), high.min(f64::MAX));
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let all = |digits: &'static [f64]| -> Vec<f64> {
            let each = decades.clone().flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
            each.filter(|value| (low..=high).contains(value)).collect()
        };
        let major = match all(&[1.0]) {
            powers if powers.len() >= 3 => powers,
            _ => all(&[1.0, 2.0, 5.0]),
        };
        let mut minor = all(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        minor.retain(|tick| !major.contains(tick));
        Self { spacing: Spacing::Logarithmic, low, high, major, minor }
    }

    /// Where a value lies, from 0 at the low end to 1 at the high end.
    pub fn position(&self, value: f64) -> f64 {
        match self.spacing {
            Spacing::Logarithmic => (value / self.low).ln() / (self.high / self.low).ln(),
            Spacing::Linear if self.high > 0.0 => value / self.high,
            Spacing::Linear => 0.0,
        }
    }

    /// The labels of the major ticks. The last one has the unit, or each has one with its prefix.
    pub fn labels(&self, unit: &str) -> Vec<String> {
        let prefixed: &[(f64, &str)] = match unit {
            "B" => &[(1.0, "B"), (1e3, "KB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")],
            "us" => &[(1.0, "us"), (1e3, "ms"), (1e6, "s")],
            _ => &[],
        };
        let last = self.major.len().saturating_sub(1);
        let distance = self.major.get(1).map_or(1.0, |next| next - self.major[0]);
        let decimals = (-distance.log10() - 1e-9).ceil().max(0.0) as usize;
        let number = |tick: f64| match self.spacing {
            Spacing::Linear if decimals > 4 => format!("{tick:.0e}"),
            Spacing::Linear => grouped(tick, decimals),
            Spacing::Logarithmic => rounded(tick),
        };
        let label = |(at, &tick): (usize, &f64)| {
            // Rounding errors of a tick must not decide the prefix.
            let reached = prefixed.iter().rev().find(|(size, _)| tick >= size * 0.999);
            match reached.or(prefixed.first()) {
                // Zero is the same in every unit.
                _ if tick == 0.0 && (at < last || !prefixed.is_empty()) => "0".to_owned(),
                Some((size, name)) => format!("{} {name}", rounded(tick / size)),
                None if at == last => format!("{} {unit}", number(tick)).trim_end().to_owned(),
                None => number(tick),
            }
        };
        self.major.iter().enumerate().map(label).collect()
    }
}

/// A number with at most three significant digits, without rounding errors.
fn rounded(value: f64) -> String {
    format!("{value:.2e}").parse::<f64>().unwrap_or(value).to_string()
}

/// The distance of about `count` round ticks from zero to `high`.
fn step(high: f64, count: f64) -> f64 {
    if high <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((high / count).log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|digit| digit * power);
    steps.into_iter().find(|step| high / step <= count * 1.3).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(values: &[f64], length: f64) -> Scale {
        Scale::new(Spacing::Linear, values.iter().copied(), length)
    }

    fn logarithmic(values: &[f64]) -> Scale {
        Scale::new(Spacing::Logarithmic, values.iter().copied(), 500.0)
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_has_round_ticks() {
        assert_eq!(linear(&[99.5, 100.0], 375.0).major, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(linear(&[1.0, 2.0], 375.0).major, [0.0, 1.0, 2.0], "no half rank");
        assert!(linear(&[0.37], 450.0).major.len() >= 4);
        let labels = |high: f64, unit| linear(&[0.9 * high, high], 300.0).labels(unit);
        assert_eq!(labels(2.0, "ms"), ["0", "0.5", "1.0", "1.5", "2.0 ms"]);
        assert_eq!(labels(0.2, "s"), ["0", "0.05", "0.10", "0.15", "0.20 s"]);
        assert_eq!(labels(4000.0, ""), ["0", "1,000", "2,000", "3,000", "4,000"]);
        assert_eq!(labels(2500.5, "us"), ["0", "500 us", "1 ms", "1.5 ms", "2 ms", "2.5 ms"]);
        assert_eq!(labels(0.0, "s"), ["0 s"]);
        assert_eq!(linear(&[0.0, 4.0], 300.0).position(1.0), 0.25);
    }

    #[test]
    fn extreme_values_make_few_ticks() {
        for value in [5e-324, 1e-310] {
            let scale = linear(&[value], 400.0);
            assert_eq!((scale.labels("s"), scale.position(value)), (vec!["0 s".to_owned()], 0.0));
        }
        for values in [[5e-324, 1e-310], [1e300, f64::MAX], [f64::MIN_POSITIVE, f64::MAX]] {
            assert!(logarithmic(&values).labels("s").len() <= 620, "no more than there are powers");
        }
        for value in [f64::MIN_POSITIVE, 3e-308, 1e-300, 1e300, f64::MAX] {
            let ticks = linear(&[value], 400.0).labels("s").len();
            assert!((2..=20).contains(&ticks), "{value}: {ticks}");
        }
    }

    #[test]
    fn a_logarithmic_axis_has_powers_of_ten_or_finer_ticks() {
        let wide = logarithmic(&[4096.0, 1e9]);
        assert_eq!(wide.labels("B"), ["10 KB", "100 KB", "1 MB", "10 MB", "100 MB", "1 GB"]);
        let narrow = logarithmic(&[1.1, 7.0]);
        assert_eq!(narrow.major, [1.0, 2.0, 5.0]);
        assert_eq!(narrow.minor, [0.9, 3.0, 4.0, 6.0, 7.0, 8.0]);
        assert_eq!(logarithmic(&[0.1, 50.0]).labels("GB/s"), ["0.1", "1", "10 GB/s"]);
        let single = logarithmic(&[30.0]);
        assert!((single.position(30.0) - 0.5).abs() < 1e-9 && !single.major.is_empty());
        assert!(single.major.iter().all(|&tick| (0.0..=1.0).contains(&single.position(tick))));
        let error = Scale { major: vec![999.999_999_999_9], ..single };
        assert_eq!(error.labels("B"), ["1 KB"], "rounding decides no prefix");
    }
}
