//! Steps of a program that does not mark them: between its optimizer's steps or its loader's batches, or in the spans that the user
//! names.
//!
//! A timeline goes in. A [`Found`] comes out, with how sure it is: steps of one program launch about as much work each.

use paceline_table::stats::median;

use super::{Found, Step, repeats};
use crate::timeline::{LAUNCHES, NameId, TimeRange, Timeline, TrackId};

/// The least number of spans that make steps: with fewer, the parts of one step cannot be told from steps.
pub(super) const LEAST: usize = 3;
/// Steps are alike if their work differs from the median by at most this part of it.
const ALIKE: i64 = 20;

/// The most letters of a name that are shown.
const SHOWN: usize = 80;

/// The spans of a thread with one name, in order of time.
struct Spans {
    name: NameId,
    lane: TrackId,
    times: Vec<TimeRange>,
}

/// The steps of a trace that does not mark them; `None` if nothing in it repeats as steps do.
pub(super) fn unmarked(timeline: &Timeline) -> Option<Found> {
    let optimizer = spans(timeline, |name| name.starts_with("Optimizer.step"));
    let loader = spans(timeline, |name| name.starts_with("enumerate(DataLoader)"));
    // Two optimizers, or one that is called twice, in each step of a loader.
    let is_of_loader =
        optimizer.as_ref().zip(loader.as_ref()).is_some_and(|(optimizer, loader)| {
            let counts: Vec<usize> =
                loader.times.windows(2).map(|of| within(&optimizer.times, of[0], of[1])).collect();
            counts.len() >= 2 && counts[0] > 1 && counts.iter().all(|of| *of == counts[0])
        });
    let ends = |of: &Spans| of.times.iter().map(TimeRange::end_ns).collect::<Vec<_>>();
    let starts = |of: &Spans| of.times.iter().map(|time| time.start_ns).collect::<Vec<_>>();
    let by_optimizer = optimizer.filter(|_| !is_of_loader).and_then(|of| {
        between(timeline, &of, &ends(&of), "from the end of one to the end of the next")
    });
    by_optimizer
        .or_else(|| {
            let of = loader?;
            between(timeline, &of, &starts(&of), "from the start of one to the start of the next")
        })
        .or_else(|| repeats::of(timeline))
}

/// The steps in the spans that the user names. A number may follow the name, as in `step 12`.
pub(super) fn named(timeline: &Timeline, wanted: &str) -> Option<Found> {
    let is_it = |name: &str| {
        let number = name.strip_prefix(wanted);
        number.is_some_and(|of| of.chars().all(|c| c.is_ascii_digit() || "#:_-. ()[]".contains(c)))
    };
    let spans = spans(timeline, is_it)?;
    let steps = spans.times.iter().zip(0..).map(|(&time, number)| Step { number, time }).collect();
    let words = format!("Steps are the {} spans \"{wanted}\".", spans.times.len());
    Some(Found { steps, lane: spans.lane, is_last_cut: true, words })
}

fn within(times: &[TimeRange], from: TimeRange, to: TimeRange) -> usize {
    let at = |ns: i64| times.partition_point(|time| time.start_ns < ns);
    at(to.start_ns) - at(from.start_ns)
}

/// The spans of the host for whose names `is_it` holds, of the thread that has most of them. Of several names, the most frequent, but
/// names that differ by a number are one. PyTorch 1.x wrote spans as operators.
fn spans(timeline: &Timeline, is_it: impl Fn(&str) -> bool) -> Option<Spans> {
    let wanted: Vec<bool> = timeline.names.iter().map(is_it).collect();
    let annotations = timeline.annotations.iter().filter(|span| !span.is_device);
    let annotations = annotations.map(|of| (of.lane, of.name, of.time));
    let operators = timeline.operators.iter().map(|of| (of.lane, of.name, of.time));
    let is_wanted = |of: &(TrackId, NameId, TimeRange)| wanted[of.1.0 as usize];
    let mut all: Vec<_> = annotations.filter(is_wanted).collect();
    if all.is_empty() {
        all = operators.filter(is_wanted).collect();
    }
    let stem = |name: NameId| {
        timeline.names.text(name).trim_end_matches(|c: char| !c.is_ascii_alphabetic())
    };
    all.sort_by_key(|&(lane, name, time)| (lane, stem(name), time.start_ns));
    let groups = all.chunk_by(|a, b| (a.0, stem(a.1)) == (b.0, stem(b.1)));
    let most = groups.max_by_key(|group| group.len())?;
    let (lane, name, _) = most[0];
    let mut times: Vec<TimeRange> = Vec::new();
    for (_, _, time) in most {
        // Spans within a span of the same name are no steps of their own.
        if times.last().is_none_or(|last| last.end_ns() <= time.start_ns) {
            times.push(*time);
        }
    }
    Some(Spans { name, lane, times })
}

/// The steps between these moments, if most of them have about as much work.
fn between(timeline: &Timeline, of: &Spans, bounds_ns: &[i64], how: &str) -> Option<Found> {
    if bounds_ns.len() < LEAST {
        return None;
    }
    let names = &timeline.names;
    let calls = timeline.launches.iter().filter(|call| LAUNCHES.contains(&names.text(call.name)));
    let mut begins: Vec<i64> = calls.map(|call| call.time.start_ns).collect();
    let what = if begins.is_empty() { "operators" } else { "launches" };
    if begins.is_empty() {
        begins = timeline.operators.iter().map(|operator| operator.time.start_ns).collect();
    }
    begins.sort_unstable();
    let at = |ns: i64| begins.partition_point(|begin| *begin < ns) as i64;
    let counts: Vec<i64> = bounds_ns.windows(2).map(|of| at(of[1]) - at(of[0])).collect();
    let usual = median(counts.iter().copied()).filter(|count| *count > 0)?;
    let alike = counts.iter().filter(|of| (**of - usual).abs() <= 1.max(usual / ALIKE)).count();
    if 2 * alike < counts.len() {
        return None;
    }
    let name: String = timeline.names.text(of.name).chars().take(SHOWN).collect();
    let words = format!(
        "prof.step() marks no steps. They are taken from the spans \"{name}\", {how}: {alike} of {} steps have about the same number \
         of {what} ({usual}).{}",
        counts.len(),
        if 10 * alike < 9 * counts.len() { NOT_SURE } else { "" }
    );
    Some(Found { steps: steps_between(bounds_ns), lane: of.lane, is_last_cut: false, words })
}

/// The advice where steps are not sure.
pub(super) const NOT_SURE: &str =
    " That is not sure: call prof.step() after each step, or name a span with --step.";

/// The steps from each moment to the next.
pub(super) fn steps_between(bounds_ns: &[i64]) -> Vec<Step> {
    let times = bounds_ns.windows(2).map(|of| TimeRange::between(of[0], of[1]));
    times.zip(0..).map(|(time, number)| Step { number, time }).collect()
}
