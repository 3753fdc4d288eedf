//! The best bucket size by theory.
//!
//! The formula is that of [`BucketCost`].
//!
//! Input: the operations of runs, or an emulated link. Output: the size. This module does not know which size is really
//! best.

use paceline_collectives::{Algorithm, Link};
use paceline_observe::figures::facts::on_link;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::anatomy::{Anatomy, OpLine};
use paceline_table::stats::two_term_fit;
use serde::Serialize;

use crate::rank;
use crate::studies::bucket_cost::{BucketCost, MIB};

/// The best size, or why it is missing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Theory {
    /// The formula has a minimum.
    Found {
        /// `o`: the fixed cost of an operation, in milliseconds.
        op_ms: f64,
        /// `w`: the bandwidth of an all-reduce (algbw), in GB/s of 1e9 bytes.
        gb_per_s: f64,
        /// Where `o` and `w` come from, in words.
        source: String,
        /// The number of buckets with the least cost of communication. It is not rounded.
        best_buckets: f64,
        /// Their size in MiB.
        best_mb: f64,
    },
    /// The reason why there is no best size.
    Refused(String),
}

impl Theory {
    /// The theory for `gradient_bytes` bytes on an emulated link.
    pub fn of_link(
        link: Link,
        algorithm: Algorithm,
        world_size: usize,
        gradient_bytes: u64,
    ) -> Self {
        let cost = on_link(link, algorithm, world_size);
        let op_ms = cost(0);
        let ms_per_byte = (cost(gradient_bytes) - op_ms) / gradient_bytes as f64;
        let source = "by the formula of the emulated link".to_owned();
        Self::new(BucketCost { op_ms, ms_per_byte }, source, gradient_bytes)
    }

    /// The theory for `gradient_bytes` bytes, from the operations of the cases in which no rank computes meanwhile.
    /// `cases` has the rounds of each of them.
    pub fn of_runs(cases: &[&[RunSummary]], gradient_bytes: u64) -> Self {
        let points: Vec<(f64, f64)> = cases.iter().flat_map(|rounds| points(rounds)).collect();
        let Some(cost) = fit(&points) else {
            return Self::Refused(
                "there is no best size by theory: the runs have no operations of two sizes to fit o and w to"
                    .to_owned(),
            );
        };
        let source = format!("fitted to {} operations of naive and flat", points.len());
        Self::new(cost, source, gradient_bytes)
    }

    fn new(cost: BucketCost, source: String, gradient_bytes: u64) -> Self {
        let BucketCost { op_ms, ms_per_byte } = cost;
        let refused = |why: &str| {
            Self::Refused(format!(
                "there is no best size by theory: {why} (o = {op_ms:.4} ms, 1 / w = {:.4} ms per MiB, {source})",
                ms_per_byte * MIB
            ))
        };
        if op_ms <= 0.0 {
            return refused(
                "operations have no fixed cost, so the smaller the buckets, the better",
            );
        }
        if ms_per_byte <= 0.0 {
            return refused("operations take no longer for more bytes, so one bucket is best");
        }
        let bytes = gradient_bytes as f64;
        let best_bytes = cost.best_bytes(bytes);
        Self::Found {
            op_ms,
            gb_per_s: cost.gb_per_s(),
            source,
            best_buckets: bytes / best_bytes,
            best_mb: best_bytes / MIB,
        }
    }
}

/// The operations of a case: bytes and milliseconds from the arrival of the last rank to the end, medians over the
/// rounds. The first operation of a step, which adds up the loss, is left out: it runs while the ranks compute.
fn points(rounds: &[RunSummary]) -> Vec<(f64, f64)> {
    let ops: Vec<Vec<OpLine>> =
        rounds.iter().map(|run| run.part::<Anatomy>("anatomy").ops).collect();
    let count = ops.iter().map(Vec::len).min().unwrap_or(0);
    let point = |at: usize| {
        let ms = ops.iter().map(|ops| Some(ops[at].done_ms - ops[at].present_ms));
        Some((ops.first()?[at].bytes as f64, rank::median(ms)?))
    };
    (1..count).filter_map(point).collect()
}

