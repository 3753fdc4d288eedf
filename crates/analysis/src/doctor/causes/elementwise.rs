//! Element-wise operations run as kernels of their own, each of which reads and writes everything once more.
//!
//! Seen: three or more element-wise kernels after each other on a stream, or such operators after each other on a processor,
//! outside of the optimizer. Taken away: at most all but the longest of each chain; at least half of the chain's time. Launches
//! stay, so that a run that waits for launches gains nothing here.

use super::super::names::{Class, OPTIMIZER, ZERO_GRAD, is_elementwise};
use super::super::recorded::{CallKind, Recorded};
use super::super::replay::Plan;
use super::{Found, Tally, scaled};
use crate::timeline::{TimeRange, TrackId};
use std::collections::BTreeMap;

/// Shorter chains are not worth a change.
const CHAIN: usize = 3;

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if of.on_device { kernels(of, base) } else { operators(of, base) }
}

/// Chains of operators on the threads of a processor.
fn operators(of: &Recorded, base: &Plan) -> Option<Found> {
    let is_elementwise: Vec<bool> = of.timeline.names.iter().map(is_elementwise).collect();
    let is_it = |at: &usize| {
        let call = &of.calls[*at];
        is_elementwise[call.name.0 as usize]
            && call.kind == CallKind::Operator
            && !of.is_within(call, OPTIMIZER)
            && !of.is_within(call, ZERO_GRAD)
    };
    let mut threads: BTreeMap<TrackId, Vec<usize>> = BTreeMap::new();
    for (at, call) in of.calls.iter().enumerate() {
        threads.entry(call.lane).or_default().push(at);
    }
    let mut tally = Tally::default();
    let (mut chains, mut longest) = (0usize, TimeRange::default());
    let [mut least, mut most] = [base.clone(), base.clone()];
    for calls in threads.values() {
        for chain in calls.chunk_by(|a, b| is_it(a) && is_it(b)) {
            if chain.len() < CHAIN || !is_it(&chain[0]) {
                continue;
            }
            chains += 1;
            let start_ns = of.calls[chain[0]].time.start_ns;
            let end_ns = of.calls[chain[chain.len() - 1]].time.end_ns();
            if end_ns - start_ns > longest.dur_ns {
                longest = TimeRange { start_ns, dur_ns: end_ns - start_ns };
            }
            let slowest = chain.iter().copied().max_by_key(|at| base.call_ns[*at]);
            for &at in chain {
                let call = &of.calls[at];
                let name = of.text(call.name);
                tally.add(name.rsplit(": ").next().unwrap_or(name).to_owned(), call.time);
                least.call_ns[at] = scaled(base.call_ns[at], 0.5);
                if Some(at) != slowest {
                    most.call_ns[at] = 0;
                }
            }
        }
    }
    tally.longest?;
    tally.longest = Some(longest);
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{:.0} chains per step with {count:.0} element-wise operators, {ms:.2} ms",
        of.per_step(chains as f64)
    );
    Some(tally.found(text, "model = torch.compile(model)  (needs a C++ compiler)", [least, most]))
}

/// Chains of kernels on the streams of a device.
fn kernels(of: &Recorded, base: &Plan) -> Option<Found> {
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
