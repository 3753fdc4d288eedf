//! The steps of a rank of PyTorch whose work is done by a device.
//!
//! The host is ahead of its device, so a moment of the host stands for the end of the work that it had launched until then: a
//! gradient is final when the last kernel is done that was launched before the host held the gradient for final. A step lasts
//! from the end of the work of the step before it to the end of its own. The time is taken out of it in which the
//! device only communicated.

use std::collections::HashMap;

use super::super::reducer::{finals, in_order, last_passes, sorted};
use super::{AloneStep, Gradient, Shortened};
use crate::hta::launched;
use crate::steps;
use crate::timeline::{DeviceWork, TimeRange, Timeline};
use paceline_trace::IntervalSet;

/// A piece of work, with the moment at which the host launched it.
struct Work {
    launched_ns: i64,
    time: TimeRange,
    communicates: bool,
}

/// The work of a device, in the order in which it was launched.
struct Device {
    work: Vec<Work>,
    /// For each piece of work, when all computation is done that was launched up to it.
    done_ns: Vec<i64>,
}

impl Device {
    fn of(timeline: &Timeline) -> Self {
        let calls = launched(timeline);
        let kernels = timeline.kernels.iter().filter(|of| of.work != DeviceWork::Sync);
        let mut work: Vec<Work> = kernels
            .map(|of| {
                let time = of.time;
                let call = of.correlation.and_then(|number| calls.get(&number));
                let call = call.map(|call| timeline.launches[*call as usize].time.start_ns);
                Work {
                    launched_ns: call.unwrap_or(time.start_ns),
                    time,
                    communicates: of.collective.is_some(),
                }
            })
            .collect();
        work.sort_by_key(|of| of.launched_ns);
        let mut latest = i64::MIN;
        let done_ns = work.iter().map(|of| {
            latest = latest.max(if of.communicates { i64::MIN } else { of.time.end_ns() });
            latest
        });
        let done_ns = done_ns.collect();
        Self { work, done_ns }
    }

    /// When the computation is done that was launched until this moment of the host.
    fn done_ns(&self, until_ns: i64) -> Option<i64> {
        let count = self.work.partition_point(|of| of.launched_ns <= until_ns);
        self.done_ns.get(count.checked_sub(1)?).copied().filter(|of| *of > i64::MIN)
    }

    /// The work that was launched within a span of the host.
    fn within(&self, begin_ns: i64, end_ns: i64) -> &[Work] {
        let [begin, end] =
            [begin_ns, end_ns].map(|at| self.work.partition_point(|of| of.launched_ns < at));
        &self.work[begin..end.max(begin)]
    }
}

