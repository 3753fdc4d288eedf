//! The passes of a rank of a pipeline in a step, and the messages that they need.
//!
//! Input: a timeline. Output: [`Pass`]es and the rank's list of actions, messages included. PyTorch names the actions of its newer
//! schedules (`PP:2F0`). In those of `Schedule1F1B` and `ScheduleGPipe` a pass lies between two calls that send or receive, and is
//! backward if autograd runs in it; each kind takes the micro-batches in order.

use std::collections::HashMap;

use paceline_schedule::{Action, Entry, Kind, Placement};

use crate::doctor::collectives::elem_bytes;
use crate::hta::backend_of;
use crate::ranks::clock::RankClock;
use crate::steps;
use crate::timeline::{TimeRange, Timeline};

/// A wait that is shorter is none: the message was there. In nanoseconds.
const LEAST_WAIT_NS: i64 = 200_000;

/// A pass. Times are nanoseconds of the reference clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pass {
    /// When the rank had nothing to do before it.
    pub(super) asked_ns: i64,
    /// When its first operator began.
    pub(super) first_ns: i64,
    /// When its message was there.
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
    /// When its message could be received, in a rehearsal.
    pub(super) posted_ns: i64,
    /// When its message had arrived; `None` if it was there before anybody waited for it.
    pub(super) arrived_ns: Option<i64>,
    /// The bytes of its message, if the trace has shapes.
    pub(super) bytes: Option<u64>,
    /// How long the rank waited before it until its own messages had left.
    pub(super) held_ns: i64,
}

/// The events of a rank that tell about its pipeline, each list sorted by start.
#[derive(Default)]
pub(super) struct HostEvents {
    /// Actions that PyTorch names.
    spans: Vec<(TimeRange, Entry)>,
    /// Calls that hand operations to the transport.
    calls: Vec<TimeRange>,
    /// Work of the thread that runs the steps, and of autograd.
    work: Vec<(TimeRange, bool)>,
    /// Messages that are received, and their bytes.
    received: Vec<(TimeRange, Option<u64>)>,
    /// The ends of the transport's other operations.
    left: Vec<i64>,
    /// The ends of all of them.
    ended: Vec<i64>,
    /// Whether sends are only waited for after all passes of a kind, as `ScheduleGPipe` does, which has spans of this name.
    awaits_all: bool,
}

/// The part of a list, sorted by start, that begins in this time.
pub(super) fn within<T>(all: &[T], time: TimeRange, start_ns: impl Fn(&T) -> i64) -> &[T] {
    let at = |ns: i64| all.partition_point(|of| start_ns(of) < ns);
    &all[at(time.start_ns)..at(time.end_ns())]
}

/// The call that receives a message.
struct Posted {
    time: TimeRange,
    /// When the rank was done with the pass before it. A rehearsal receives from then on.
    since_ns: i64,
}

/// The meaning of an operator for a pipeline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Call,
    Send,
    Receive,
    Autograd,
    Work,
}

fn role(name: &str) -> Role {
    match name {
        _ if name.starts_with("c10d::") || name == "record_param_comms" => Role::Call,
        _ if backend_of(name).is_some() && name.contains("recv") => Role::Receive,
        _ if backend_of(name).is_some() => Role::Send,
        _ if name.starts_with("autograd::engine::evaluate_function") => Role::Autograd,
        _ => Role::Work,
    }
}

impl HostEvents {
    /// `None` if the trace has no steps, no messages, or kernels: the times of a device's passes are not those of the host.
    pub(super) fn of(timeline: &Timeline, clock: &RankClock) -> Option<Self> {
        let lane = steps::lane(timeline)?;
        let roles: Vec<Role> = timeline.names.iter().map(role).collect();
        let time =
            |of: TimeRange| TimeRange::between(clock.align(of.start_ns), clock.align(of.end_ns()));
        let mut host = Self::default();
        for of in &timeline.operators {
            let (role, time) = (roles[of.name.0 as usize], time(of.time));
            match role {
                Role::Call if of.lane == lane => host.calls.push(time),
                Role::Autograd => host.work.push((time, true)),
                Role::Work if of.lane == lane => host.work.push((time, false)),
                Role::Receive => {
                    let said = of.collective.map(|at| &timeline.collectives[at as usize]);
                    let bytes = said
                        .and_then(|of| of.in_elems?.checked_mul(elem_bytes(of.dtype.as_deref()?)?));
                    host.received.push((time, bytes));
                    host.ended.push(time.end_ns());
                }
                Role::Send => {
                    host.left.push(time.end_ns());
                    host.ended.push(time.end_ns());
                }
                _ => {}
            }
        }
        let annotations = timeline.annotations.iter().filter(|of| !of.is_device && of.lane == lane);
        for of in annotations {
            let name = timeline.names.text(of.name);
            host.awaits_all |= name == "Forward 0";
            let entry = name.strip_prefix("PP:").map(Entry::of_cell).and_then(|of| of.ok()?);
            host.spans.extend(entry.map(|entry| (time(of.time), entry)));
        }
        host.spans.sort_by_key(|of| of.0);
        host.calls.sort_unstable();
        host.work.sort_unstable();
        host.received.sort_unstable();
        host.left.sort_unstable();
        host.ended.sort_unstable();
        let receives = roles.contains(&Role::Receive);
        (receives && !timeline.has_device_work()).then_some(host)
    }

