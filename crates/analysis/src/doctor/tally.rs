//! The sums and the findings of a finder on a rank.
//!
//! Input: calls and work that show a cause. Output: [`Found`]: the evidence, the lines of Python, and two plans with the cause
//! taken away.

use std::collections::HashMap;

use super::names::brief;
use super::recorded::{Call, Recorded, Work};
use super::replay::Plan;
use crate::timeline::{NameId, TimeRange};

/// A cause as one rank shows it.
pub(super) struct Found {
    /// A title instead of the cause's own.
    pub(super) title: Option<String>,
    /// The lines to write in the program.
    pub(super) change: String,
    /// The evidence in a sentence.
    pub(super) text: String,
    /// The names that take the time, and where it is longest.
    pub(super) tally: Tally,
    /// The most that a step can gain, if the replay does not know it.
    pub(super) room_ms: Option<f64>,
    /// The steps if the change does as little as can be expected of it.
    pub(super) least: Plan,
    /// The steps if the change does as much as can be expected of it.
    pub(super) most: Plan,
}

/// The sums of a finder over the steps that count: how often, for how long, by which names, and where it is longest.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) count: usize,
    pub(super) total_ns: i64,
    pub(super) what: HashMap<String, i64>,
    pub(super) longest: Option<TimeRange>,
    /// The time by line of the program, where the trace has stacks.
    pub(super) lines: HashMap<NameId, i64>,
}

impl Tally {
    /// A time before or in work that a line of the program launched.
    pub(super) fn add_of(&mut self, of: &Recorded, work: &Work, name: String, time: TimeRange) {
        let call = work.call.map(|call| &of.calls[call as usize]);
        let line = call.and_then(|call| of.context.code.line(call.lane, call.time.start_ns));
        if of.counts(work.step) {
            self.add(name, time, line);
        }
    }

    fn add(&mut self, name: String, time: TimeRange, line: Option<NameId>) {
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(time.dur_ns);
        *self.what.entry(name).or_default() += time.dur_ns;
        if self.longest.is_none_or(|longest| longest.dur_ns < time.dur_ns) {
            self.longest = Some(time);
        }
        if let Some(line) = line {
            *self.lines.entry(line).or_default() += time.dur_ns;
        }
    }

    /// The sums of the work of a rank for which `is_it` holds.
    pub(super) fn of_works(of: &Recorded, is_it: impl Fn(&Work) -> bool) -> Self {
        let mut tally = Self::default();
        of.works.iter().filter(|work| is_it(work)).for_each(|work| tally.add_work(of, work));
        tally
    }

    pub(super) fn add_work(&mut self, of: &Recorded, work: &Work) {
        self.add_of(of, work, brief(of.text(work.name)), work.time);
    }

    /// A time of the thread of the steps.
    pub(super) fn add_time(&mut self, of: &Recorded, name: String, time: TimeRange) {
        if of.counts(of.step_at(time.start_ns)) {
            let middle_ns = time.start_ns + time.dur_ns / 2;
            self.add(name, time, of.context.code.line_of_steps(middle_ns));
        }
    }

    /// The line of the program that takes most of the time.
    pub(super) fn line(&self) -> Option<NameId> {
        self.lines.iter().max_by_key(|(line, ns)| (**ns, **line)).map(|(line, _)| *line)
    }

    /// A call, under the name of the outermost operator of PyTorch around it.
    pub(super) fn add_call(&mut self, of: &Recorded, call: &Call) {
        let names = of.around(call).map(|frame| of.text(frame.name));
        let name = names.filter(|name| name.starts_with("aten::")).last();
        self.add_named(of, call, name.unwrap_or(of.text(call.name)));
    }

    /// A call, by its own name.
    pub(super) fn add_operator(&mut self, of: &Recorded, call: &Call) {
        self.add_named(of, call, of.text(call.name));
    }

    fn add_named(&mut self, of: &Recorded, call: &Call, name: &str) {
        if of.counts(of.step_at(call.time.start_ns)) {
            let line = of.context.code.line(call.lane, call.time.start_ns);
            self.add(name.to_owned(), call.time, line);
        }
    }

    /// Per step: how often, and how many milliseconds.
    pub(super) fn per_step(&self, of: &Recorded) -> (f64, f64) {
        (of.per_step(self.count as f64), of.per_step(self.total_ns as f64 / 1e6))
    }

    /// The finding, with this evidence and change.
    pub(super) fn found(
        self,
        text: String,
        change: impl Into<String>,
        [least, most]: [Plan; 2],
    ) -> Found {
        Found { title: None, change: change.into(), text, tally: self, room_ms: None, least, most }
    }
}

/// The longest time in which a host prepares a launch. A longer time before it has another cause, which no change of the launches
/// takes away: a lock, a message, work of the program itself.
const PREPARED_NS: i64 = 200_000;

/// The host's time before a launch without the part that prepared it.
pub(super) fn unprepared(lag_ns: i64) -> i64 {
    (lag_ns - PREPARED_NS).max(lag_ns.min(0))
}

/// A duration made shorter by a factor.
pub(super) fn scaled(ns: i64, by: f64) -> i64 {
    (ns as f64 * by).round() as i64
}
