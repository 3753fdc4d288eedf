//! The median, quantiles and a summary of a set of numbers, each with one definition.
//!
//! Without numbers, all return `None`. [`median`] and [`quantile`] interpolate linearly between neighbors; [`nearest_rank`] is a
//! value that occurred.

use std::cmp::Ordering;

/// A type of numbers that [`median`] takes.
pub trait Number: Copy {
    /// A total order, in which `NaN` has a place too.
    fn order(&self, other: &Self) -> Ordering;
    /// The midpoint of two numbers.
    fn middle(self, other: Self) -> Self;
}

impl Number for f64 {
    fn order(&self, other: &Self) -> Ordering {
        self.total_cmp(other)
    }

    fn middle(self, other: Self) -> Self {
        self.midpoint(other)
    }
}

impl Number for i64 {
    fn order(&self, other: &Self) -> Ordering {
        self.cmp(other)
    }

    fn middle(self, other: Self) -> Self {
        self.midpoint(other)
    }
}

/// The middle number of an odd count of numbers, or the midpoint of the two middle numbers of an even count.
pub fn median<T: Number>(values: impl IntoIterator<Item = T>) -> Option<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable_by(T::order);
    let above = *values.get(values.len() / 2)?;
    Some(values[(values.len() - 1) / 2].middle(above))
}

/// The quantile `part` (between 0 and 1) of `sorted`, which must be in ascending order, interpolated linearly as by default in
/// pandas and numpy.
pub fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let place = part * sorted.len().checked_sub(1)? as f64;
    let below = place.floor() as usize;
    let above = sorted.get(below + 1).unwrap_or(&sorted[below]);
    Some(sorted[below] + (above - sorted[below]) * (place - below as f64))
}

/// The quantile `part` (between 0 and 1) by nearest rank: the smallest of `values` such that at least this fraction of them is
/// not larger.
pub fn nearest_rank<T: Copy + Ord>(values: &[T], part: f64) -> Option<T> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The `a` and `b` of the weighted least-squares fit `y = a u + b v`. Each point is `([u, v], y, weight)`. `None` if the points
/// do not determine both.
pub fn two_term_fit(points: impl IntoIterator<Item = ([f64; 2], f64, f64)>) -> Option<[f64; 2]> {
    let [mut uu, mut uv, mut vv, mut uy, mut vy] = [0.0; 5];
    for ([u, v], y, weight) in points {
        uu += weight * u * u;
        uv += weight * u * v;
        vv += weight * v * v;
        uy += weight * u * y;
        vy += weight * v * y;
    }
    let determinant = uu * vv - uv * uv;
    let fit = [(uy * vv - vy * uv) / determinant, (vy * uu - uy * uv) / determinant];
    fit.iter().all(|term| term.is_finite()).then_some(fit)
}

/// The 97.5 % points of Student's t distribution with 1 to 30 degrees of freedom: 95 % of means of normal numbers are within
/// this many standard errors.
pub const STUDENT_975: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// The ratio of two figures and its 95 % interval, by Student's t distribution of the logarithms of their ratios in pairs:
/// geometric mean, low end, high end. Noise that a pair shares cancels. `None` for fewer than two, or if a logarithm is not
/// finite.
pub fn ratio_of_logarithms(all: &[f64]) -> Option<[f64; 3]> {
    if all.len() < 2 || all.iter().any(|of| !of.is_finite()) {
        return None;
    }
    let point = STUDENT_975[(all.len() - 2).min(STUDENT_975.len() - 1)];
    let of = Summary::of(all.to_vec())?;
    let half = point * of.error();
    Some([of.mean, of.mean - half, of.mean + half].map(f64::exp))
}

/// The 90 % point with 7 degrees of freedom: eight of ten values are within.
pub const STUDENT_90_OF_7: f64 = 1.415;

/// Below these percentages, cores are not called busy, and measurements are not said to vary.
pub const BUSY_PCT: f64 = 5.0;
const VARY_PCT: f64 = 10.0;