/// How often the weights of the fit are computed again. After a few passes they no longer change.
const PASSES: usize = 5;

/// The line through points of bytes and milliseconds. An error of 10 % weighs the same for a small operation and for a large
/// one; otherwise the noise of the large ones would decide the fixed cost. The weights follow from the line, not from the
/// points, so that operations that are fast by chance count no more than slow ones. `None` without two sizes.
fn fit(points: &[(f64, f64)]) -> Option<BucketCost> {
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

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A round of a run whose operations have these bytes, after one for the loss. Each takes 0.5 ms and 1 ms per MiB.
    pub fn run(sizes_mb: &[f64]) -> RunSummary {
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
        let naive = [run(&[1.0, 3.0, 60.0]), run(&[1.0, 3.0, 60.0])];
        let found = Theory::of_runs(&[&naive, &[run(&[64.0])]], (64.0 * MIB) as u64);
        let Theory::Found { op_ms, gb_per_s, source, best_buckets, best_mb } = found else {
            panic!("{found:?}")
        };
        assert!((op_ms - 0.5).abs() < 1e-9, "{op_ms}");
        assert!((gb_per_s - MIB / 1e6).abs() < 1e-9, "{gb_per_s}");
        // sqrt(64 MiB * 0.5 ms * 1 MiB/ms)
        assert!((best_mb - 32f64.sqrt()).abs() < 1e-9, "{best_mb}");
        assert!((best_buckets - 64.0 / 32f64.sqrt()).abs() < 1e-9, "{best_buckets}");
        assert_eq!(source, "fitted to 4 operations of naive and flat");
    }

    #[test]
    fn the_noise_of_a_large_operation_does_not_decide_the_fixed_cost() {
        // 0.1 ms and 1 ms per MiB, but one large operation takes 10 % longer and another 10 % less.
        let noisy = [(0.5, 0.6), (1.0, 1.1), (2.0, 2.1), (50.0, 55.11), (100.0, 90.09)];
        let points = noisy.map(|(mb, ms)| (mb * MIB, ms));
        let line = fit(&points).unwrap();
        assert!((line.op_ms - 0.1).abs() < 0.02, "{line:?}");
        assert!((line.ms_per_byte * MIB - 1.0).abs() < 0.05, "{line:?}");
    }

    #[test]
    fn a_link_needs_no_fit() {
        // 8 Gbit/s are 1e6 bytes per ms; an all-reduce of 2 ranks moves each byte once, in three steps of 1 ms each.
        let link: Link = "8gbit,1ms".parse().unwrap();
        let found = Theory::of_link(link, Algorithm::Direct, 2, 12_000_000);
        let Theory::Found { op_ms, gb_per_s, best_buckets, .. } = found else {
            panic!("{found:?}")
        };
        assert!((op_ms - 3.0).abs() < 1e-2 && (gb_per_s - 1.0).abs() < 1e-6, "{op_ms} {gb_per_s}");
        assert!((best_buckets - 2.0).abs() < 1e-2, "{best_buckets}");
    }

    #[test]
    fn what_has_no_minimum_is_refused_in_words() {
        let said = |theory: Theory| match theory {
            Theory::Refused(why) => why,
            found => panic!("{found:?}"),
        };
        let one_size = said(Theory::of_runs(&[&[run(&[2.0])], &[run(&[2.0])]], 1 << 21));
        assert!(one_size.contains("no operations of two sizes"), "{one_size}");
        assert!(said(Theory::of_runs(&[&[], &[]], 1 << 21)).contains("no operations"));
        let of = |op_ms, ms_per_byte| {
            said(Theory::new(BucketCost { op_ms, ms_per_byte }, "fitted".into(), 1 << 21))
        };
        assert!(of(0.0, 1e-6).contains("the smaller the buckets, the better"));
        assert!(of(0.1, -1e-9).contains("one bucket is best (o = 0.1000 ms"));
    }
}
