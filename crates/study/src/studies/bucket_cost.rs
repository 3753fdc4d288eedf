//! Sizes of buckets: which ones are run, their cost by formula, and the best ones.
//!
//! Let `s` be the bytes of all gradients, `w` the bandwidth of an all-reduce in bytes per second, and `o` the fixed cost of an
//! operation in seconds. With `n` buckets, the part of the communication that a step cannot hide costs `n o + s / (n w)`: every bucket has the cost of its
//! operation, and the last one, of `s / n` bytes, starts when nothing is left to hide it. This cost is least for
//! buckets of `sqrt(s o w)` bytes.

use paceline_collectives::{Algorithm, Link};
use paceline_failure::Result;
use paceline_host::text::thousands;
use paceline_observe::figures::facts::on_link;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::anatomy::{Anatomy, OpLine};
use paceline_table::chart::{Axis, Picture, Series, Stroke};
use paceline_table::stats::two_term_fit;

use crate::noise;
use crate::outcome::Outcome;
use crate::report::{Found, head, tabled};
use crate::study::Setting;
use crate::usage;

/// Bytes of a MiB, in which `--bucket-cap-mb` counts.
pub const MIB: f64 = 1_048_576.0;
/// The published sizes, in MiB.
pub const COARSE: [f64; 4] = [1.0, 10.0, 100.0, 1000.0];
/// The largest number of sizes.
const MAX_SIZES: usize = 100;

/// The sizes that the user passed, ascending and without duplicates.
pub fn check_sizes(given: &[f64]) -> Result<Vec<f64>> {
    if let Some(bad) = given.iter().find(|mb| !(**mb > 0.0 && mb.is_finite())) {
        return usage(format!("--sizes {bad}: pass sizes in MiB above zero, as 1,2,4"));
    }
    let mut sizes = given.to_vec();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    if sizes.len() > MAX_SIZES {
        return usage(format!("--sizes: {} sizes are too many; pass {MAX_SIZES}", sizes.len()));
    }
    Ok(sizes)
}

/// Sizes of buckets in MiB, ascending, without those that change nothing: of the sizes that hold all gradients, the smallest
/// stands for all. Also returns a line that says so, if there are several.
pub fn distinct(mut sizes: Vec<f64>, gradient_bytes: u64) -> (Vec<f64>, Option<String>) {
    let all = gradient_bytes as f64 / MIB;
    let num_smaller = sizes.iter().filter(|mb| **mb < all).count();
    let same: Vec<String> = sizes[num_smaller..].iter().map(f64::to_string).collect();
    sizes.truncate(num_smaller + 1);
    let note = (same.len() > 1).then(|| {
        format!(
            "Buckets of {} MiB hold all gradients, so they are run once, as {} MiB",
            same.join(", "),
            same[0]
        )
    });
    (sizes, note)
}

/// The size of a model in words.
pub fn size_words(params: u64, gradient_bytes: u64) -> String {
    format!("{} parameters, {:.2} MiB of gradients", thousands(params), gradient_bytes as f64 / MIB)
}

/// The cost of an all-reduce: a fixed part, and a part for each byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketCost {
    /// `o`, in milliseconds.
    pub op_ms: f64,
    /// `1 / w`.
    pub ms_per_byte: f64,
}

impl BucketCost {
    /// `w` in GB/s of 1e9 bytes.
    pub fn gb_per_s(&self) -> f64 {
        1.0 / self.ms_per_byte / 1e6
    }

    /// The cost of communication that a step with `num_buckets` buckets for `gradient_bytes` bytes cannot hide, in milliseconds.
    pub fn cost_ms(&self, gradient_bytes: f64, num_buckets: f64) -> f64 {
        num_buckets * self.op_ms + gradient_bytes * self.ms_per_byte / num_buckets
    }

