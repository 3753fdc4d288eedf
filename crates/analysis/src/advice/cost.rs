//! The cost of an operation, from its bytes.
//!
//! Input: measured operations, and the cost on a link if one is known. Output: a function of bytes.

use paceline_table::stats::{median, two_term_fit};

use super::observed::{Observed, Seen};

/// The cost model of operations: the milliseconds that an operation on this many bytes takes.
pub type Cost = Box<dyn Fn(u64) -> f64>;

/// The cost of operations as measured in these steps. On a link it is the link's time plus the usual overhead of the
/// operations: to be noticed by all ranks, to begin and to end. Without a link, a latency and a time per byte are fitted.
pub fn cost_of(observed: &Observed, link: Option<Cost>) -> Cost {
    let times = |step: &Seen| {
        let mut free = f64::NEG_INFINITY;
        let of_op = |(at, bytes): (usize, &u64)| {
            let (begin, done) = (free.max(step.latest(at, 0)), step.latest(at, 3));
            free = done;
            (*bytes, done - begin)
        };
        observed.bytes.iter().enumerate().map(of_op).collect::<Vec<(u64, f64)>>()
    };
    let steps: Vec<Vec<(u64, f64)>> = observed.alike().map(times).collect();
    match link {
        Some(link) => {
            let more = steps.iter().flatten().map(|(bytes, ms)| ms - link(*bytes));
            let overhead = median(more).unwrap_or(0.0).max(0.0);
            Box::new(move |bytes| link(bytes) + overhead)
        }
        None => {
            let of_op = |(at, bytes): (usize, &u64)| {
                Some((*bytes as f64, median(steps.iter().map(|step| step[at].1))?))
            };
            let points = observed.bytes.iter().enumerate().filter_map(of_op);
            measured_cost(&points.collect::<Vec<_>>())
        }
    }
}

/// A latency plus a time per byte, fitted by least squares to sizes in bytes and times in milliseconds. Neither is negative.
fn measured_cost(points: &[(f64, f64)]) -> Cost {
    let n = points.len().max(1) as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| points.iter().map(part).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    // Sizes are relative to their mean: squares of large sizes that hardly differ would leave nothing but rounding errors.
    let fit = two_term_fit(points.iter().map(|p| ([1.0, p.0 - x], p.1, 1.0)));
    let per_byte = fit.map_or(0.0, |[_, per_byte]| per_byte.max(0.0));
    let latency = (y - per_byte * x).max(0.0);
    Box::new(move |bytes| latency + per_byte * bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::observed::RankStep;

    #[test]
    fn costs_are_fitted() {
        let cost = measured_cost(&[(100.0, 1.5), (300.0, 2.5)]);
        assert!((cost(0) - 1.0).abs() < 1e-9 && (cost(1000) - 6.0).abs() < 1e-9);
        assert_eq!(measured_cost(&[(100.0, 3.0)])(7), 3.0);
        assert_eq!(measured_cost(&[])(7), 0.0);
        // Operations of one large size have no time per byte.
        let size = 1e9 + 1.0;
        let cost = measured_cost(&[(size, 3.0), (size, 4.0), (size, 5.0)]);
        assert_eq!((cost(0), cost(size as u64)), (4.0, 4.0));
    }

    #[test]
    fn what_operations_take_longer_than_on_the_link_is_a_cost_of_each() {
        // The second operation is submitted before the first is done.
        let ops = vec![[0.0, 0.0, 0.0, 8.5], [5.0, 8.5, 8.5, 17.0]];
        let rank = RankStep { ops, ..RankStep::default() };
        let step = Seen { is_alike: true, ranks: vec![rank.clone(), rank], ..Seen::default() };
        let observed =
            Observed { steps: vec![step; 3], bytes: vec![1000, 1000], ..Observed::default() };
        let cost = cost_of(&observed, Some(Box::new(|bytes| 8.0 * bytes as f64 / 1000.0)));
        assert!((cost(2000) - 16.5).abs() < 1e-9);
        assert!((cost_of(&observed, None)(1000) - 8.5).abs() < 1e-9);
    }
}
