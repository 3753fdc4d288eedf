//! How far a device is behind its host when the first step begins.
//!
//! Input: the connected calls and work of a rank's steps. Output: when the device had done the work of earlier steps. Without it,
//! the first step would be longer by the lag of the device, as the recording shows only the end of each step's work.
//!
//! A recording may show kernels that were launched before it. If not, the first work shows the lag: it begins late, although
//! nothing that was recorded held it up.

use foldhash::HashMap;

use super::recorded::{Recorded, Work};
use crate::hta::launched;
use crate::timeline::{DeviceWork, Kernel};

/// A device that begins work later than this after its launch, and than this part of a step, had other work to do.
const LATE_NS: i64 = 50_000;
const LATE_PART: i64 = 100;

impl Recorded<'_> {
    /// When the device had done all work of the steps before the first one.
    pub(super) fn done_before(&self) -> i64 {
        let begin_ns = self.window().0;
        if !self.on_device() {
            return begin_ns;
        }
        if let Some(shown_ns) = self.earlier() {
            return begin_ns.max(shown_ns);
        }
        let next: HashMap<i64, &Work> = self.first_works(1).map(|of| (of.stream, of)).collect();
        let of_step = self.works.iter().filter(|work| work.step == Some(0) && !work.is_beside);
        let ends = of_step.map(|work| work.time.end_ns());
        let done_ns = ends.chain(self.steps.get(1).map(|step| step.start_ns)).max();
        let pause_ns = |work: &Work| {
            let next = next.get(&work.stream).zip(done_ns);
            next.map_or(0, |(next, done_ns)| next.time.start_ns - done_ns)
        };
        // A lag stays as it is if the host is the slower one. Then the device pauses before the work of each step.
        let done = |work: &Work| {
            let is_late = next.get(&work.stream).is_some_and(|next| self.is_late(next));
            work.time.start_ns - if is_late { pause_ns(work) } else { 0 }
        };
        let is_held_up = |work: &Work| work.before.is_some() || work.after != [None, None];
        let late = self.first_works(0).filter(|work| self.is_late(work) && !is_held_up(work));
        // Streams that begin the next step while the device does this one, such as that of copies of the next batch, do not wait for it.
        let (waiting, ahead): (Vec<&Work>, Vec<&Work>) = late.partition(|work| pause_ns(work) >= 0);
        // What holds up a stream within the step comes later.
        let hidden_ns = waiting.into_iter().map(done).min();
        let of_ahead = || ahead.into_iter().max_by_key(|work| pause_ns(work)).map(done);
        let hidden_ns = hidden_ns.or_else(of_ahead);
        hidden_ns.or_else(|| self.as_after_first(done_ns?)).map_or(begin_ns, |ns| begin_ns.max(ns))
    }

    /// A profiler lets the device end its work before it records. Then the host prepares the first work while the device has nothing
    /// to do, which it had if the device lags behind the next step: at most as much as that lag, until the first work begins.
    fn as_after_first(&self, done_ns: i64) -> Option<i64> {
        let lag_ns = done_ns - self.steps.get(1)?.start_ns;
        let first_ns = self.works.iter().map(|work| work.time.start_ns).min()?;
        Some(first_ns.min(self.window().0 + lag_ns))
    }

    /// The first work of a step on each of its streams.
    fn first_works(&self, step: u32) -> impl Iterator<Item = &Work> {
        let step_of = |of: u32| self.works[of as usize].step;
        self.works.iter().filter(move |work| {
            work.step == Some(step)
                && !work.is_beside
                && work.before.and_then(step_of) != Some(step)
        })
    }

    fn is_late(&self, work: &Work) -> bool {
        let (begin_ns, end_ns) = self.window();
        let step_ns = (end_ns - begin_ns) / self.steps.len() as i64;
        let call_ns = work.call.map(|call| self.calls[call as usize].time.end_ns());
        let is_past = |ns: i64| work.time.start_ns - ns > LATE_NS.max(step_ns / LATE_PART);
        call_ns.is_some_and(is_past)
    }

    /// When the device had done the recorded work that was launched before the first step, or before the recording, on the streams of
    /// that step; `None` without such work. Work of other streams, such as a copy of a checkpoint, holds up no step.
    fn earlier(&self) -> Option<i64> {
        let timeline = self.timeline;
        let calls = launched(timeline);
        let first: HashMap<i64, i64> =
            self.first_works(0).map(|work| (work.stream, work.time.start_ns)).collect();
        let end_ns = |kernel: &Kernel| {
            let first_ns = *first.get(&kernel.stream)?;
            let call = kernel.correlation.and_then(|number| calls.get(&number));
            let is_earlier = match call {
                Some(call) => timeline.launches[*call as usize].time.start_ns < self.window().0,
                None => kernel.time.start_ns < first_ns,
            };
            let is_work = kernel.work != DeviceWork::Sync;
            (is_work && is_earlier).then(|| kernel.time.end_ns().min(first_ns))
        };
        timeline.kernels.iter().filter_map(end_ns).max()
    }
}
