//! Element-wise operations run as kernels of their own, each of which reads and writes everything once more.
//!
//! Seen: three or more element-wise kernels after each other on a stream, outside of the optimizer. Taken away: at most all but the
//! longest of each chain; at least half of the chain's time. Launches stay, so that a run that waits for launches gains nothing
//! here.

use super::super::names::{Class, OPTIMIZER, ZERO_GRAD};
use super::super::recorded::Recorded;
use super::super::replay::Plan;
use super::{Found, Tally, scaled};
use crate::timeline::TimeRange;
use std::collections::BTreeMap;

/// Shorter chains are not worth a change.
const CHAIN: usize = 3;

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut streams: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (at, work) in of.works.iter().enumerate() {
        streams.entry(work.stream).or_default().push(at);
    }
    let is_it = |at: &usize| {
        let work = &of.works[*at];
        work.class == Class::Elementwise
            && !of.is_launched_within(work, OPTIMIZER)
            && !of.is_launched_within(work, ZERO_GRAD)
    };
    let mut tally = Tally::default();
    let (mut chains, mut longest) = (0usize, TimeRange::default());
    let [mut least, mut most] = [base.clone(), base.clone()];
    for works in streams.values() {
        for chain in works.chunk_by(|a, b| is_it(a) && is_it(b)) {
            if chain.len() < CHAIN || !is_it(&chain[0]) {
                continue;
            }
            chains += 1;
            let (first, last) = (&of.works[chain[0]], &of.works[chain[chain.len() - 1]]);
            let whole = TimeRange {
                start_ns: first.time.start_ns,
                dur_ns: last.time.end_ns() - first.time.start_ns,
            };
            if whole.dur_ns > longest.dur_ns {
                longest = whole;
            }
            let slowest = chain.iter().copied().max_by_key(|at| base.work_ns[*at]);
            for at in chain {
                tally.add_work(of, &of.works[*at]);
                least.work_ns[*at] = scaled(base.work_ns[*at], 0.5);
                most.is_gone[*at] |= Some(*at) != slowest;
            }
        }
    }
    tally.longest?;
    tally.longest = Some(longest);
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{:.0} chains per step with {count:.0} element-wise kernels, {ms:.2} ms",
        of.per_step(chains as f64)
    );
    Some(tally.found(text, "model = torch.compile(model)", [least, most]))
}
