//! The innermost line of the user's own Python at a moment.
//!
//! Input: the calls of Python in a timeline, if it has stacks. Output: the name of the innermost one around a moment. Functions that were
//! open when the recording began are left out: PyTorch names the line at which they stood then, whatever they do later. Autograd's threads
//! run no Python: at that moment the thread of the steps waits in `backward()`, whose line counts.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::steps;
use crate::timeline::{NameId, TimeRange, Timeline, TrackId};

/// The calls of Python of all threads, by start.
#[derive(Default)]
pub(crate) struct Code {
    calls: Vec<(TrackId, TimeRange, NameId)>,
    /// The call around each.
    around: Vec<Option<u32>>,
    steps_lane: Option<TrackId>,
}

impl Code {
    pub(crate) fn of(timeline: &Timeline) -> Self {
        let mut calls: Vec<(TrackId, TimeRange, NameId)> =
            timeline.code.iter().map(|of| (of.lane, of.time, of.name)).collect();
        calls.sort_by_key(|(lane, time, _)| (*lane, time.start_ns, Reverse(time.end_ns())));
        // The first calls of a thread that lie in each other, until one to another file: the profiler's start, for example. What begins
        // within a step was not open.
        let first_ns = steps::of(timeline).first().map_or(i64::MAX, |step| step.time.start_ns + 1);
        let mut open_until: HashMap<TrackId, i64> = HashMap::new();
        calls.retain(|(lane, time, name)| {
            let until_ns = open_until.entry(*lane).or_insert(first_ns);
            let is_open = time.start_ns < *until_ns && timeline.names.text(*name).ends_with(')');
            *until_ns = if is_open { time.end_ns().min(first_ns) } else { i64::MIN };
            !is_open
        });
        let mut around = Vec::with_capacity(calls.len());
        let mut open: Vec<u32> = Vec::new();
        for ((lane, time, _), at) in calls.iter().zip(0u32..) {
            let is_over = |of: &mut u32| {
                let (other, around, _) = calls[*of as usize];
                other != *lane || around.end_ns() <= time.start_ns
            };
            while open.pop_if(is_over).is_some() {}
            around.push(open.last().copied());
            open.push(at);
        }
        Self { calls, around, steps_lane: steps::lane(timeline) }
    }

    /// The innermost line at a moment of a thread; `None` without stacks.
    pub(crate) fn line(&self, lane: TrackId, at_ns: i64) -> Option<NameId> {
        self.line_on(lane, at_ns).or_else(|| self.line_of_steps(at_ns))
    }

    /// The same on the thread of the steps.
    pub(super) fn line_of_steps(&self, at_ns: i64) -> Option<NameId> {
        self.line_on(self.steps_lane?, at_ns)
    }

    fn line_on(&self, lane: TrackId, at_ns: i64) -> Option<NameId> {
        let begun = self.calls.partition_point(|of| (of.0, of.1.start_ns) <= (lane, at_ns));
        let last = begun.checked_sub(1).map(|at| at as u32);
        let mut all = std::iter::successors(last, |at| self.around[*at as usize]);
        let found = all.find(|at| self.calls[*at as usize].1.end_ns() > at_ns)?;
        let (of, _, name) = self.calls[found as usize];
        (of == lane).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, MAIN, OTHER, timeline, us};
    use crate::timeline::Annotation;

    #[test]
    fn the_innermost_line_counts_and_autograd_has_that_of_the_steps() {
        let mut all = timeline(0).step(0, 0, 100);
        for (line, from, to) in [("a.py:1", 0, 90), ("a.py:2", 10, 40), ("a.py:3", 20, 30)] {
            let (name, time) = (all.names.intern(line), us(from, to));
            all.code.push(Annotation { name, time, lane: MAIN, is_device: false });
        }
        let code = Code::of(&all);
        let line = |lane, at_us: i64| code.line(lane, at_us * 1000).map(|of| all.names.text(of));
        let expected = ["a.py:1", "a.py:2", "a.py:3", "a.py:2", "a.py:1"].map(Some);
        assert_eq!([5, 15, 25, 35, 50].map(|at| line(MAIN, at)), expected);
        assert_eq!((line(OTHER, 25), line(MAIN, 95)), (Some("a.py:3"), None));
        assert_eq!(Code::of(&timeline(0)).line(MAIN, 5), None);
    }

    #[test]
    fn a_function_that_was_open_at_the_start_has_no_line() {
        let mut all = timeline(0).step(0, 0, 100);
        for (line, from, to) in [
            ("a.py:9 (<module>)", 0, 90),
            ("a.py:7 (main)", 0, 90),
            ("a.py:7", 1, 5),
            ("a.py:3 (augment)", 20, 40),
        ] {
            let (name, time) = (all.names.intern(line), us(from, to));
            all.code.push(Annotation { name, time, lane: MAIN, is_device: false });
        }
        let code = Code::of(&all);
        let line = |at_us: i64| code.line(MAIN, at_us * 1000).map(|of| all.names.text(of));
        assert_eq!([3, 10, 30].map(line), [Some("a.py:7"), None, Some("a.py:3 (augment)")]);
        // What begins within the first step was not open.
        all.code.retain(|of| all.names.text(of.name) != "a.py:7");
        let code = Code::of(&all);
        assert_eq!(code.line(MAIN, 30_000).map(|of| all.names.text(of)), Some("a.py:3 (augment)"));
    }
}