    /// The bytes of a bucket for which this cost is least.
    pub fn best_bytes(&self, gradient_bytes: f64) -> f64 {
        (gradient_bytes * self.op_ms / self.ms_per_byte).sqrt()
    }
}

/// The formula for these gradients, and the source of its costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Formula {
    /// The cost of an all-reduce.
    pub cost: BucketCost,
    /// Where it comes from, in words.
    pub source: String,
    /// Bytes of all gradients.
    pub bytes: f64,
}

/// A formula, or why there is none.
type OrWhy<T> = std::result::Result<T, String>;

/// The fewest different numbers of buckets for a fit. Two would always fit, because there are two unknowns.
const MIN_POINTS: usize = 3;
/// If the formula explains a smaller fraction of the variance than this, there is no fit.
const MIN_R_SQUARED: f64 = 0.5;

impl Formula {
    /// The formula; the reason if it has no minimum.
    fn new(cost: BucketCost, source: String, gradient_bytes: u64) -> OrWhy<Self> {
        let BucketCost { op_ms, ms_per_byte } = cost;
        let why = if op_ms <= 0.0 {
            "operations have no fixed cost, so the smaller the buckets, the better"
        } else if ms_per_byte <= 0.0 {
            "operations take no longer for more bytes, so one bucket is best"
        } else {
            return Ok(Self { cost, source, bytes: gradient_bytes as f64 });
        };
        Err(format!(
            "no best size: {why} (o = {op_ms:.4} ms, 1 / w = {:.4} ms per MiB, {source})",
            ms_per_byte * MIB
        ))
    }

    /// The formula on an emulated link.
    pub fn of_link(link: Link, algorithm: Algorithm, ranks: usize, bytes: u64) -> OrWhy<Self> {
        let cost = on_link(link, algorithm, ranks);
        let op_ms = cost(0);
        let ms_per_byte = (cost(bytes) - op_ms) / bytes as f64;
        let source = "by the formula of the emulated link".to_owned();
        Self::new(BucketCost { op_ms, ms_per_byte }, source, bytes)
    }

    /// The formula from the operations of cases in which no rank computes meanwhile. `cases` has the rounds of each.
    pub fn of_operations(cases: &[Vec<RunSummary>], bytes: u64) -> OrWhy<Self> {
        let points: Vec<(f64, f64)> = cases.iter().flat_map(|rounds| operations(rounds)).collect();
        let cost = line(&points).ok_or("no best size: the runs have no operations of two sizes")?;
        let source = format!("fitted to {} operations of naive and flat", points.len());
        Self::new(cost, source, bytes)
    }

    /// The formula fitted to the exposed communication of the rows with buckets. It is linear in `o` and `1 / w`.
    pub fn of_exposed(outcome: &Outcome, bytes: u64) -> OrWhy<Self> {
        let point = |(at, _): (usize, f64)| {
            let row = &outcome.rows[at];
            Some((row.median("num_buckets")?, row.median("comm_exposed_ms")?))
        };
        let points: Vec<(f64, f64)> = with_buckets(outcome).filter_map(point).collect();
        let mut counts: Vec<f64> = points.iter().map(|(count, _)| *count).collect();
        counts.sort_by(f64::total_cmp);
        counts.dedup();
        if counts.len() < MIN_POINTS {
            return Err(format!(
                "no fit: it needs at least {MIN_POINTS} different numbers of buckets, and there are {}; \
                 pass smaller --sizes, or a larger model",
                counts.len()
            ));
        }
        // y = o n + (s / w) / n, with s / w in milliseconds.
        let terms = points.iter().map(|&(n, y)| ([n, 1.0 / n], y, 1.0));
        let [op_ms, all_ms] =
            two_term_fit(terms).ok_or("no fit: the numbers of buckets are too alike")?;
        let cost = BucketCost { op_ms, ms_per_byte: all_ms / bytes as f64 };
        let mean = points.iter().map(|(_, y)| y).sum::<f64>() / points.len() as f64;
        let total: f64 = points.iter().map(|(_, y)| (y - mean).powi(2)).sum();
        let left = points.iter().map(|(n, y)| (y - cost.cost_ms(bytes as f64, *n)).powi(2));
        let r_squared = 1.0 - left.sum::<f64>() / total;
        let source = format!("fitted to exposed communication (R^2 = {r_squared:.2})");
        let formula = Self::new(cost, source, bytes)?;
        if r_squared.is_nan() || r_squared < MIN_R_SQUARED {
            return Err(format!(
                "no fit: the formula explains {:.0} % of the differences only; the rest is noise, or more \
                 communication than the backward pass can hide",
                100.0 * r_squared.max(0.0)
            ));
        }
        Ok(formula)
    }

