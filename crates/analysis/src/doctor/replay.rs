//! A rank's steps replayed with something changed.
//!
//! A [`Plan`] says how long each call and each piece of work takes, and which are gone. The replay begins everything as soon
//! as its predecessors have ended ([`Recorded`]), and returns how long each step takes then. With the plan of the recording
//! itself, it returns the times of the recording.

use paceline_trace::IntervalSet;

use super::names::Class;
use super::recorded::{Call, CallKind, Event, Recorded, Work};
use crate::timeline::TimeRange;

/// The durations in a replay, and what is left out. Indices are those of [`Recorded::calls`] and [`Recorded::works`].
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// How long each piece of work takes.
    pub(super) work_ns: Vec<i64>,
    /// Work that is not done.
    pub(super) is_gone: Vec<bool>,
    /// Work that waits only for its stream and for the start of its step.
    pub(super) is_ahead: Vec<bool>,
    /// The host's time before each call.
    pub(super) lag_ns: Vec<i64>,
    /// How long each call takes, without the wait for work.
    pub(super) call_ns: Vec<i64>,
    /// Whether the call waits for work.
    pub(super) blocks: Vec<bool>,
}

impl Plan {
    /// Whether a piece of work still takes time.
    pub(super) fn has_work(&self, at: usize) -> bool {
        !self.is_gone[at] && self.work_ns[at] > 0
    }

    /// Takes a call away, and all but `lag_ns` of the host's time before it.
    pub(super) fn remove_call(&mut self, call: u32, lag_ns: i64) {
        let at = call as usize;
        (self.lag_ns[at], self.call_ns[at], self.blocks[at]) = (lag_ns, 0, false);
    }
}

/// From this number of steps on, the first one is special.
const SEVERAL_STEPS: usize = 3;