/// The steps of the rank, by number.
pub(super) fn steps(timeline: &Timeline, known: Option<&[Gradient]>) -> HashMap<u64, AloneStep> {
    let (device, passes, sorted) = (Device::of(timeline), last_passes(timeline), sorted(timeline));
    let sizes: Option<Vec<u64>> = known.map(|all| all.iter().map(|of| of.num_elems).collect());
    let mut all = HashMap::new();
    let mut end_of_last = None;
    for step in steps::of(timeline) {
        let own = device.within(step.time.start_ns, step.time.end_ns());
        let Some(end_ns) = own.iter().map(|of| of.time.end_ns()).max() else {
            end_of_last = None;
            continue;
        };
        let first_ns = own.iter().map(|of| of.time.start_ns).min().unwrap_or(end_ns);
        let begin_ns = end_of_last.replace(end_ns).unwrap_or(first_ns);
        let of_step = || {
            let pass = passes.get(&step.number)?;
            let [computing, communicating] = [false, true].map(|kind| {
                let of_kind = own.iter().filter(|of| of.communicates == kind);
                IntervalSet::union(of_kind.map(|of| of.time.since(begin_ns)))
            });
            let clock = Shortened { begin_ns, out: communicating.difference(&computing) };
            let ready = match &sizes {
                Some(sizes) => in_order(sizes, finals(&sorted, pass))?,
                None => Vec::new(),
            };
            let ready =
                ready.into_iter().map(|at| device.done_ns(at)).collect::<Option<Vec<_>>>()?;
            let launched_ns = pass.time.start_ns;
            let pass_begin =
                own.iter().find(|of| !of.communicates && of.launched_ns >= launched_ns)?;
            let pass_ends = [pass_begin.time.start_ns, device.done_ns(pass.time.end_ns())?];
            Some(AloneStep::new(&clock, end_ns, pass_ends, ready))
        };
        all.extend(of_step().map(|of| (step.number, of)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::{Alone, Program};
    use super::*;
    use crate::common::{Build, timeline, us};
    use crate::timeline::{FinalGradient, Launch, TrackId};

    /// Each kernel is launched by a call of the host, at this moment.
    fn launch(of: &mut Timeline, at_us: &[i64]) {
        let name = of.names.intern("cudaLaunchKernel");
        for ((kernel, at_us), number) in of.kernels.iter_mut().zip(at_us).zip(1..) {
            kernel.correlation = Some(number);
            let (time, lane) = (us(*at_us, at_us + 1), TrackId(0));
            of.launches.push(Launch { name, time, lane, correlation: Some(number) });
        }
    }

    /// Two steps of a device that lags its host. In each, two kernels of the backward pass take 100 us, an all-reduce goes on
    /// for 30 us after them, and the update takes 20 us.
    fn lagging() -> Timeline {
        let mut of = timeline(0).step(0, 0, 40).step(1, 40, 80);
        for host in [0, 40] {
            let function = "autograd::engine::evaluate_function: A";
            for (begin, end) in [(10, 15), (16, 20)] {
                of = of.operator(function, host + begin, host + end);
            }
        }
        for begin in [100, 250] {
            of = of
                .compute("backward_a", begin, begin + 50)
                .compute("backward_b", begin + 50, begin + 100)
                .all_reduce(1, begin + 50, begin + 130)
                .compute("update", begin + 130, begin + 150);
        }
        launch(&mut of, &[11, 17, 18, 30, 51, 57, 58, 70]);
        let gradient = |at_us: i64, num_elems| FinalGradient { at_ns: at_us * 1000, num_elems };
        of.gradients = vec![gradient(14, 9), gradient(19, 3), gradient(54, 9), gradient(59, 3)];
        of
    }

    #[test]
    fn a_moment_of_the_host_is_the_end_of_what_it_had_launched() {
        let alone = Alone::of(&[lagging()]).unwrap();
        assert_eq!((alone.program, alone.num_traced, alone.steps.len()), (Program::Pytorch, 2, 2));
        let sizes: Vec<u64> = alone.gradients.unwrap().iter().map(|of| of.num_elems).collect();
        assert_eq!(sizes, [9, 3]);
        for step in &alone.steps {
            let found = [step.measured_ms, step.alone_ms, step.ready[0], step.ready[1]];
            let us = found.map(|ms| (ms * 1000.0).round());
            // 150 us; for 30 us of them the device only communicated.
            assert_eq!(us, [150.0, 120.0, 50.0, 100.0]);
            assert_eq!(step.backward.map(|ms| (ms * 1000.0).round()), [0.0, 100.0]);
        }
    }

    #[test]
    fn a_step_without_work_or_without_all_gradients_is_left_out() {
        let mut of = lagging().step(2, 80, 120);
        assert_eq!(Alone::of(std::slice::from_ref(&of)).unwrap().steps.len(), 2);
        of.gradients.pop();
        let alone = Alone::of(std::slice::from_ref(&of)).unwrap();
        assert_eq!((alone.steps.len(), alone.num_traced), (1, 3));
        of.launches.clear();
        // Nothing was launched within the steps of the host.
        let told = Alone::of(&[of]).unwrap_err();
        assert!(told.contains("no step has a backward pass"), "{told}");
    }
}