    /// The best size in MiB.
    pub fn best_mb(&self) -> f64 {
        self.cost.best_bytes(self.bytes) / MIB
    }

    /// The formula as a result of a study.
    pub fn found(of: &OrWhy<Self>) -> Found {
        let definition = "cost of communication = n o + s / (n w), with n buckets, s bytes of gradients; it is least for \
                          buckets of sqrt(s o w) bytes";
        let heads = [
            ("op_ms", "o", ("ms", 4)),
            ("gb_per_s", "w", ("GB/s", 2)),
            ("source", "both", ("", 0)),
            ("best_buckets", "best number", ("", 2)),
            ("best_mb", "best size", ("MiB", 2)),
        ];
        let row = |of: &Self| {
            let best_mb = of.best_mb();
            let [op_ms, gb_per_s] = [of.cost.op_ms, of.cost.gb_per_s()];
            [
                op_ms.into(),
                gb_per_s.into(),
                of.source.clone().into(),
                (of.bytes / MIB / best_mb).into(),
                best_mb.into(),
            ]
        };
        let lines = std::iter::once(definition.to_owned()).chain(of.clone().err()).collect();
        let table = tabled(heads, of.iter().map(row));
        Found {
            lines,
            ..Found::new("formula", "The best size of buckets by formula", definition, table)
        }
    }
}

/// The operations of a case: bytes and milliseconds from the arrival of the last rank to the end, medians over the
/// rounds. The first operation of a step, which adds up the loss, is left out: it runs while the ranks compute.
fn operations(rounds: &[RunSummary]) -> Vec<(f64, f64)> {
    let ops: Vec<Vec<OpLine>> =
        rounds.iter().map(|run| run.part::<Anatomy>("anatomy").ops).collect();
    let count = ops.iter().map(Vec::len).min().unwrap_or(0);
    let point = |at: usize| {
        let ms = ops.iter().map(|ops| Some(ops[at].done_ms - ops[at].present_ms));
        Some((ops.first()?[at].bytes as f64, noise::median(ms)?))
    };
    (1..count).filter_map(point).collect()
}

/// How often the weights of the fit are computed again. After a few passes they no longer change.
const PASSES: usize = 5;

/// The line through points of bytes and milliseconds. An error of 10 % weighs the same for a small operation and for a large
/// one; otherwise the noise of the large ones would decide the fixed cost. The weights follow from the line, not from the
/// points, so that operations that are fast by chance count no more than slow ones. `None` without two sizes.
fn line(points: &[(f64, f64)]) -> Option<BucketCost> {
    let (first, _) = points.first()?;
    if points.iter().all(|(bytes, _)| bytes == first) {
        return None;
    }
    let least = points.iter().map(|(_, ms)| *ms).filter(|ms| *ms > 0.0).fold(f64::MAX, f64::min);
    let mut expected: Vec<f64> = points.iter().map(|(_, ms)| ms.max(least)).collect();
    let mut line = BucketCost { op_ms: 0.0, ms_per_byte: 0.0 };
    for _ in 0..PASSES {
        let terms = points.iter().zip(&expected);
        let [op_ms, ms_per_byte] =
            two_term_fit(terms.map(|((x, y), of)| ([1.0, *x], *y, 1.0 / (of * of))))?;
        line = BucketCost { op_ms, ms_per_byte };
        let of = |(bytes, _): &(f64, f64)| (line.op_ms + line.ms_per_byte * bytes).max(least);
        expected = points.iter().map(of).collect();
    }
    Some(line)
}

