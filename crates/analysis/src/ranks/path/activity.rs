//! When one rank computed, and in which phase it was.
//!
//! Input: a timeline. Output: the rank's busy time and named phases on the reference clock. This module knows
//! nothing of other ranks.

use std::collections::HashMap;

use super::PathSource;
use crate::backward;
use crate::hta::{Nested, backend_of, innermost};
use crate::ranks::clock::RankClock;
use crate::ranks::matched::is_collective_kernel;
use crate::steps::{self, Step};
use crate::timeline::{Annotation, DeviceWork, NameId, TimeRange, Timeline, TrackId};
use paceline_trace::IntervalSet;

/// A time range on the reference clock, with a name.
type Named<'a> = Nested<&'a str>;

/// The activity of one rank. Times are nanoseconds of the reference clock.
pub(super) struct Activity<'a> {
    /// The start of the first work. The intervals in `busy` are relative to it.
    origin_ns: i64,
    /// When the rank computed.
    busy: IntervalSet,
    /// The events in which it computed, by start.
    work: Vec<Named<'a>>,
    /// Annotations that lie in no other annotation except a step, and backward passes, by start, without overlap.
    phases: Vec<Named<'a>>,
}

/// A time range in which a rank was in one phase.
pub(super) struct Piece<'a> {
    pub(super) what: &'a str,
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
    pub(super) compute_ns: i64,
}

impl<'a> Activity<'a> {
    pub(super) fn of(timeline: &'a Timeline, clock: &RankClock, source: PathSource) -> Self {
        let named = |(time, name): (TimeRange, &'a str)| Named {
            start_ns: clock.align(time.start_ns),
            end_ns: clock.align(time.end_ns()),
            what: name,
        };
        let mut work: Vec<Named<'a>> = work(timeline, source).into_iter().map(named).collect();
        work.sort_unstable_by_key(|work| (work.start_ns, work.end_ns));
        let origin_ns = work.first().map_or(0, |first| first.start_ns);
        let spans = work.iter().map(|w| TimeRange::between(w.start_ns, w.end_ns).since(origin_ns));
        let busy = IntervalSet::union(spans);
        let mut phases: Vec<Named<'a>> = phases(timeline, source).into_iter().map(named).collect();
        phases.sort_unstable_by_key(|p| (p.start_ns, std::cmp::Reverse(p.end_ns)));
        let phases = disjoint(phases);
        Self { origin_ns, busy, work, phases }
    }

    /// How long the rank computed between two times, in nanoseconds.
    pub(super) fn compute_ns(&self, start_ns: i64, end_ns: i64) -> i64 {
        self.busy.len_within_ns(TimeRange::between(start_ns, end_ns).since(self.origin_ns)) as i64
    }

    /// The start of its first event and the end of its last.
    pub(super) fn extent(&self) -> Option<(i64, i64)> {
        let all = || self.work.iter().chain(&self.phases);
        let begin = all().map(|named| named.start_ns).min()?;
        Some((begin, all().map(|named| named.end_ns).max()?))
    }

    /// Cuts a time range where phases begin and end.
    pub(super) fn pieces(&self, start_ns: i64, end_ns: i64) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let mut at_ns = start_ns;
        let first = self.phases.partition_point(|phase| phase.end_ns <= start_ns);
        for phase in self.phases[first..].iter().take_while(|phase| phase.start_ns < end_ns) {
            let (from_ns, to_ns) = (phase.start_ns.max(at_ns), phase.end_ns.min(end_ns));
            if from_ns > at_ns {
                pieces.push(self.piece(None, at_ns, from_ns));
            }
            if to_ns > from_ns {
                pieces.push(self.piece(Some(phase.what), from_ns, to_ns));
            }
            at_ns = at_ns.max(to_ns);
        }
        if end_ns > at_ns {
            pieces.push(self.piece(None, at_ns, end_ns));
        }
        pieces
    }

    fn piece(&self, phase: Option<&'a str>, start_ns: i64, end_ns: i64) -> Piece<'a> {
        let what = phase.or_else(|| self.busiest(start_ns, end_ns)).unwrap_or("host");
        let compute_ns = self.compute_ns(start_ns, end_ns);
        Piece { what, start_ns, end_ns, compute_ns }
    }

    /// The name of the work that took most of a time range, if it took a tenth or more.
    fn busiest(&self, start_ns: i64, end_ns: i64) -> Option<&'a str> {
        let mut totals: HashMap<&'a str, i64> = HashMap::new();
        // Earlier work can reach into the range, but rarely does, so only the last event that starts before
        // the range is checked.
        let first = self.work.partition_point(|work| work.start_ns < start_ns).saturating_sub(1);
        for work in self.work[first..].iter().take_while(|work| work.start_ns < end_ns) {
            let inside_ns = work.end_ns.min(end_ns) - work.start_ns.max(start_ns);
            if inside_ns > 0 {
                *totals.entry(work.what).or_default() += inside_ns;
            }
        }
        let (name, ns) = totals.into_iter().max_by_key(|&(name, ns)| (ns, name))?;
        (ns >= (end_ns - start_ns) / 10).then_some(name)
    }
}