    /// The list of a step, its passes, and how long the rank waited after them until its messages had left. A rank whose actions have
    /// no names has one stage, the one of its place in the line.
    pub(super) fn passes(
        &self,
        step: TimeRange,
        (line, stage): (&Placement, usize),
    ) -> (Vec<Entry>, Vec<Pass>, i64) {
        let mut spans = within(&self.spans, step, |of| of.0.start_ns).to_vec();
        if self.spans.is_empty() {
            spans = self.unnamed(step, line, stage);
        }
        let mut posted: HashMap<Action, Posted> = HashMap::new();
        let mut passes: Vec<Pass> = Vec::new();
        let mut held_ns = 0i64;
        for (time, entry) in &spans {
            let before = passes.len();
            match *entry {
                Entry::One(Action {
                    kind: Kind::WaitSendForward | Kind::WaitSendBackward, ..
                }) => {
                    let is_wait = time.dur_ns >= LEAST_WAIT_NS;
                    held_ns = held_ns.saturating_add(if is_wait { time.dur_ns } else { 0 });
                }
                Entry::One(action) if action.kind.computes() => {
                    passes.push(self.pass(*time, &posted, action));
                }
                Entry::One(action) => {
                    let done_ns = passes.last().map_or(step.start_ns, |of| of.end_ns);
                    let since_ns = done_ns.saturating_add(held_ns);
                    posted.insert(action, Posted { time: *time, since_ns });
                }
                Entry::Overlapped(first, second) => {
                    let middle_ns = self.middle(*time);
                    let [before, after] = [(time.start_ns, middle_ns), (middle_ns, time.end_ns())]
                        .map(|(start_ns, end_ns)| TimeRange::between(start_ns, end_ns));
                    passes.push(self.pass(before, &posted, first));
                    passes.push(self.pass(after, &posted, second));
                }
            }
            if let Some(pass) = passes.get_mut(before) {
                pass.held_ns = std::mem::take(&mut held_ns);
            }
        }
        (spans.into_iter().map(|of| of.1).collect(), passes, held_ns)
    }

    /// A pass in this time, whose message has been asked for as said.
    fn pass(&self, time: TimeRange, posted: &HashMap<Action, Posted>, action: Action) -> Pass {
        let (asked_ns, end_ns) = (time.start_ns, time.end_ns());
        let first = self.work.partition_point(|of| of.0.start_ns < asked_ns);
        let first_ns = self.work.get(first).map_or(end_ns, |of| of.0.start_ns.min(end_ns));
        let start_ns = last_until(&self.ended, first_ns);
        let start_ns = start_ns.filter(|of| of.saturating_sub(asked_ns) >= LEAST_WAIT_NS);
        let kind = match action.kind {
            Kind::Forward => Kind::ReceiveForward,
            _ => Kind::ReceiveBackward,
        };
        let posted = posted.get(&Action { kind, ..action });
        let own = posted.map(|of| within(&self.received, of.time, |of| of.0.start_ns));
        let bytes = own.into_iter().flatten().filter_map(|of| of.1).reduce(u64::saturating_add);
        let posted_ns = posted.map_or(asked_ns, |of| of.since_ns);
        // Sends are waited for first, so the message may have been there when the last one had left.
        let left_ns = last_until(&self.left, first_ns).unwrap_or(i64::MIN);
        let arrived_ns = start_ns.filter(|of| of.saturating_sub(left_ns) >= LEAST_WAIT_NS);
        let start_ns = start_ns.unwrap_or(asked_ns);
        Pass { asked_ns, first_ns, start_ns, end_ns, posted_ns, arrived_ns, bytes, held_ns: 0 }
    }

    /// Where a forward pass ends and a backward pass begins.
    fn middle(&self, time: TimeRange) -> i64 {
        let work = within(&self.work, time, |of| of.0.start_ns);
        let backward = work.iter().find(|of| of.1).map_or(time.end_ns(), |of| of.0.start_ns);
        let ends = work.iter().map(|of| of.0.end_ns()).filter(|of| *of <= backward);
        ends.max().unwrap_or(backward)
    }

