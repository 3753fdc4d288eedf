//! The loop waits for the next batch: the time that the thread of the steps spends in the `DataLoader`.
//!
//! Seen: spans `enumerate(DataLoader)`, which PyTorch records by itself. Taken away: at most all of that time, which workers
//! make beside the step, and at least half of it, because workers have only as many cores as there are; but not the time in which the
//! loop takes a batch over from them. As many workers are advised as make a batch in the time of the rest of the step. For a loader
//! that computes on a processor, they are no more than the cores that are free, if the trace says how many are. A trace does not say
//! whether another loader computes or waits; the advice says what it assumes. With workers already, a little time is taking over
//! what they made, and more workers do not change that.

use super::*;

/// The iterator of a loader with workers, in the names of its spans.
const WITH_WORKERS: &str = "_MultiProcessing";
/// The part of the steps that taking over batches may have.
const TAKING_OVER: f64 = 0.1;
/// How long the loop takes over a batch from workers at least, and for batches of images.
const TAKES_OVER_NS: [f64; 2] = [100e3, 1e6];

/// The most workers that are advised.
const MOST_WORKERS: f64 = 16.0;

/// The spans of the loader in the steps, by start.
pub(super) fn spans(of: &Recorded) -> Vec<TimeRange> {
    let names = &of.timeline.names;
    let is_loader: Vec<bool> = names.iter().map(|name| name.starts_with(LOADER)).collect();
    let annotations = of.timeline.annotations.iter().filter(|span| !span.is_device);
    let annotations = annotations.map(|span| (span.name, span.time));
    let operators = of.timeline.operators.iter().map(|operator| (operator.name, operator.time));
    let (begin_ns, end_ns) = of.window();
    let all = annotations.chain(operators).filter(|(name, time)| {
        is_loader[name.0 as usize] && time.start_ns >= begin_ns && time.end_ns() <= end_ns
    });
    joined(all.map(|(_, time)| time).collect())
}

/// Sorts times, and joins those that overlap.
pub(super) fn joined(mut all: Vec<TimeRange>) -> Vec<TimeRange> {
    all.sort_unstable();
    all.dedup_by(|next, last| {
        let overlaps = next.start_ns < last.end_ns();
        last.dur_ns =
            if overlaps { last.dur_ns.max(next.end_ns() - last.start_ns) } else { last.dur_ns };
        overlaps
    });
    all
}

pub(in super::super) const CAUSE: Cause = Cause {
    key: "loader",
    title: "The loop waits for the data loader",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let spans = spans(of);
    let mut tally = Tally::default();
    spans.iter().for_each(|span| tally.add_time(of, LOADER.to_owned(), *span));
    tally.longest?;
    let has_workers = of.timeline.names.iter().any(|name| name.contains(WITH_WORKERS));
    let (begin_ns, end_ns) = (of.steps[of.first_steps()].start_ns, of.window().1);
    if has_workers && (tally.total_ns as f64) < TAKING_OVER * (end_ns - begin_ns) as f64 {
        return None;
    }
    let [mut least, mut most] = [base.clone(), base.clone()];
    let mean_ns = tally.total_ns as f64 / tally.count as f64;
    let [at_most, at_least] = TAKES_OVER_NS.map(|ns| (1.0 - ns / mean_ns).max(0.0));
    let within = |(_, call): &(usize, &Call)| overlap_ns(&spans, call.time) == call.time.dur_ns;
    let computed = of.calls_of(CallKind::Operator).filter(within);
    let computed_ns: i64 = computed.map(|(_, call)| call.time.dur_ns).sum();
    // Workers of a loader that computes take cores from a step on the same processor.
    let takes_cores = !of.on_device() && 2 * computed_ns > tally.total_ns;
    let (count, ms) = tally.per_step(of);
    let step_ms = of.per_step((end_ns - begin_ns) as f64 / 1e6);
    let rest_ms = (step_ms - ms).max(0.0);
    // One more than that, because batches do not take equally long.
    let enough = ((ms / rest_ms).ceil() + 1.0).min(MOST_WORKERS);
    let free = of.timeline.free_cores.filter(|_| takes_cores);
    let workers = free.map_or(enough, |free| enough.min(free.max(1) as f64));
    // Fewer workers than that leave part of the wait.
    let left = if workers < enough { (ms / workers - rest_ms).max(0.0) / ms } else { 0.0 };
    let [at_most, at_least] = [at_most, at_least].map(|part| part.min(1.0 - left));
    let [at_most, at_least] = if takes_cores {
        [at_most.min(0.75), at_least.min(0.25)]
    } else {
        [at_most, at_least.min(0.5)]
    };
    for (at, call) in of.calls.iter().enumerate() {
        let lag_ns = base.lag_ns[at];
        let lag = TimeRange { start_ns: call.time.start_ns - lag_ns, dur_ns: lag_ns };
        let ns = overlap_ns(&spans, lag).min(lag_ns);
        most.lag_ns[at] -= scaled(ns, at_most);
        least.lag_ns[at] -= scaled(ns, at_least);
        if call.kind == CallKind::Operator && overlap_ns(&spans, call.time) == call.time.dur_ns {
            most.call_ns[at] = scaled(base.call_ns[at], 1.0 - at_most);
            least.call_ns[at] = scaled(base.call_ns[at], 1.0 - at_least);
        }
    }
    let (text, change) = words(of, has_workers, [ms, count, rest_ms], [enough, workers]);
    Some(tally.found(text, change, [least, most]))
}

/// The finding and the change, for these milliseconds and calls per step, the milliseconds elsewhere, and the workers that are enough
/// and those that are advised.
fn words(
    of: &Recorded,
    has_workers: bool,
    [ms, count, rest_ms]: [f64; 3],
    [enough, workers]: [f64; 2],
) -> (String, String) {
    let known = of
        .timeline
        .free_cores
        .map_or("the trace does not say how many are free".to_owned(), |free| {
            format!("free cores of this rank: {free}")
        });
    if has_workers {
        let text = format!(
            "the thread of the steps waits {ms:.2} ms per step for workers of the DataLoader, in {count:.1} calls; more of them need free \
             cores, or a disk or a network that they wait for; {known}"
        );
        return (
            text,
            "DataLoader(dataset, num_workers=<twice as many>, prefetch_factor=4)".to_owned(),
        );
    }
    let text = format!(
        "the thread of the steps spends {ms:.2} ms per step in the DataLoader, in {count:.1} calls, and {rest_ms:.2} ms elsewhere; \
         {enough:.0} workers keep up if each of them has a free core, or waits for a disk or a network; {known}"
    );
    let pinned = if of.on_device() { ", pin_memory=True" } else { "" };
    (
        text,
        format!("DataLoader(dataset, num_workers={workers:.0}, persistent_workers=True{pinned})"),
    )
}

/// How long any of the spans, which are sorted and apart, overlaps with a range.
pub(super) fn overlap_ns(spans: &[TimeRange], with: TimeRange) -> i64 {
    let first = spans.partition_point(|span| span.end_ns() <= with.start_ns);
    let near = spans[first..].iter().take_while(|span| span.start_ns < with.end_ns());
    near.map(|span| span.end_ns().min(with.end_ns()) - span.start_ns.max(with.start_ns)).sum()
}
