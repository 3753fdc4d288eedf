//! Fits the formula of the overhead of buckets to the measurements.
//!
//! With `n` buckets, a fixed cost `o` per operation, gradients of `s` bytes and an all-reduce of `w`
//! bytes per second, the exposed time is `n o + s / (n w)`: every bucket has the cost of its operation,
//! and the last one, of `s / n` bytes, starts too late to be hidden. The formula is linear in `o` and `1
//! / w`. The bucket size for which it is smallest is `sqrt(s o w)`.

use serde::Serialize;

use super::{MB, Row};

/// A fit, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// The formula holds.
    Found {
        /// `o`: the fixed cost of an operation, in milliseconds.
        op_ms: f64,
        /// `w`: bandwidth of the all-reduce, in GB/s of 1e9 bytes.
        gb_per_s: f64,
        /// The fraction of the variance that the formula explains.
        r_squared: f64,
        /// The size with the least overhead, in MB of 2^20 bytes.
        best_mb: f64,
    },
    /// The reason why there is no fit.
    Refused(String),
}

/// The fewest different numbers of buckets for a fit. Two would always fit, because there are two
/// unknowns.
const MIN_POINTS: usize = 3;
/// If the formula explains a smaller fraction of the variance than this, there is no fit.
const MIN_R_SQUARED: f64 = 0.5;

impl Fit {
    /// Fits the rows with buckets, for gradients of `gradient_bytes` bytes.
    pub fn of(rows: &[Row], gradient_bytes: u64) -> Self {
        let with_buckets = rows.iter().filter(|row| row.bucket_mb.is_some());
        let points: Vec<(f64, f64)> =
            with_buckets.filter_map(|row| Some((row.num_buckets?, row.exposed_ms))).collect();
        let mut counts: Vec<f64> = points.iter().map(|(count, _)| *count).collect();
        counts.sort_by(f64::total_cmp);
        counts.dedup();
        if counts.len() < MIN_POINTS {
            return Fit::Refused(format!(
                "no fit: it needs at least {MIN_POINTS} different numbers of buckets, and there are {}; \
                 pass smaller --sizes, or a larger model",
                counts.len()
            ));
        }
        // Normal equations of y = o n + b / n, with b = s / w in milliseconds.
        let sum = |of: fn(f64, f64) -> f64| points.iter().map(|&(n, y)| of(n, y)).sum::<f64>();
        let (nn, ii, both) = (sum(|n, _| n * n), sum(|n, _| 1.0 / (n * n)), points.len() as f64);
        let (ny, iy) = (sum(|n, y| n * y), sum(|n, y| y / n));
        let determinant = nn * ii - both * both;
        let op_ms = (ny * ii - iy * both) / determinant;
        let all_ms = (iy * nn - ny * both) / determinant;
        if op_ms <= 0.0 || all_ms <= 0.0 {
            let why = if op_ms <= 0.0 {
                "exposed communication does not grow with the number of buckets"
            } else {
                "exposed communication does not shrink with the last bucket"
            };
            return Fit::Refused(format!(
                "no fit: the formula does not hold here, since {why} (o = {op_ms:.4} ms, s / w = \
                 {all_ms:.4} ms)"
            ));
        }
        let mean = points.iter().map(|(_, y)| y).sum::<f64>() / points.len() as f64;
        let total: f64 = points.iter().map(|(_, y)| (y - mean).powi(2)).sum();
        let left: f64 =
            points.iter().map(|(n, y)| (y - overhead_ms(op_ms, all_ms, *n)).powi(2)).sum();
        let r_squared = 1.0 - left / total;
        if r_squared.is_nan() || r_squared < MIN_R_SQUARED {
            return Fit::Refused(format!(
                "no fit: the formula explains {:.0} % of the differences only; the rest is noise, or more \
                 communication than the backward pass can hide",
                100.0 * r_squared.max(0.0)
            ));
        }
        let bytes_per_ms = gradient_bytes as f64 / all_ms;
        Fit::Found {
            op_ms,
            gb_per_s: bytes_per_ms / 1e6,
            r_squared,
            best_mb: (gradient_bytes as f64 * op_ms * bytes_per_ms).sqrt() / MB,
        }
    }
}

/// The exposed time of `n` buckets in milliseconds, if an operation costs `op_ms` and all bytes take
/// `all_ms`.
pub fn overhead_ms(op_ms: f64, all_ms: f64, n: f64) -> f64 {
    n * op_ms + all_ms / n
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;

    #[test]
    fn the_formula_is_found_again() {
        // 64 MB in 32 ms, 0.5 ms per operation: 8 buckets are best, of 8 MB.
        let bytes = (64.0 * MB) as u64;
        let fit = Fit::of(&rows(&[1.0, 2.0, 4.0, 16.0, 64.0], 0.5, 32.0), bytes);
        let Fit::Found { op_ms, gb_per_s, r_squared, best_mb } = fit else { panic!("{fit:?}") };
        assert!((op_ms - 0.5).abs() < 1e-9, "{op_ms}");
        assert!((gb_per_s - 64.0 * MB / 32e6).abs() < 1e-9, "{gb_per_s}");
        assert!((best_mb - 8.0).abs() < 1e-9, "{best_mb}");
        assert!((r_squared - 1.0).abs() < 1e-9);
    }

    #[test]
    fn what_the_formula_does_not_explain_is_refused_in_words() {
        let said = |rows: &[Row]| match Fit::of(rows, 1 << 26) {
            Fit::Refused(why) => why,
            found => panic!("{found:?}"),
        };
        let few = said(&rows(&[1.0, 1.0, 2.0], 0.5, 32.0));
        assert!(few.contains("at least 3 different numbers of buckets, and there are 2"), "{few}");
        let cheap = said(&rows(&[1.0, 2.0, 4.0, 8.0], -0.1, 32.0));
        assert!(cheap.contains("does not grow with the number of buckets"), "{cheap}");
        let flat = said(&rows(&[1.0, 2.0, 4.0, 8.0], 0.5, -0.2));
        assert!(flat.contains("does not shrink with the last bucket"), "{flat}");
        let mut noisy = rows(&[1.0, 2.0, 4.0, 8.0, 16.0], 0.5, 8.0);
        for (at, exposed) in [9.0, 1.0, 11.0, 2.0, 9.0].into_iter().enumerate() {
            noisy[at].exposed_ms = exposed;
        }
        let noisy = said(&noisy);
        assert!(noisy.contains("explains") && noisy.contains("noise"), "{noisy}");
        let mut uncounted = rows(&[1.0, 2.0, 4.0, 8.0], 0.5, 32.0);
        uncounted.iter_mut().for_each(|row| row.num_buckets = None);
        assert!(said(&uncounted).contains("there are 0"));
    }
}
