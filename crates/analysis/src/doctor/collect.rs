//! Reads the calls, the work and the operators of a rank's steps from its timeline.
//!
//! Input: a timeline. Output: the lists of a [`Recorded`], with the launch of each piece of work and the operators around each
//! call. This file does not know the order in which calls and work depend on each other.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use super::names::{self, Class};
use super::recorded::{Call, CallKind, Frame, Recorded, Work, sort_by_key};
use crate::hta::{backend_of, launched};
use crate::steps;
use crate::timeline::{DeviceWork, NameId, TimeRange, Timeline, TrackId};

/// Operators and spans that are known around a call, at most: each cause looks at all of them. Programs nest a few dozen.
const MAX_FRAMES: usize = 256;

/// The kernels that each call launched. Work belongs to one call, even if others have the same number.
fn works_of_calls(timeline: &Timeline) -> HashMap<u32, Vec<u32>> {
    let calls = launched(timeline);
    let mut works: HashMap<u32, Vec<u32>> = HashMap::default();
    for (kernel, index) in timeline.kernels.iter().zip(0u32..) {
        let call = kernel.correlation.and_then(|number| calls.get(&number));
        if let (Some(call), true) = (call, kernel.work != DeviceWork::Sync) {
            works.entry(*call).or_default().push(index);
        }
    }
    works
}

