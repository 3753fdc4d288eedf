//! An axis: its range, where its ticks lie and how they are labeled.
//!
//! Values go in. Positions along the axis, ticks and their labels come out. Nothing here draws.

use super::chart::Spacing;

/// The unit of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, written with decimal prefixes: 1 KB is 1000 bytes.
    Bytes,
    /// Microseconds, written as us, ms or s.
    Microseconds,
    /// GB/s, of 1e9 bytes. Ticks are plain numbers; the axis names the unit.
    GigabytesPerSecond,
    /// Counts and ratios, written as plain numbers.
    Count,
}

impl Unit {
    /// The text after the label of the axis. It is empty for units that the ticks name or that have no name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Unit::Bytes | Unit::Microseconds | Unit::Count => "",
            Unit::GigabytesPerSecond => " (GB/s)",
        }
    }

    /// The label of a tick.
    pub(super) fn tick(self, value: f64) -> String {
        if value == 0.0 {
            // Zero is the same in every unit.
            return "0".to_owned();
        }
        let steps: &[(f64, &str)] = match self {
            Unit::Bytes => &[(1.0, " B"), (1e3, " KB"), (1e6, " MB"), (1e9, " GB"), (1e12, " TB")],
            Unit::Microseconds => &[(1.0, " us"), (1e3, " ms"), (1e6, " s")],
            Unit::GigabytesPerSecond | Unit::Count => &[(1.0, "")],
        };
        // A tick is a digit times a power of ten, up to a rounding error, which must not decide the prefix.
        let reached = steps.iter().rev().find(|(size, _)| value >= size * 0.999);
        let (size, name) = reached.unwrap_or(&steps[0]);
        format!("{}{name}", rounded(value / size))
    }
}

/// The value rounded to three digits, so that its label does not show rounding errors.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

/// The range and ticks of an axis.
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
    /// An axis that covers all `values`. They must be positive; on a linear axis they may be zero.
    pub(super) fn new(spacing: Spacing, values: impl Iterator<Item = f64>) -> Self {
        let (mut low, mut high, mut are_whole) = (f64::INFINITY, 0.0_f64, true);
        for value in values {
            (low, high) = (low.min(value), high.max(value));
            are_whole &= value.fract() == 0.0;
        }
        match spacing {
            Spacing::Logarithmic => Self::logarithmic(low, high),
            Spacing::Linear => Self::linear(high, are_whole),
        }
    }

    /// A linear axis. It begins at zero, so that lengths are proportional to values. If all values are whole
    /// numbers, so are the ticks: half a rank means nothing.
    fn linear(high: f64, are_whole: bool) -> Self {
        let high = if high > 0.0 { 1.06 * high } else { 1.0 };
        let power = 10f64.powf((high / 5.0).log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
        // The smallest step with at most eight ticks above zero.
        let step = steps.into_iter().find(|step| high / step <= 8.0).unwrap_or(10.0 * power);
        let step = if are_whole { step.max(1.0) } else { step };
        let major = (0..=(high / step) as u32).map(|at| f64::from(at) * step).collect();
        Self { spacing: Spacing::Linear, low: 0.0, high, major, minor: Vec::new() }
    }

    fn logarithmic(low: f64, high: f64) -> Self {
        // A margin of a twentieth of the range on each side. The axis spans at least a factor of ten, so that
        // it has a tick.
        let room = (high / low).powf(0.05).max(1.25);
        let (mut low, mut high) = (low / room, high * room);
        if high / low < 10.0 {
            let widen = (10.0 / (high / low)).sqrt();
            (low, high) = (low / widen, high * widen);
        }
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let inside = |value: &f64| (low..=high).contains(value);
        let all = |digits: &'static [f64]| -> Vec<f64> {
            let each = decades.clone().flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
            each.filter(inside).collect()
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
    pub(super) fn position(&self, value: f64) -> f64 {
        match self.spacing {
            Spacing::Logarithmic => (value / self.low).ln() / (self.high / self.low).ln(),
            Spacing::Linear => (value - self.low) / (self.high - self.low),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_written_with_decimal_prefixes() {
        let bytes = [4.0, 4e3, 1e6, 1e8, 1e9, 2e12].map(|value| Unit::Bytes.tick(value));
        assert_eq!(bytes, ["4 B", "4 KB", "1 MB", "100 MB", "1 GB", "2 TB"]);
        let times = [0.5, 10.0, 1e3, 1e5, 5e6].map(|value| Unit::Microseconds.tick(value));
        assert_eq!(times, ["0.5 us", "10 us", "1 ms", "100 ms", "5 s"]);
        let speeds = [3.0 * 0.1, 10.0].map(|value| Unit::GigabytesPerSecond.tick(value));
        assert_eq!(speeds, ["0.3", "10"]);
        assert_eq!(Unit::Bytes.tick(999.999_999_999_9), "1 KB", "rounding decides no prefix");
    }

    #[test]
    fn wide_ranges_have_ticks_at_powers_of_ten_and_narrow_ones_between() {
        let wide = Scale::new(Spacing::Logarithmic, [4096.0, 1e9].into_iter());
        assert_eq!(
            wide.major.iter().map(|tick| tick.log10()).sum::<f64>(),
            4. + 5. + 6. + 7. + 8. + 9.
        );
        let narrow = Scale::new(Spacing::Logarithmic, [1.1, 7.0].into_iter());
        assert_eq!(narrow.major, [1.0, 2.0, 5.0]);
        assert_eq!(narrow.minor, [0.9, 3.0, 4.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_has_round_ticks() {
        let ranks = Scale::new(Spacing::Linear, [1.0, 2.0, 4.0].into_iter());
        assert_eq!(ranks.major, [0.0, 1.0, 2.0, 3.0, 4.0]);
        let few = Scale::new(Spacing::Linear, [1.0, 2.0].into_iter());
        assert_eq!(few.major, [0.0, 1.0, 2.0], "no half rank");
        assert_eq!(ranks.position(0.0), 0.0);
        assert!((ranks.position(4.0) - 1.0 / 1.06).abs() < 1e-9);
        let times = Scale::new(Spacing::Linear, [65_000.0].into_iter());
        assert_eq!(times.major.last(), Some(&60_000.0));
        assert_eq!(Unit::Microseconds.tick(times.major[0]), "0");
        let nothing = Scale::new(Spacing::Linear, [0.0].into_iter());
        assert_eq!(nothing.position(0.5), 0.5);
    }

    #[test]
    fn a_single_value_lies_in_the_middle_of_its_axis() {
        let scale = Scale::new(Spacing::Logarithmic, [30.0].into_iter());
        assert!((scale.position(30.0) - 0.5).abs() < 1e-9);
        assert!(!scale.major.is_empty());
        assert!(scale.major.iter().all(|&tick| (0.0..=1.0).contains(&scale.position(tick))));
    }
}
