//! A logarithmic axis: its range, where its ticks lie and how they are written.

/// The unit of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, written with decimal prefixes: 1 KB is 1000 bytes.
    Bytes,
    /// Microseconds, written as us, ms or s.
    Microseconds,
    /// GB/s, of 1e9 bytes. Ticks are plain numbers; the axis names the unit.
    GigabytesPerSecond,
}

impl Unit {
    /// What follows the axis' label. Ticks of the other units carry theirs.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Unit::Bytes | Unit::Microseconds => "",
            Unit::GigabytesPerSecond => " (GB/s)",
        }
    }

    /// How a tick is written.
    pub(super) fn tick(self, value: f64) -> String {
        let steps: &[(f64, &str)] = match self {
            Unit::Bytes => &[(1.0, " B"), (1e3, " KB"), (1e6, " MB"), (1e9, " GB"), (1e12, " TB")],
            Unit::Microseconds => &[(1.0, " us"), (1e3, " ms"), (1e6, " s")],
            Unit::GigabytesPerSecond => &[(1.0, "")],
        };
        // A tick is a digit times a power of ten, up to rounding, which must not decide the prefix.
        let reached = steps.iter().rev().find(|(size, _)| value >= size * 0.999);
        let (size, name) = reached.unwrap_or(&steps[0]);
        format!("{}{name}", rounded(value / size))
    }
}

/// The value with three digits, so that it is written without the noise of its last bits.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

/// The range and ticks of an axis.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    /// Ticks with a label.
    pub major: Vec<f64>,
    /// Ticks with a faint line only.
    pub minor: Vec<f64>,
}

impl Scale {
    /// An axis that holds all of `values`, which are positive.
    pub(super) fn new(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        // A twentieth of the range on each side, and enough for at least one tick.
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
        Self { low, high, major, minor }
    }

    /// Where a value lies, from 0 at the low end to 1 at the high end.
    pub(super) fn position(&self, value: f64) -> f64 {
        (value / self.low).ln() / (self.high / self.low).ln()
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
        let wide = Scale::new([4096.0, 1e9].into_iter());
        assert_eq!(
            wide.major.iter().map(|tick| tick.log10()).sum::<f64>(),
            4. + 5. + 6. + 7. + 8. + 9.
        );
        let narrow = Scale::new([1.1, 7.0].into_iter());
        assert_eq!(narrow.major, [1.0, 2.0, 5.0]);
        assert_eq!(narrow.minor, [0.9, 3.0, 4.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn a_single_value_lies_in_the_middle_of_its_axis() {
        let scale = Scale::new([30.0].into_iter());
        assert!((scale.position(30.0) - 0.5).abs() < 1e-9);
        assert!(!scale.major.is_empty());
        assert!(scale.major.iter().all(|&tick| (0.0..=1.0).contains(&scale.position(tick))));
    }
}