/// Says that a measurement should be repeated, if its threads had no core for `waited_pct` percent of their time, or if two such
/// measurements are `apart_pct` percent apart.
pub fn noise_words(waited_pct: Option<f64>, apart_pct: Option<f64>) -> Option<String> {
    let apart = apart_pct.map_or(String::new(), |pct| format!(", or expect at least +-{pct:.0} %"));
    match (waited_pct, apart_pct) {
        (Some(pct), _) if pct >= BUSY_PCT => Some(format!(
            "Measured beside other work: threads had no core for {pct:.0} % of their time. Repeat{apart}"
        )),
        (_, Some(pct)) if pct >= VARY_PCT => Some(format!("The times vary: repeat{apart}")),
        _ => None,
    }
}

/// Summary statistics of a set of numbers, as pandas' `describe` gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// How many numbers.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// The standard deviation, with the divisor `count - 1`; 0 for fewer than two numbers.
    pub std: f64,
    /// The smallest number.
    pub min: f64,
    /// The first quartile. [`quantile`] defines all quantiles here, the median included.
    pub p25: f64,
    /// The median.
    pub p50: f64,
    /// The third quartile.
    pub p75: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The largest number.
    pub max: f64,
}

impl Summary {
    /// The summary of numbers in any order; `None` without numbers.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std = if values.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        let [p25, p50, p75, p95] = [0.25, 0.5, 0.75, 0.95].map(|part| quantile(&values, part));
        let (p25, p50, p75, p95) = (p25?, p50?, p75?, p95?);
        Some(Self { count: values.len() as u64, mean, std, min, p25, p50, p75, p95, max })
    }

    /// The standard error of the mean.
    pub fn error(&self) -> f64 {
        self.std / (self.count as f64).sqrt()
    }
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

    #[test]
    fn a_paired_ratio_has_the_interval_of_its_logarithms() {
        // Ratios with logarithms 0, 0.1, 0.2 have the mean 0.1 and the error 0.1 / sqrt(3).
        let of = ratio_of_logarithms(&[0.0, 0.1, 0.2]).unwrap();
        let half = 4.303 * 0.1 / 3f64.sqrt();
        for (found, expected) in of.into_iter().zip([0.1, 0.1 - half, 0.1 + half]) {
            assert!((found.ln() - expected).abs() < 1e-9, "{of:?}");
        }
        assert_eq!(ratio_of_logarithms(&[1.0]), None);
        assert_eq!(ratio_of_logarithms(&[1.0, f64::NEG_INFINITY]), None);
        assert_eq!(ratio_of_logarithms(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn two_terms_are_found_again_and_weights_count() {
        let line = |x: f64| ([1.0, x], 3.0 + 2.0 * x, 1.0);
        let [a, b] = two_term_fit([1.0, 4.0, 9.0].map(line)).unwrap();
        assert!((a - 3.0).abs() < 1e-12 && (b - 2.0).abs() < 1e-12, "{a} {b}");
        // A point without weight changes nothing; points of one x determine no line.
        let off = ([1.0, 5.0], 100.0, 0.0);
        let [a, b] = two_term_fit([line(1.0), line(4.0), off]).unwrap();
        assert!((a - 3.0).abs() < 1e-12 && (b - 2.0).abs() < 1e-12, "{a} {b}");
        assert_eq!(two_term_fit([line(4.0), line(4.0)]), None);
    }

    #[test]
    fn a_median_lies_between_the_two_middle_numbers() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0]), Some(2.5));
        assert_eq!(median([f64::INFINITY, 1.0, f64::NAN]), Some(f64::INFINITY));
        assert_eq!(median([i64::MAX, i64::MAX - 2]), Some(i64::MAX - 1));
        assert_eq!(median::<f64>([]), None);
    }

    #[test]
    fn busy_cores_and_varying_times_are_said() {
        assert_eq!(noise_words(Some(4.9), Some(9.9)), None);
        let busy = noise_words(Some(37.0), Some(9.0)).unwrap();
        assert!(busy.contains("37 %") && busy.ends_with("Repeat, or expect at least +-9 %"));
        assert!(noise_words(None, Some(12.0)).unwrap().starts_with("The times vary: repeat"));
    }

    #[test]
    fn a_nearest_rank_is_a_value_that_occurred() {
        assert_eq!(nearest_rank(&[5, 1, 9], 0.5), Some(5));
        assert_eq!(nearest_rank(&[4, 1, 2, 3], 0.5), Some(2));
        assert_eq!(nearest_rank(&(1..=200).collect::<Vec<_>>(), 0.99), Some(198));
        assert_eq!(nearest_rank::<u64>(&[], 0.5), None);
    }
}
