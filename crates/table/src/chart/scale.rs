//! Scales of charts: where ticks lie, and how the numbers of a chart are written.
//!
//! Numbers go in; ticks and their labels come out. Nothing here draws.

use crate::table::grouped;

/// The number of ticks for which an axis of `length` pixels has room, at most eight.
pub(super) fn tick_count(length: f64) -> f64 {
    (length / 75.0).clamp(2.0, 8.0)
}

/// Ticks from zero to `high`, about `count` of them, at round numbers.
pub(super) fn ticks(high: f64, count: f64) -> Vec<f64> {
    if !(high > 0.0 && high.is_finite()) {
        return vec![0.0];
    }
    let power = 10f64.powf((high / count).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let step = steps.into_iter().find(|step| high / step <= count * 1.3).unwrap_or(steps[3]);
    (0..=(high / step * (1.0 + 1e-9)) as u32).map(|at| f64::from(at) * step).collect()
}

/// The labels of ticks. All have as many decimals as the distance of the ticks needs; the last has the unit.
pub(super) fn tick_labels(ticks: &[f64], unit: &str) -> Vec<String> {
    let step = ticks.get(1).copied().unwrap_or(1.0);
    let decimals = if step >= 1.0 { 0 } else { (-step.log10() - 1e-9).ceil() as usize };
    let label = |(at, &tick): (usize, &f64)| {
        let unit = if at + 1 == ticks.len() { format!(" {unit}") } else { String::new() };
        match tick {
            0.0 => format!("0{unit}"),
            _ if decimals > 4 => format!("{tick:.0e}{unit}"),
            _ => format!("{}{unit}", grouped(tick, decimals)),
        }
    };
    ticks.iter().enumerate().map(label).collect()
}

/// A number for a label by itself, with four significant digits at most.
pub fn brief(value: f64) -> String {
    match value.abs() {
        size if value == value.round() && size < 1e6 => grouped(value, 0),
        size if size < 0.01 => format!("{value:.2e}"),
        size => grouped(value, decimals_for(size)),
    }
}

/// How many decimals all numbers of a chart have, given the largest of them.
fn decimals_for(largest: f64) -> usize {
    match largest.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    }
}

/// A function that writes all numbers of a chart with the same number of decimals; without decimals if all
/// numbers are whole.
pub(super) fn like(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> String {
    let is_whole = values.clone().all(|value| value == value.round());
    let largest = values.map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let decimals = if is_whole { 0 } else { decimals_for(largest) };
    let is_tiny = largest < 0.01 && !is_whole;
    move |value| if is_tiny { format!("{value:.2e}") } else { grouped(value, decimals) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(100.0, 5.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(0.0, 5.0), [0.0]);
        assert_eq!(ticks(f64::NAN, 5.0), [0.0]);
        assert!(ticks(0.37, 6.0).len() >= 4);
        assert_eq!(tick_labels(&ticks(2.0, 4.0), "ms"), ["0", "0.5", "1.0", "1.5", "2.0 ms"]);
        assert_eq!(tick_labels(&ticks(0.2, 4.0), "s"), ["0", "0.05", "0.10", "0.15", "0.20 s"]);
        assert_eq!(
            tick_labels(&ticks(4000.0, 4.0), ""),
            ["0", "1,000", "2,000", "3,000", "4,000 "]
        );
        assert_eq!(tick_labels(&ticks(0.0, 4.0), "s"), ["0 s"]);
    }

    #[test]
    fn labels_have_few_digits() {
        let all = [0.0, 12.0, 1234.56, 123.456, 1.234, 0.01234, 1e-5].map(brief);
        assert_eq!(all, ["0", "12", "1,235", "123.5", "1.23", "0.012", "1.00e-5"]);
    }
}
