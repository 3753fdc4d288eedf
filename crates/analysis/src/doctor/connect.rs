//! Infers what each call and each piece of work had to wait for. A trace does not say it; the rules are those of
//! [`recorded`](super::recorded).
//!
//! Input: calls and work with their times. Output: the same with what each follows, and with the delays that stay when something
//! else decides.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use foldhash::HashMap;
use paceline_table::stats::median;

use super::names::{self, Class};
use super::recorded::{Call, CallKind, Recorded, Work, sort_by_key};

/// Work that begins later than this after work of another stream did not wait for it.
const SHORTLY_NS: i64 = 30_000;
/// Clocks of host and device differ by less than this.
const SLACK_NS: i64 = 2_000;
/// A launch that takes longer, into a queue of many kernels that have not begun, waits for room in it.
const SLOW_NS: i64 = 20_000;
const LONG_QUEUE: usize = 512;

impl Recorded<'_> {
    /// Finds the predecessor of each call, and the work that it waits for.
    pub(super) fn connect_calls(&mut self) {
        let mut running: BinaryHeap<Reverse<(i64, u32)>> = BinaryHeap::new();
        let mut last: Option<(i64, u32)> = None;
        for index in 0..self.calls.len() {
            let time = self.calls[index].time;
            while let Some(&Reverse(done)) = running.peek()
                && done.0 <= time.start_ns
            {
                running.pop();
                last = Some(done);
            }
            self.calls[index].before = last.map(|(_, call)| call);
            running.push(Reverse((time.end_ns(), index as u32)));
        }
        let mut ends: Vec<(i64, u32)> =
            self.works.iter().zip(0u32..).map(|(work, at)| (work.time.end_ns(), at)).collect();
        ends.sort_unstable();
        // The work that ended last in a range of time and was launched before it. Most waits end at once, so few are looked at.
        let ended = |from_ns: i64, to_ns: i64, calls: &[Call], works: &[Work]| {
            let until = ends.partition_point(|(end_ns, _)| *end_ns <= to_ns);
            let within = ends[..until].iter().rev().take_while(|(end_ns, _)| *end_ns > from_ns);
            within.map(|(_, at)| *at).take(64).find(|at| {
                let call = works[*at as usize].call.map(|call| calls[call as usize].time.start_ns);
                call.is_none_or(|launched_ns| launched_ns <= from_ns)
            })
        };
        for (index, is_full) in self.long_queues().into_iter().enumerate() {
            let call = self.calls[index];
            let (start_ns, end_ns) = (call.time.start_ns, call.time.end_ns());
            match call.kind {
                CallKind::Wait | CallKind::Allocate => {
                    self.calls[index].waits_for =
                        ended(start_ns, end_ns + SLACK_NS, &self.calls, &self.works);
                }
                CallKind::Operator | CallKind::Mark if !self.on_device() => {
                    let before_ns =
                        call.before.map_or(start_ns, |of| self.calls[of as usize].time.end_ns());
                    self.calls[index].after = ended(before_ns, start_ns, &self.calls, &self.works);
                }
                CallKind::Launch if is_full && call.time.dur_ns > SLOW_NS => {
                    self.calls[index].waits_for = ended(start_ns, end_ns, &self.calls, &self.works);
                }
                _ => {}
            }
        }
        // A call that copied, and returned after the copy had ended, waited for it. From pageable memory it returns when the last bytes
        // are staged, a little before the end.
        for (work, at) in self.works.iter().zip(0u32..) {
            let is_copy = matches!(work.class, Class::CopyIn { .. } | Class::CopyOut | Class::Move);
            if let (Some(call), true) = (work.call, is_copy) {
                let call = &mut self.calls[call as usize];
                let is_staged = matches!(work.class, Class::CopyIn { is_pageable: true })
                    && work.time.start_ns < call.time.end_ns();
                let has_ended = work.time.end_ns() <= call.time.end_ns() || is_staged;
                if has_ended && work.time.end_ns() > call.time.start_ns {
                    call.waits_for = Some(at);
                }
            }
        }
    }

    /// Whether each call launched work into a long queue.
    fn long_queues(&self) -> Vec<bool> {
        let mut is_long = vec![false; self.calls.len()];
        let mut streams: HashMap<i64, (Vec<i64>, Vec<u32>)> = HashMap::default();
        for work in &self.works {
            let (starts, calls) = streams.entry(work.stream).or_default();
            starts.push(work.time.start_ns);
            calls.extend(work.call);
        }
        for (mut starts, mut calls) in streams.into_values() {
            starts.sort_unstable();
            // Calls are numbered in order of time.
            calls.sort_unstable();
            for (launched, call) in calls.into_iter().enumerate() {
                let at_ns = self.calls[call as usize].time.start_ns;
                let begun = starts.partition_point(|start_ns| *start_ns <= at_ns);
                is_long[call as usize] |= launched >= begun + LONG_QUEUE;
            }
        }
        is_long
    }

    /// Sorts the work, and finds the predecessor of each piece.
    pub(super) fn connect_works(&mut self) {
        let calls = &self.calls;
        let begin_ns = |work: &Work| {
            let call_ns = work.call.map_or(i64::MIN, |call| calls[call as usize].time.start_ns);
            work.time.start_ns.max(call_ns)
        };
        let new = sort_by_key(&mut self.works, begin_ns);
        for call in &mut self.calls {
            call.waits_for = call.waits_for.map(|of| new[of as usize]);
            call.after = call.after.map(|of| new[of as usize]);
        }
        let (gap_ns, launch_ns) = self.connect_streams();
        self.follow_streams(gap_ns, launch_ns);
        self.connect_collectives();
        self.keep_delays(gap_ns, launch_ns);
    }

    /// Work follows its stream. Returns the usual gap between two pieces of work, and the usual delay from a launch into an idle
    /// stream.
    fn connect_streams(&mut self) -> (i64, i64) {
        let mut last_of: HashMap<i64, u32> = HashMap::default();
        let (mut gaps, mut launches) = (Vec::new(), Vec::new());
        for index in 0..self.works.len() {
            let work = self.works[index];
            let start_ns = work.time.start_ns;
            let before = last_of.insert(work.stream, index as u32);
            self.works[index].before = before;
            let end_ns = before.map(|of| self.works[of as usize].time.end_ns());
            let call_ns = work.call.map(|of| self.calls[of as usize].time.start_ns);
            match (end_ns, call_ns) {
                (Some(end), Some(call)) if end > call => gaps.push(start_ns - end),
                (_, Some(call)) => launches.push(start_ns - call),
                _ => {}
            }
        }
        let usual =
            |all: Vec<i64>| median(all.into_iter().filter(|ns| (0..SHORTLY_NS).contains(ns)));
        (usual(gaps).unwrap_or(1_000), usual(launches).unwrap_or(5_000))
    }

    /// Work that begins later than its stream and its launch explain follows work that ended shortly before on another stream.
    fn follow_streams(&mut self, usual_gap: i64, usual_launch: i64) {
        let mut running: BinaryHeap<Reverse<(i64, u32)>> = BinaryHeap::new();
        let mut ended: Option<(i64, u32)> = None;
        for index in 0..self.works.len() {
            let work = self.works[index];
            let start_ns = work.time.start_ns;
            while let Some(&Reverse(done)) = running.peek()
                && done.0 <= start_ns
            {
                running.pop();
                ended = Some(done);
            }
            let call_ns =
                work.call.map(|call| self.calls[call as usize].time.start_ns + usual_launch);
            let before_ns = work.before.map(|of| self.works[of as usize].time.end_ns() + usual_gap);
            let explained_ns = call_ns.max(before_ns).unwrap_or(i64::MIN);
            let follows = ended.filter(|(end_ns, other)| {
                start_ns > explained_ns.saturating_add(SLACK_NS)
                    && *end_ns > explained_ns
                    && start_ns - end_ns <= SHORTLY_NS
                    && self.works[*other as usize].stream != work.stream
            });
            if let Some((end_ns, other)) = follows {
                self.works[index].follow(0, other, start_ns - end_ns);
            }
            running.push(Reverse((work.time.end_ns(), index as u32)));
        }
    }

    /// A collective follows the computation launched before it, and the optimizer follows the collectives.
    fn connect_collectives(&mut self) {
        if !self.on_device() {
            return;
        }
        let mut launched: Vec<(i64, u32)> = Vec::new();
        for (work, at) in self.works.iter().zip(0u32..) {
            if let Some(call) = work.call {
                launched.push((self.calls[call as usize].time.start_ns, at));
            }
        }
        launched.sort_unstable();
        let ends: Vec<i64> = self.works.iter().map(|work| work.time.end_ns()).collect();
        let end_of = |of: u32| ends[of as usize];
        let mut computation: Option<u32> = None;
        // The collective that ended last, of those launched since the last optimizer step.
        let mut communication: Option<u32> = None;
        let mut in_optimizer = false;
        for (_, at) in launched {
            let work = self.works[at as usize];
            let start_ns = work.time.start_ns;
            if work.class == Class::Communication {
                if let Some(of) = computation.filter(|of| end_of(*of) <= start_ns) {
                    self.works[at as usize].follow(1, of, start_ns - end_of(of));
                }
                communication = Some(
                    communication.map_or(at, |of| if end_of(of) > end_of(at) { of } else { at }),
                );
                continue;
            }
            let is_in = self.is_launched_within(&work, names::OPTIMIZER);
            if is_in && !in_optimizer {
                if let Some(of) = communication.filter(|of| end_of(*of) <= start_ns) {
                    self.works[at as usize].follow(1, of, start_ns - end_of(of));
                }
                communication = None;
            }
            in_optimizer = is_in;
            if !matches!(work.class, Class::CopyIn { .. } | Class::CopyOut) {
                computation = Some(at);
            }
        }
    }

    /// The delays that stay when something else decides: those that were seen, but no longer than usual.
    fn keep_delays(&mut self, usual_gap: i64, usual_launch: i64) {
        for index in 0..self.works.len() {
            let work = self.works[index];
            let start_ns = work.time.start_ns;
            let since = |end_ns: i64| start_ns - end_ns;
            let gap = work.before.map(|of| since(self.works[of as usize].time.end_ns()));
            let launch = work.call.map(|of| since(self.calls[of as usize].time.start_ns));
            let after = [0, 1].map(|at| work.after[at].map(|_| work.after_ns[at]));
            // The decisive delay stays, so that a replay of the recording ends when the recording did.
            let least = [gap, launch, after[0], after[1]].into_iter().flatten().min().unwrap_or(0);
            let kept = |ns: i64, usual: i64| if ns == least { ns } else { ns.min(usual) };
            let of = &mut self.works[index];
            of.gap_ns = gap.map_or(0, |ns| kept(ns, usual_gap));
            of.launch_ns = launch.map_or(0, |ns| kept(ns, usual_launch));
            of.after_ns = of.after_ns.map(|ns| kept(ns, usual_gap));
        }
    }
}
