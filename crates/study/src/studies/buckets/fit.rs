//! Fits the formula for the cost of buckets to the measurements.
//!
//! The formula of [`BucketCost`] is linear in `o` and `1 / w`.

use paceline_table::stats::two_term_fit;
use serde::Serialize;

use super::Row;
use crate::studies::bucket_cost::{BucketCost, MIB};

/// A fit, or why it is missing.
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
        /// The size with the least cost of communication, in MiB.
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
            with_buckets.filter_map(|row| Some((row.num_buckets?, row.times.exposed_ms))).collect();
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
        // y = o n + (s / w) / n, with s / w in milliseconds.
        let terms = points.iter().map(|&(n, y)| ([n, 1.0 / n], y, 1.0));
        let Some([op_ms, all_ms]) = two_term_fit(terms) else {
            return Fit::Refused("no fit: the numbers of buckets are too alike".to_owned());
        };
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
        let bytes = gradient_bytes as f64;
        let cost = BucketCost { op_ms, ms_per_byte: all_ms / bytes };
        let mean = points.iter().map(|(_, y)| y).sum::<f64>() / points.len() as f64;
        let total: f64 = points.iter().map(|(_, y)| (y - mean).powi(2)).sum();
        let left: f64 = points.iter().map(|(n, y)| (y - cost.cost_ms(bytes, *n)).powi(2)).sum();
        let r_squared = 1.0 - left / total;
        if r_squared.is_nan() || r_squared < MIN_R_SQUARED {
            return Fit::Refused(format!(
                "no fit: the formula explains {:.0} % of the differences only; the rest is noise, or more \
                 communication than the backward pass can hide",
                100.0 * r_squared.max(0.0)
            ));
        }
        Fit::Found {
            op_ms,
            gb_per_s: cost.gb_per_s(),
            r_squared,
            best_mb: cost.best_bytes(bytes) / MIB,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;

    #[test]
    fn the_formula_is_found_again() {
        // 64 MiB in 32 ms, 0.5 ms per operation: 8 buckets are best, of 8 MiB.
        let bytes = (64.0 * MIB) as u64;
        let fit = Fit::of(&rows(&[1.0, 2.0, 4.0, 16.0, 64.0], 0.5, 32.0), bytes);
        let Fit::Found { op_ms, gb_per_s, r_squared, best_mb } = fit else { panic!("{fit:?}") };
        assert!((op_ms - 0.5).abs() < 1e-9, "{op_ms}");
        assert!((gb_per_s - 64.0 * MIB / 32e6).abs() < 1e-9, "{gb_per_s}");
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
            noisy[at].times.exposed_ms = exposed;
        }
        let noisy = said(&noisy);
        assert!(noisy.contains("explains") && noisy.contains("noise"), "{noisy}");
        let mut uncounted = rows(&[1.0, 2.0, 4.0, 8.0], 0.5, 32.0);
        uncounted.iter_mut().for_each(|row| row.num_buckets = None);
        assert!(said(&uncounted).contains("there are 0"));
    }
}