    /// The passes and messages of a step whose actions have no names.
    ///
    /// A send is waited for with the receive before the next pass, or after the next pass if that is of the same kind.
    fn unnamed(&self, step: TimeRange, line: &Placement, stage: usize) -> Vec<(TimeRange, Entry)> {
        let mut spans = Vec::new();
        let mut unawaited: Vec<Action> = Vec::new();
        let (mut next, mut before_ns, mut was_backward) = ([0, 0], step.start_ns, false);
        for (phase, is_backward) in self.phases(step) {
            let kind = if is_backward { Kind::Backward } else { Kind::Forward };
            let micro_batch = &mut next[usize::from(is_backward)];
            let action = Action::new(stage, kind, *micro_batch);
            *micro_batch += 1;
            let call = self.calls.partition_point(|of| of.start_ns < phase.start_ns);
            let called_ns = call.checked_sub(1).map_or(step.start_ns, |at| self.calls[at].end_ns());
            let asked = TimeRange::between(before_ns, phase.start_ns);
            let own = TimeRange::between(called_ns.max(before_ns), phase.end_ns());
            let (receive, send) = line.messages(&action);
            // A pass receives where its place in the line says so, or the ranks are not one pipeline.
            if receive.is_some() == within(&self.received, asked, |of| of.0.start_ns).is_empty() {
                return Vec::new();
            }
            spans.extend(receive.map(|receive| (asked, Entry::One(receive))));
            if was_backward != is_backward {
                spans.extend(waits(&mut unawaited, self.held(self.called(before_ns))));
            }
            spans.push((own, Entry::One(action)));
            if !self.awaits_all {
                spans.extend(waits(&mut unawaited, self.held(phase.end_ns())));
            }
            spans.extend(send.map(|send| (own, Entry::One(send))));
            unawaited.extend(send);
            (before_ns, was_backward) = (phase.end_ns(), is_backward);
        }
        spans.extend(waits(&mut unawaited, self.held(self.called(before_ns))));
        spans
    }

    /// The end of the next call.
    fn called(&self, from_ns: i64) -> i64 {
        let next = self.calls.partition_point(|of| of.start_ns < from_ns);
        self.calls.get(next).map_or(from_ns, |of| of.end_ns())
    }

    /// The time until the last message that has left before the next call.
    fn held(&self, from_ns: i64) -> TimeRange {
        let next = self.calls.partition_point(|of| of.start_ns < from_ns);
        let until_ns = self.calls.get(next).map_or(from_ns, |of| of.start_ns);
        let left_ns = last_until(&self.left, until_ns).unwrap_or(from_ns);
        TimeRange::between(from_ns, left_ns.max(from_ns))
    }

    /// The passes of a step, and whether each is backward.
    fn phases(&self, step: TimeRange) -> impl Iterator<Item = (TimeRange, bool)> {
        let mut phases: Vec<(TimeRange, bool)> = Vec::new();
        let mut is_open = false;
        let mut calls = within(&self.calls, step, |of| of.start_ns).iter().peekable();
        for (time, is_backward) in within(&self.work, step, |of| of.0.start_ns) {
            while calls.next_if(|call| call.start_ns < time.start_ns).is_some() {
                is_open = false;
            }
            // A wait for a send is over: what follows makes the next message.
            let end_ns = phases.last().map_or(i64::MAX, |of| of.0.end_ns());
            let left_ns = last_until(&self.left, time.start_ns).unwrap_or(i64::MIN);
            is_open &= left_ns < end_ns.saturating_add(LEAST_WAIT_NS);
            match phases.last_mut().filter(|_| is_open) {
                // What autograd calls is part of it.
                Some((phase, of)) if of == is_backward || *of && time.start_ns < phase.end_ns() => {
                    *phase = TimeRange::between(phase.start_ns, phase.end_ns().max(time.end_ns()));
                }
                _ => phases.push((*time, *is_backward)),
            }
            is_open = true;
        }
        phases.truncate(phases.iter().rposition(|of| of.1).map_or(0, |last| last + 1));
        let mut lengths: Vec<i64> =
            phases.iter().filter(|of| !of.1).map(|of| of.0.dur_ns).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        let micro_batches = phases.len() - lengths.len();
        // Between passes, PyTorch makes tensors for messages: shorter than any pass.
        let shortest_ns = lengths.get(micro_batches.wrapping_sub(1)).copied().unwrap_or(0);
        phases.into_iter().filter(move |of| of.1 || of.0.dur_ns >= shortest_ns)
    }
}

/// The last of these moments, sorted, until then.
fn last_until(all: &[i64], until_ns: i64) -> Option<i64> {
    let at = all.partition_point(|of| *of <= until_ns).checked_sub(1)?;
    Some(all[at])
}

/// The waits for these sends. All of the time is that of the first one.
fn waits(sends: &mut Vec<Action>, mut time: TimeRange) -> Vec<(TimeRange, Entry)> {
    let wait = |send: Action| {
        let rest = TimeRange::between(time.end_ns(), time.end_ns());
        let own = std::mem::replace(&mut time, rest);
        let kind = match send.kind {
            Kind::SendForward => Kind::WaitSendForward,
            _ => Kind::WaitSendBackward,
        };
        (own, Entry::One(Action { kind, ..send }))
    };
    sends.drain(..).map(wait).collect()
}