/// The rows with buckets, and their sizes in MiB.
fn with_buckets(outcome: &Outcome) -> impl DoubleEndedIterator<Item = (usize, f64)> {
    outcome.rows.iter().enumerate().filter_map(|(at, row)| Some((at, row.median("bucket_mb")?)))
}

/// The row with buckets for which a figure is smallest, and its size in MiB.
pub fn best(outcome: &Outcome, figure: &str) -> Option<(usize, f64)> {
    let median = |at: usize| outcome.rows[at].median(figure).unwrap_or(f64::INFINITY);
    with_buckets(outcome).min_by(|(a, _), (b, _)| median(*a).total_cmp(&median(*b)))
}

/// The best measured sizes as a result of a study, with the sizes within noise of each.
pub fn best_found(outcome: &Outcome) -> Found {
    let heads = [
        ("figure", "least", ("", 0)),
        ("bucket_mb", "at MiB", ("", 0)),
        ("ms", "it takes", ("ms", 2)),
        ("like", "within noise of it", ("", 0)),
    ];
    let row = |figure| {
        let (best, mb) = best(outcome, figure)?;
        let is_like = |(at, _): &(usize, f64)| {
            *at != best && outcome.effect(figure, best, *at).is_none_or(|effect| effect.is_none())
        };
        let like = with_buckets(outcome).filter(is_like).map(|(_, mb)| mb.to_string());
        let like = like.collect::<Vec<_>>().join(", ");
        let label = head(figure).label.into_owned();
        let ms = outcome.rows[best].median(figure);
        Some([label.into(), mb.to_string().into(), ms.into(), like.into()])
    };
    let rows = ["step_ms_median", "comm_exposed_ms"].into_iter().filter_map(row);
    Found::new("best", "The best measured sizes", "", tabled(heads, rows))
}