impl Recorded<'_> {
    /// How many steps no change is computed for. In the first of several steps, calls also wait for work that was launched before the
    /// recording.
    pub(super) fn first_steps(&self) -> usize {
        usize::from(self.on_device() && self.steps.len() >= SEVERAL_STEPS)
    }

    /// Takes back a change in the steps that no change is computed for.
    pub(super) fn keep_first(&self, changed: &mut Plan, now: &Plan) {
        if self.first_steps() == 0 {
            return;
        }
        let end_ns = self.steps[0].end_ns();
        let calls = self.calls.partition_point(|call| call.time.start_ns < end_ns);
        changed.lag_ns[..calls].copy_from_slice(&now.lag_ns[..calls]);
        changed.call_ns[..calls].copy_from_slice(&now.call_ns[..calls]);
        changed.blocks[..calls].copy_from_slice(&now.blocks[..calls]);
        for (at, work) in self.works.iter().enumerate() {
            if work.step.is_none_or(|step| step == 0) {
                changed.work_ns[at] = now.work_ns[at];
                changed.is_gone[at] = now.is_gone[at];
                changed.is_ahead[at] = now.is_ahead[at];
            }
        }
    }

    /// The plan of the recording.
    pub(super) fn as_recorded(&self) -> Plan {
        let end_ns = |call: u32| self.calls[call as usize].time.end_ns();
        let works = self.works.len();
        let lag = |call: &Call| {
            let follows = match call.after {
                Some(work) => Some(self.works[work as usize].time.end_ns()),
                None => call.before.map(end_ns),
            };
            follows.map_or(0, |end_ns| call.time.start_ns - end_ns)
        };
        let call = |call: &Call| match call.waits_for {
            // The time from the end of the work to the return.
            Some(work) => {
                let tail = call.time.end_ns() - self.works[work as usize].time.end_ns();
                tail.min(call.time.dur_ns)
            }
            None => call.time.dur_ns,
        };
        Plan {
            work_ns: self.works.iter().map(|work| work.time.dur_ns).collect(),
            is_gone: vec![false; works],
            is_ahead: vec![false; works],
            lag_ns: self.calls.iter().map(lag).collect(),
            call_ns: self.calls.iter().map(call).collect(),
            blocks: self.calls.iter().map(|call| call.waits_for.is_some()).collect(),
        }
    }

    /// How long each step takes with this plan, in milliseconds. A step ends when the next one has begun and all its work has
    /// ended, but for work beside the steps. The first one begins when all work of earlier steps has.
    pub(super) fn lengths_ms(&self, plan: &Plan) -> Vec<f64> {
        let mut begins: Vec<i64> = self.calls.iter().map(|call| call.time.start_ns).collect();
        let mut returns: Vec<i64> = self.calls.iter().map(|call| call.time.end_ns()).collect();
        let mut ends: Vec<i64> = self.works.iter().map(|work| work.time.end_ns()).collect();
        for event in &self.order {
            match *event {
                Event::Begin(at) => {
                    let at = at as usize;
                    let call = &self.calls[at];
                    let returned = call.before.map(|of| returns[of as usize]);
                    begins[at] = match (call.after.map(|of| ends[of as usize]), returned) {
                        (Some(work), before) => before.unwrap_or(work).max(work) + plan.lag_ns[at],
                        (None, Some(before)) => before + plan.lag_ns[at],
                        (None, None) => call.time.start_ns,
                    };
                    returns[at] = begins[at] + plan.call_ns[at].max(0);
                }
                Event::Return(at) => {
                    let at = at as usize;
                    if let (Some(work), true) = (self.calls[at].waits_for, plan.blocks[at]) {
                        returns[at] = returns[at].max(ends[work as usize] + plan.call_ns[at]);
                    }
                }
                Event::Work(at) => {
                    ends[at as usize] = self.end_of(at as usize, plan, &begins, &ends);
                }
            }
        }
        let marks = &self.marks.calls;
        let mut finish: Vec<i64> = marks.iter().map(|mark| begins[*mark as usize]).collect();
        finish[0] = finish[0].max(self.marks.done_ns);
        for (work, end_ns) in self.works.iter().zip(&ends).filter(|of| !of.0.is_beside) {
            let of_step = work.step.map_or(0, |step| step as usize + 1).min(finish.len() - 1);
            finish[of_step] = finish[of_step].max(*end_ns);
        }
        for at in 1..finish.len() {
            finish[at] = finish[at].max(finish[at - 1]);
        }
        finish.windows(2).map(|ends| (ends[1] - ends[0]) as f64 / 1e6).collect()
    }

    /// When a piece of work ends.
    fn end_of(&self, at: usize, plan: &Plan, begins: &[i64], ends: &[i64]) -> i64 {
        let work = &self.works[at];
        let stream = work.before.map(|of| ends[of as usize]);
        if plan.is_gone[at] {
            return stream
                .unwrap_or_else(|| work.call.map_or(work.time.start_ns, |of| begins[of as usize]));
        }
        let stream = stream.map(|end_ns| end_ns + work.gap_ns);
        let start_ns = if plan.is_ahead[at] {
            let begin = work
                .step
                .and_then(|step| self.marks.calls.get(step as usize))
                .map(|of| begins[*of as usize]);
            stream.max(begin)
        } else {
            let launch = work.call.map(|of| begins[of as usize] + work.launch_ns);
            let after = |at: usize| work.after[at].map(|of| ends[of as usize] + work.after_ns[at]);
            stream.max(launch).max(after(0)).max(after(1))
        };
        start_ns.unwrap_or(work.time.start_ns) + plan.work_ns[at]
    }

    /// The gain of each step by the changed plan over the present one, in milliseconds.
    pub(super) fn gains_ms(&self, now: &Plan, changed: &Plan) -> Vec<f64> {
        let (now, changed) = (self.lengths_ms(now), self.lengths_ms(changed));
        now.iter().zip(&changed).map(|(now, changed)| now - changed).collect()
    }

    /// How long the device does nothing of a kind in the mean step.
    pub(super) fn idle_ms(&self, is_busy: impl Fn(&Work) -> bool) -> f64 {
        let (begin_ns, end_ns) = (self.steps[self.first_steps()].start_ns, self.window().1);
        // The first step that counts begins when the work of those before it has ended.
        let earlier = self.works.iter().filter(|work| !self.counts(work.step) && !work.is_beside);
        let begin_ns = earlier.map(|work| work.time.end_ns()).fold(begin_ns, i64::max);
        // The device may be behind the host.
        let ends = self.works.iter().map(|work| work.time.end_ns());
        let end_ns = ends.fold(end_ns, i64::max);
        let whole = TimeRange::between(begin_ns, end_ns).since(begin_ns);
        let works = self.works.iter().filter(|work| is_busy(work));
        let busy = IntervalSet::union(works.map(|work| work.time.since(begin_ns)));
        self.per_step((whole.end_ns - busy.len_within_ns(whole)) as f64 / 1e6)
    }

    /// How much less the device computes in the mean step of a changed plan.
    pub(super) fn removed_ms(&self, now: &Plan, changed: &Plan) -> f64 {
        let work_ns = |of: &Plan, at: usize| if of.is_gone[at] { 0 } else { of.work_ns[at].max(0) };
        let computes = |at: &usize| self.works[*at].class != Class::Communication;
        let works = (0..self.works.len()).filter(computes);
        let removed: i64 = works.map(|at| work_ns(now, at) - work_ns(changed, at)).sum();
        self.per_step(removed as f64 / 1e6)
    }

    /// The calls of a kind.
    pub(super) fn calls_of(&self, kind: CallKind) -> impl Iterator<Item = (usize, &Call)> {
        self.calls.iter().enumerate().filter(move |(_, call)| call.kind == kind)
    }
}
