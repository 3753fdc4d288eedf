//! Element-wise operations run as kernels of their own, each of which reads and writes everything once more.
//!
//! Seen: three or more element-wise kernels after each other on a stream, or such operators after each other on a processor,
//! outside of the optimizer. Taken away: at most all but the longest of each chain; at least half of the chain's time. Launches
//! stay, so that a run that waits for launches gains nothing here.

use std::collections::BTreeMap;

use super::*;

/// Shorter chains are not worth a change.
const CHAIN: usize = 3;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "elementwise",
    title: "Element-wise operations are not fused",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let Recorded { calls, works, .. } = of;
    let is_elementwise: Vec<bool> = of.timeline.names.iter().map(names::is_elementwise).collect();
    let is_of_model =
        |call: &Call| !of.is_within(call, OPTIMIZER) && !of.is_within(call, ZERO_GRAD);
    let is_it = |at: &usize| {
        if of.on_device() {
            let call = works[*at].call.map(|call| &calls[call as usize]);
            works[*at].class == Class::Elementwise && call.is_none_or(is_of_model)
        } else {
            let call = &calls[*at];
            is_elementwise[call.name.0 as usize]
                && call.kind == CallKind::Operator
                && is_of_model(call)
        }
    };
    // The kernels of each stream of a device, or the operators of each thread of a processor.
    let (row, time): (Vec<i64>, Vec<TimeRange>) = if of.on_device() {
        works.iter().map(|work| (work.stream, work.time)).unzip()
    } else {
        calls.iter().map(|call| (i64::from(call.lane.0), call.time)).unzip()
    };
    let base_ns = if of.on_device() { &base.work_ns } else { &base.call_ns };
    let mut rows: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    row.iter().enumerate().for_each(|(at, row)| rows.entry(*row).or_default().push(at));
    let mut tally = Tally::default();
    let (mut chains, mut longest) = (0usize, TimeRange::default());
    let [mut least, mut most] = [base.clone(), base.clone()];
    let links = rows.values().flat_map(|row| row.chunk_by(|a, b| is_it(a) && is_it(b)));
    for chain in links.filter(|chain| chain.len() >= CHAIN && is_it(&chain[0])) {
        let whole =
            TimeRange::between(time[chain[0]].start_ns, time[chain[chain.len() - 1]].end_ns());
        if !of.on_device() || of.counts(works[chain[0]].step) {
            chains += 1;
            longest = if whole.dur_ns > longest.dur_ns { whole } else { longest };
        }
        let slowest = chain.iter().copied().max_by_key(|at| base_ns[*at]);
        for &at in chain {
            if of.on_device() {
                tally.add_work(of, &works[at]);
                least.work_ns[at] = scaled(base_ns[at], 0.5);
                most.is_gone[at] |= Some(at) != slowest;
            } else {
                let name = of.text(calls[at].name).rsplit(": ").next().unwrap_or_default();
                tally.add_time(of, name.to_owned(), time[at]);
                least.call_ns[at] = scaled(base_ns[at], 0.5);
                most.call_ns[at] = if Some(at) == slowest { base_ns[at] } else { 0 };
            }
        }
    }
    tally.longest.replace(longest)?;
    let (count, ms) = tally.per_step(of);
    let (what, compiler) =
        if of.on_device() { ("kernels", "") } else { ("operators", "  (needs a C++ compiler)") };
    let text = format!(
        "{:.0} chains per step with {count:.0} element-wise {what}, {ms:.2} ms",
        of.per_step(chains as f64)
    );
    Some(tally.found(text, format!("model = torch.compile(model){compiler}"), [least, most]))
}