/// The events that count as computation. At each moment, the innermost operator or annotation of a thread runs.
fn work(timeline: &Timeline, source: PathSource) -> Vec<(TimeRange, &str)> {
    let names = &timeline.names;
    match source {
        PathSource::Kernels => {
            let is_work = |kernel: &&crate::timeline::Kernel| {
                kernel.work != DeviceWork::Sync
                    && kernel.collective.is_none()
                    && !is_collective_kernel(names.text(kernel.name))
            };
            timeline.kernels.iter().filter(is_work).map(|k| (k.time, names.text(k.name))).collect()
        }
        PathSource::Operators => {
            let operators = timeline.operators.iter();
            let events = operators.map(|of| (of.lane, of.time, of.name, of.collective.is_none()));
            running(timeline, events)
        }
        PathSource::Annotations => {
            let annotations = timeline.annotations.iter();
            running(timeline, annotations.map(|of| (of.lane, of.time, of.name, true)))
        }
    }
}

/// Whether an event is a collective, a call of one, or a whole step. Its time is not work of the rank.
fn is_call_of_collective(name: &str) -> bool {
    let is_call = ["c10d::", "record_param_comms"].iter().any(|prefix| name.starts_with(prefix));
    is_call || backend_of(name).is_some() || steps::number(name).is_some()
}

/// The times in which work runs, and its names. An event does not run while an event within it runs.
fn running(
    timeline: &Timeline,
    events: impl Iterator<Item = (TrackId, TimeRange, NameId, bool)>,
) -> Vec<(TimeRange, &str)> {
    let is_call: Vec<bool> = timeline.names.iter().map(is_call_of_collective).collect();
    let mut lanes: HashMap<TrackId, Vec<Nested<(NameId, bool)>>> = HashMap::new();
    for (lane, time, name, is_work) in events {
        let (start_ns, end_ns) = (time.start_ns, time.end_ns());
        let what = (name, is_work && !is_call[name.0 as usize]);
        lanes.entry(lane).or_default().push(Nested { start_ns, end_ns, what });
    }
    let mut pieces = Vec::new();
    for events in lanes.values_mut() {
        innermost(events, |piece| {
            let (name, is_work) = piece.what;
            if is_work {
                let dur_ns = piece.end_ns.saturating_sub(piece.start_ns);
                let time = TimeRange { start_ns: piece.start_ns, dur_ns };
                pieces.push((time, timeline.names.text(name)));
            }
        });
    }
    pieces
}

/// The annotations that show the phases of a rank. If kernels are analyzed and the device has annotations, these count. Otherwise
/// the annotations and backward passes of the thread with the steps count.
fn phases(timeline: &Timeline, source: PathSource) -> Vec<(TimeRange, &str)> {
    let names = &timeline.names;
    let on_device =
        source == PathSource::Kernels && timeline.annotations.iter().any(|a| a.is_device);
    let lane = steps::lane(timeline);
    let steps = steps::of(timeline);
    let ends = earliest_ends(&steps);
    let contains_step = |time: TimeRange| {
        let first = steps.partition_point(|step| step.time.start_ns < time.start_ns);
        ends.get(first).is_some_and(|&end_ns| end_ns <= time.end_ns())
    };
    let is_phase = |annotation: &&Annotation| {
        let here = annotation.is_device == on_device
            && (on_device || lane.is_none_or(|lane| annotation.lane == lane));
        let name = names.text(annotation.name);
        here && !is_call_of_collective(name) && !contains_step(annotation.time)
    };
    let named = timeline.annotations.iter().filter(is_phase);
    let mut phases: Vec<_> = named.map(|of| (of.time, names.text(of.name))).collect();
    if !on_device {
        phases.extend(backward::passes(timeline).iter().map(|pass| (pass.time, "backward")));
    }
    phases
}

/// For each step, in order of starts, the earliest end among this step and all after it.
fn earliest_ends(steps: &[Step]) -> Vec<i64> {
    let mut ends: Vec<i64> = steps.iter().map(|step| step.time.end_ns()).collect();
    for i in (1..ends.len()).rev() {
        ends[i - 1] = ends[i - 1].min(ends[i]);
    }
    ends
}

/// Removes overlaps: the annotation that began first stays whole, and a later one keeps only the part after
/// the end of the first.
fn disjoint(sorted: Vec<Named<'_>>) -> Vec<Named<'_>> {
    let mut kept: Vec<Named<'_>> = Vec::new();
    for mut named in sorted {
        let free_ns = kept.last().map_or(i64::MIN, |last| last.end_ns);
        named.start_ns = named.start_ns.max(free_ns);
        if named.end_ns > named.start_ns {
            kept.push(named);
        }
    }
    kept
}