impl Recorded<'_> {
    /// The calls of the threads that launch work, and that work.
    pub(super) fn add_launches(&mut self) {
        let timeline = self.timeline;
        let works_of = works_of_calls(timeline);
        let mut threads: Vec<bool> = vec![false; timeline.lanes.len()];
        for call in works_of.keys() {
            threads[timeline.launches[*call as usize].lane.0 as usize] = true;
        }
        let (waits, allocates): (Vec<bool>, Vec<bool>) =
            timeline.names.iter().map(|name| (names::waits(name), names::allocates(name))).unzip();
        let mut kernels: Vec<(u32, u32)> = Vec::new();
        for (launch, index) in timeline.launches.iter().zip(0u32..) {
            if !threads[launch.lane.0 as usize] || !self.holds(launch.time.start_ns) {
                continue;
            }
            let name = launch.name.0 as usize;
            let works = works_of.get(&index);
            let kind = match works {
                Some(_) => CallKind::Launch,
                None if waits[name] => CallKind::Wait,
                None if allocates[name] => CallKind::Allocate,
                None => continue,
            };
            let call = self.calls.len() as u32;
            kernels.extend(works.into_iter().flatten().map(|kernel| (*kernel, call)));
            self.calls.push(Call::new(launch.name, kind, launch.time, launch.lane));
        }
        let new = self.sort_calls();
        let classes: Vec<Class> = timeline.names.iter().map(Class::of).collect();
        for (index, call) in kernels {
            let kernel = &timeline.kernels[index as usize];
            let call = new[call as usize];
            self.works.push(Work {
                name: kernel.name,
                class: classes[kernel.name.0 as usize],
                time: kernel.time,
                stream: kernel.stream,
                bytes: kernel.bytes.unwrap_or(0),
                collective: kernel.collective,
                call: Some(call),
                step: self.step_at(self.calls[call as usize].time.start_ns),
                ..Work::default()
            });
        }
        self.add_frames();
    }

    /// The operators that no other operator called, and the transfers.
    pub(super) fn add_operators(&mut self) {
        let timeline = self.timeline;
        let is_transfer: Vec<bool> =
            timeline.names.iter().map(|name| backend_of(name).is_some()).collect();
        let mut lanes: BTreeMap<TrackId, Vec<&crate::timeline::Operator>> = BTreeMap::new();
        for operator in timeline.operators.iter().filter(|of| self.holds(of.time.start_ns)) {
            lanes.entry(operator.lane).or_default().push(operator);
        }
        let numbers = steps::numbers(timeline);
        let mut transfers = Vec::new();
        for (lane, operators) in &mut lanes {
            operators.sort_by_key(|of| (of.time.start_ns, Reverse(of.time.end_ns())));
            let mut until_ns = i64::MIN;
            for operator in operators {
                let name = operator.name.0 as usize;
                if is_transfer[name] {
                    transfers.push((**operator, lane.0));
                } else if operator.time.start_ns >= until_ns && numbers[name].is_none() {
                    until_ns = operator.time.end_ns();
                    let (name, time) = (operator.name, operator.time);
                    self.calls.push(Call::new(name, CallKind::Operator, time, *lane));
                }
            }
        }
        self.sort_calls();
        for (operator, lane) in transfers {
            let begun =
                self.calls.partition_point(|call| call.time.start_ns <= operator.time.start_ns);
            self.works.push(Work {
                name: operator.name,
                class: Class::Communication,
                time: operator.time,
                stream: i64::from(lane),
                collective: operator.collective,
                call: begun.checked_sub(1).map(|call| call as u32),
                step: self.step_at(operator.time.start_ns),
                ..Work::default()
            });
        }
        self.add_frames();
    }

    /// Adds the marks of the steps, sorts the calls, and returns the new index of each.
    fn sort_calls(&mut self) -> Vec<u32> {
        let lane = steps::lane(self.timeline).unwrap_or_default();
        let (_, end_ns) = self.window();
        let starts = self.steps.iter().map(|step| step.start_ns).chain([end_ns]);
        let first_mark = self.calls.len();
        for start_ns in starts.collect::<Vec<_>>() {
            let time = TimeRange { start_ns, dur_ns: 0 };
            self.calls.push(Call::new(NameId(0), CallKind::Mark, time, lane));
        }
        let new =
            sort_by_key(&mut self.calls, |call| (call.time.start_ns, call.kind != CallKind::Mark));
        self.marks.calls = new[first_mark..].to_vec();
        new
    }

    /// Finds the operators and spans around each call.
    fn add_frames(&mut self) {
        let mut threads: Vec<bool> = vec![false; self.timeline.lanes.len()];
        for call in &self.calls {
            if let Some(is_thread) = threads.get_mut(call.lane.0 as usize) {
                *is_thread = true;
            }
        }
        let is_thread = |lane: TrackId| threads.get(lane.0 as usize).copied().unwrap_or(false);
        let operators = self.timeline.operators.iter().map(|of| (of.lane, of.time, of.name));
        let spans = self.timeline.annotations.iter().filter(|of| !of.is_device);
        let spans = spans.map(|of| (of.lane, of.time, of.name));
        let (begin_ns, end_ns) = self.window();
        let mut all: Vec<(TrackId, TimeRange, NameId)> = operators
            .chain(spans)
            .filter(|(lane, time, _)| {
                is_thread(*lane) && time.end_ns() > begin_ns && time.start_ns < end_ns
            })
            .collect();
        all.sort_by_key(|(lane, time, _)| (*lane, time.start_ns, Reverse(time.end_ns())));
        let mut of_lane: BTreeMap<TrackId, Vec<u32>> = BTreeMap::new();
        for (call, index) in self.calls.iter().zip(0u32..) {
            of_lane.entry(call.lane).or_default().push(index);
        }
        for chunk in all.chunk_by(|a, b| a.0 == b.0) {
            let mut calls = of_lane.remove(&chunk[0].0).unwrap_or_default().into_iter().peekable();
            let mut open: Vec<u32> = Vec::new();
            let mut next = chunk.iter().peekable();
            // Frames and calls of a thread, by start. A call is in all frames that are open when it begins, if not too many.
            loop {
                let frame_ns = next.peek().map(|of| of.1.start_ns);
                let call_ns = calls.peek().map(|of| self.calls[*of as usize].time.start_ns);
                let (at_ns, is_frame) = match (frame_ns, call_ns) {
                    (Some(frame), Some(call)) if frame <= call => (frame, true),
                    (_, Some(call)) => (call, false),
                    (Some(frame), None) => (frame, true),
                    (None, None) => break,
                };
                while let Some(last) = open.last()
                    && self.frames[*last as usize].time.end_ns() <= at_ns
                {
                    open.pop();
                }
                if is_frame {
                    let Some(&(_, time, name)) = next.next() else { break };
                    if open.len() == MAX_FRAMES {
                        continue;
                    }
                    let parent = open.last().copied();
                    open.push(self.frames.len() as u32);
                    self.frames.push(Frame { name, time, parent });
                } else {
                    let Some(call) = calls.next() else { break };
                    self.calls[call as usize].frame = open.last().copied();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hta::Options;
    use crate::read::parse;

    /// A step with calls that launch a kernel each, and all have the same number, within nested spans.
    fn repeated(num_calls: usize, depth: usize) -> Timeline {
        let event = |category: &str, name: &str, start: usize, end: usize, args: &str| {
            let dur = end - start;
            format!(
                "{{\"ph\":\"X\",\"cat\":\"{category}\",\"name\":\"{name}\",\"pid\":1,\"tid\":1,\"ts\":{start},\"dur\":{dur},\
                 \"args\":{{{args}}}}}"
            )
        };
        let end = depth + 10 * num_calls;
        let mut events = vec![event("user_annotation", "ProfilerStep#0", 0, end, "")];
        events.extend((1..depth).map(|at| event("user_annotation", "span", at, end, "")));
        for start in (depth..end).step_by(10) {
            let number = "\"correlation\":7,\"External id\":7,\"stream\":7";
            events.push(event("cuda_runtime", "cudaLaunchKernel", start, start + 4, number));
            events.push(event("kernel", "gemm", start + 5, start + 9, number));
        }
        parse(format!("[{}]", events.join(",")).as_bytes()).unwrap()
    }

    #[test]
    fn work_is_of_one_call_if_several_have_its_number() {
        let timeline = repeated(100, 1);
        assert_eq!(timeline.oddities.values().sum::<u64>(), 99, "{:?}", timeline.oddities);
        let recorded = Recorded::of(&timeline, 0, &Options::default()).unwrap();
        assert_eq!(recorded.works.len(), 100);
        let last = recorded.calls.iter().rposition(|call| call.kind == CallKind::Launch);
        assert!(recorded.works.iter().all(|work| work.call.map(|call| call as usize) == last));
    }

    #[test]
    fn a_call_knows_a_limited_number_of_frames() {
        for (depth, known) in [(10, 10), (1000, MAX_FRAMES)] {
            let timeline = repeated(2, depth);
            let recorded = Recorded::of(&timeline, 0, &Options::default()).unwrap();
            let call = recorded.calls.iter().find(|call| call.kind == CallKind::Launch).unwrap();
            assert_eq!(recorded.around(call).count(), known);
        }
    }
}
