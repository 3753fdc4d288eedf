//! Count, mean, deviation and quantiles of a set of numbers.

/// A set of numbers in a few words, as `describe` of pandas puts it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// How many.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Deviation from it, divided by `count - 1`; 0 for less than two.
    pub std: f64,
    /// The smallest.
    pub min: f64,
    /// First quartile; quantiles lie on straight lines between neighbours.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// Third quartile.
    pub p75: f64,
    /// 95th percentile.
    pub p95: f64,
    /// The largest.
    pub max: f64,
}

impl Summary {
    /// Of numbers in any order; `None` if there are none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std = if values.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        let at = |q| quantile(&values, q);
        let (p25, p50, p75, p95) = (at(0.25), at(0.5), at(0.75), at(0.95));
        Some(Self { count: values.len() as u64, mean, std, min, p25, p50, p75, p95, max })
    }
}

/// The quantile of sorted numbers, on a straight line between the two it falls between, which is
/// pandas' and numpy's default.
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let below = place.floor() as usize;
    let above = sorted.get(below + 1).unwrap_or(&sorted[below]);
    sorted[below] + (above - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_deviation_are_those_of_pandas() {
        // pandas: Series([4, 1, 3, 10]).describe() and .quantile(.95)
        let all = Summary::of(vec![4.0, 1.0, 3.0, 10.0]).unwrap();
        assert_eq!((all.count, all.mean, all.min, all.max), (4, 4.5, 1.0, 10.0));
        assert_eq!((all.p25, all.p50, all.p75), (2.5, 3.5, 5.5));
        assert!((all.std - 3.872983346207417).abs() < 1e-12 && (all.p95 - 9.1).abs() < 1e-12);
        assert_eq!(Summary::of(vec![7.0]).unwrap().std, 0.0);
        assert_eq!(Summary::of(vec![]), None);
    }
}