/// The chart of a figure over the size of buckets: a curve through the rows with buckets, and a level line for every other row.
pub fn chart(
    outcome: &Outcome,
    figure: &str,
    setting: &Setting,
    formula: Option<&Formula>,
) -> Picture {
    let rows = &outcome.rows;
    let place = |(at, mb): (usize, f64)| Some((1e6 * mb, 1e3 * rows[at].median(figure)?));
    let range = |(at, mb): (usize, f64)| {
        let spread = rows[at].figures.get(figure)?;
        Some((1e6 * mb, 1e3 * spread.min, 1e3 * spread.max))
    };
    let measured = Series::line("buckets", with_buckets(outcome).filter_map(place));
    let mut series = vec![measured.intervals(with_buckets(outcome).filter_map(range))];
    if let Some(Formula { cost, bytes, .. }) = formula {
        let curve = with_buckets(outcome).filter_map(|(at, mb)| {
            Some((1e6 * mb, 1e3 * cost.cost_ms(*bytes, rows[at].median("num_buckets")?)))
        });
        series.push(Series::line("n o + s / (n w)", curve).stroke(Stroke::Dotted).look(4));
    }
    let ends = [with_buckets(outcome).next(), with_buckets(outcome).next_back()];
    let level = rows.iter().filter(|row| row.median("bucket_mb").is_none());
    series.extend(level.enumerate().map(|(at, row)| {
        let point = |(_, mb): &(usize, f64)| Some((1e6 * mb, 1e3 * row.median(figure)?));
        let points = ends.iter().flatten().filter_map(point);
        Series::line(&row.variant, points).stroke(Stroke::Dashed).look(at + 1)
    }));
    let ranks = rows.first().and_then(|row| row.median("world_size")).unwrap_or(0.0);
    let label = head(figure).label.into_owned();
    Picture::lines(
        format!(
            "{}, {ranks} ranks over {}: {label} by bucket size",
            setting.model, setting.transport
        ),
        setting.place(&outcome.origin),
        [Axis::logarithmic("Bucket size (MiB)", "B"), Axis::linear(label, "us")],
        series,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::outcome::tests::outcome;

    #[test]
    fn sizes_that_hold_everything_are_run_once() {
        let of = |sizes: &[f64]| distinct(sizes.to_vec(), 2 << 20);
        let (sizes, note) = of(&[1.0, 2.0, 10.0, 1000.0]);
        assert_eq!(sizes, [1.0, 2.0]);
        let note = note.unwrap();
        assert!(note.contains("2, 10, 1000 MiB") && note.ends_with("as 2 MiB"), "{note}");
        assert_eq!(of(&[0.5, 1.0, 4.0]), (vec![0.5, 1.0, 4.0], None));
        assert_eq!(of(&[0.5, 1.0]), (vec![0.5, 1.0], None));
        assert_eq!(of(&[4.0]), (vec![4.0], None));
    }

    /// Rows of 64 MiB in these numbers of buckets, with their exposed communication.
    fn exposed(points: &[(f64, f64)]) -> Outcome {
        let rounds = |(count, ms): &(f64, f64)| {
            let run = json!({"comm_ops_per_step": count + 1.0, "comm_exposed_ms": ms, "step_ms_median": 100.0 + ms});
            ("ddp", vec![run; 3])
        };
        let mut outcome = outcome(&points.iter().map(rounds).collect::<Vec<_>>());
        for (row, (count, _)) in outcome.rows.iter_mut().zip(points) {
            row.add("bucket_mb", 64.0 / count);
        }
        outcome
    }

    fn by_formula(counts: &[f64], op_ms: f64, all_ms: f64) -> Outcome {
        let point = |count: &f64| (*count, count * op_ms + all_ms / count);
        exposed(&counts.iter().map(point).collect::<Vec<_>>())
    }

    #[test]
    fn the_formula_is_found_again() {
        // 64 MiB in 32 ms, 0.5 ms per operation: 8 buckets are best, of 8 MiB.
        let rows = by_formula(&[1.0, 2.0, 4.0, 16.0, 64.0], 0.5, 32.0);
        let formula = Formula::of_exposed(&rows, 1 << 26).unwrap();
        assert!((formula.cost.op_ms - 0.5).abs() < 1e-9, "{formula:?}");
        assert!((formula.cost.gb_per_s() - 64.0 * MIB / 32e6).abs() < 1e-9, "{formula:?}");
        assert!((formula.best_mb() - 8.0).abs() < 1e-9, "{formula:?}");
        assert!(formula.source.contains("R^2 = 1.00"), "{formula:?}");
        // The chart has the curve of the formula through the points.
        let setting = crate::studies::tests::setting(2);
        let chart = chart(&rows, "comm_exposed_ms", &setting, Some(&formula));
        for (measured, fitted) in chart.series()[0].points.iter().zip(&chart.series()[1].points) {
            assert!((measured.1 - fitted.1).abs() < 1e-3, "{measured:?} {fitted:?}");
        }
        assert_eq!(best(&rows, "step_ms_median").map(|(_, mb)| mb), Some(16.0));
    }

    #[test]
    fn what_the_formula_does_not_explain_is_refused_in_words() {
        let said = |rows: &Outcome| Formula::of_exposed(rows, 1 << 26).unwrap_err();
        let few = said(&by_formula(&[1.0, 1.0, 2.0], 0.5, 32.0));
        assert!(few.contains("at least 3 different numbers of buckets, and there are 2"), "{few}");
        let cheap = said(&by_formula(&[1.0, 2.0, 4.0, 8.0], -0.1, 32.0));
        assert!(cheap.contains("no fixed cost"), "{cheap}");
        let flat = said(&by_formula(&[1.0, 2.0, 4.0, 8.0], 0.5, -0.2));
        assert!(flat.contains("one bucket is best"), "{flat}");
        let noisy = said(&exposed(&[(1.0, 9.0), (2.0, 1.0), (4.0, 11.0), (8.0, 2.0), (16.0, 9.0)]));
        assert!(noisy.contains("explains") && noisy.contains("noise"), "{noisy}");
    }

    /// A round of a run whose operations have these bytes, after one for the loss. Each takes 0.5 ms and 1 ms per MiB.
    fn run(sizes_mb: &[f64]) -> RunSummary {
        let op = |bytes: f64, ms: f64| {
            json!({"bytes": bytes as u64, "ready_ms": 0.0, "sent_ms": 0.0, "present_ms": 1.0,
                   "done_ms": 1.0 + ms, "hidden_pct": 0.0})
        };
        let of_gradients = sizes_mb.iter().map(|mb| op(mb * MIB, 0.5 + mb));
        let ops: Vec<_> = std::iter::once(op(16.0, 99.0)).chain(of_gradients).collect();
        let anatomy = json!({
            "backward_begin_ms": 0.0, "backward_end_ms": 0.0, "slowest": null, "ready": [], "ops": ops,
            "buckets": [], "gathers": []
        });
        json!({ "anatomy": anatomy }).into()
    }

    #[test]
    fn the_costs_of_operations_are_found_again() {
        let naive = vec![run(&[1.0, 3.0, 60.0]), run(&[1.0, 3.0, 60.0])];
        let found =
            Formula::of_operations(&[naive, vec![run(&[64.0])]], (64.0 * MIB) as u64).unwrap();
        assert!((found.cost.op_ms - 0.5).abs() < 1e-9, "{found:?}");
        assert!((found.cost.gb_per_s() - MIB / 1e6).abs() < 1e-9, "{found:?}");
        // sqrt(64 MiB * 0.5 ms * 1 MiB/ms)
        assert!((found.best_mb() - 32f64.sqrt()).abs() < 1e-9, "{found:?}");
        assert_eq!(found.source, "fitted to 4 operations of naive and flat");
        for cases in [vec![vec![run(&[2.0])]; 2], vec![Vec::new()]] {
            let why = Formula::of_operations(&cases, 1 << 21).unwrap_err();
            assert!(why.contains("no operations of two sizes"), "{why}");
        }
    }

    #[test]
    fn the_noise_of_a_large_operation_does_not_decide_the_fixed_cost() {
        // 0.1 ms and 1 ms per MiB, but one large operation takes 10 % longer and another 10 % less.
        let noisy = [(0.5, 0.6), (1.0, 1.1), (2.0, 2.1), (50.0, 55.11), (100.0, 90.09)];
        let points = noisy.map(|(mb, ms)| (mb * MIB, ms));
        let line = line(&points).unwrap();
        assert!((line.op_ms - 0.1).abs() < 0.02, "{line:?}");
        assert!((line.ms_per_byte * MIB - 1.0).abs() < 0.05, "{line:?}");
    }

    #[test]
    fn a_link_needs_no_fit() {
        // 8 Gbit/s are 1e6 bytes per ms; an all-reduce of 2 ranks moves each byte once, in three steps of 1 ms each.
        let link: Link = "8gbit,1ms".parse().unwrap();
        let found = Formula::of_link(link, Algorithm::Direct, 2, 12_000_000).unwrap();
        let BucketCost { op_ms, .. } = found.cost;
        assert!((op_ms - 3.0).abs() < 1e-2 && (found.cost.gb_per_s() - 1.0).abs() < 1e-6);
        assert!((found.bytes / MIB / found.best_mb() - 2.0).abs() < 1e-2, "{found:?}");
    }
}
