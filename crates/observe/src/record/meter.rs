//! Measures a step: turns spans and records of operations into times that add up.

use paceline_collectives::{Group, OpRecord, OpTimes, Purpose};
use paceline_strategies::{ActionTimes, span};
use paceline_trace::{IntervalSet, Span, SpanTrack};

use crate::record::gathers;
use crate::record::readiness::{AlikeSteps, Moments};
use crate::record::samples::{StagedStep, StepSample};
use crate::record::times::StepTimes;

/// The spans in which the main thread computes, or the device does.
const COMPUTING: [&str; 4] = [span::FORWARD, span::BACKWARD, span::GRAD_SYNC, span::OPTIMIZER];

/// The work of a device in a step; empty if the host computes.
#[derive(Clone, Debug, Default)]
pub struct DeviceWork {
    /// When the step's batches were copied to the device.
    pub copies: Vec<Span>,
    /// The time of the host for putting work into the stream of the kernels.
    pub launching_ns: u64,
}

/// Turns the records of a step into times.
#[derive(Debug, Default)]
pub struct Meter {
    records: Vec<OpRecord>,
    /// Operations that a step has submitted for the next one.
    ahead: Vec<OpRecord>,
    /// The last step.
    last: Span,
    /// Operations without a record, because a step had too many.
    pub(super) num_lost: u64,
    alike: AlikeSteps,
}

impl Meter {
    /// Reads a group's records of the step.
    pub fn read(&mut self, group: &Group) {
        self.num_lost += group.fresh_records(&mut self.records);
    }

    /// The records of the step.
    pub fn records(&self) -> &[OpRecord] {
        &self.records
    }

    /// Means over the measured steps that are alike.
    pub fn alike(&self) -> AlikeSteps {
        self.alike.clone().mean()
    }

    /// Discards the group's records since the last step, which belong to no step, except operations that it has submitted: for the
    /// next step, or messages that arrived late.
    pub fn forget(&mut self, group: &Group) {
        self.records.clear();
        group.fresh_records(&mut self.records);
        let Span { start_ns, end_ns } = self.last;
        self.records.retain(|record| (start_ns..end_ns).contains(&record.times.submitted_ns));
        self.records.splice(..0, self.ahead.drain(..));
    }

    /// The times of the step that `whole` spans, from the main track's spans and the records. `counted` has the rank's actions in
    /// a pipeline; without it, the step does not enter the means of operations and gradients.
    pub fn times(
        &mut self,
        whole: Span,
        data_ns: u64,
        device: &DeviceWork,
        track: &SpanTrack,
        counted: Option<&[ActionTimes]>,
    ) -> StepTimes {
        let next_ns = gathers::next_step_ns(track);
        self.ahead.extend(self.records.extract_if(.., |of| of.times.submitted_ns >= next_ns));
        self.last = whole;
        let exposed = IntervalSet::union(track.named(span::EXPOSED));
        let sync = IntervalSet::union(track.named(span::GRAD_SYNC)).difference(&exposed);
        let busy = |name: &str| {
            IntervalSet::union(track.named(name)).difference(&exposed).difference(&sync)
        };
        let (forward, backward) = (busy(span::FORWARD), busy(span::BACKWARD));
        let optimizer = busy(span::OPTIMIZER);
        let computing = IntervalSet::union(COMPUTING.iter().flat_map(|name| track.named(name)))
            .difference(&exposed);
        // The few bytes of the loss wait for the slowest rank while all compute, and say nothing about the strategy.
        let of_strategy = self.records.iter().filter(|record| record.purpose != Purpose::Loss);
        let communicating = IntervalSet::union(of_strategy.map(|record| Span {
            start_ns: record.times.started_ns,
            end_ns: record.times.finished_ns,
        }));
        // An operation of the last step may have begun before this step.
        let communicating = communicating.intersection(&IntervalSet::union([whole]));
        let waiting = IntervalSet::union(self.records.iter().map(|record| Span {
            start_ns: record.times.started_ns,
            end_ns: record.times.present_ns,
        }));
        let total = |part: fn(&OpTimes) -> u64| self.records.iter().map(|r| part(&r.times)).sum();
        let sent = self.records.iter().filter(|record| record.ranks > 1);
        let times = StepTimes {
            step: whole.len_ns(),
            data: data_ns,
            to_device: busy(span::TO_DEVICE).len_ns(),
            copying: IntervalSet::union(device.copies.iter().copied()).len_ns(),
            launching: device.launching_ns,
            forward: forward.len_ns(),
            backward: backward.len_ns(),
            sync: sync.len_ns(),
            optimizer: optimizer.len_ns(),
            exposed: exposed.len_ns(),
            exposed_wait: waiting.intersection(&exposed).len_ns(),
            hidden: communicating.intersection(&computing).len_ns(),
            communicating: communicating.len_ns(),
            wait: total(OpTimes::wait_ns),
            moving: total(OpTimes::move_ns),
            late: total(|times| times.late_ns),
            ops: self.records.len() as u64,
            bytes: sent.map(|record| record.bytes as u64).sum(),
        };
        if let Some(actions) = counted {
            self.keep(whole, &times, track, &computing, actions);
        }
        times
    }

    /// Adds a step to the means of operations and gradients, and to the single steps kept.
    fn keep(
        &mut self,
        whole: Span,
        times: &StepTimes,
        track: &SpanTrack,
        computing: &IntervalSet,
        actions: &[ActionTimes],
    ) {
        let begin_ns = whole.start_ns;
        // The ledger of a pipeline has its messages, which end in any order.
        let others = self.records.iter().filter(|of| !of.kind.is_point_to_point()).copied();
        let mut records: Vec<OpRecord> = others.collect();
        records.sort_by_key(|of| of.times.submitted_ns);
        let moments = Moments::of(begin_ns, &records, track, computing);
        let is_alike = self.alike.add(&moments, &records);
        let &StepTimes { exposed, exposed_wait, sync, .. } = times;
        let staged = || StagedStep::new(whole, times.data, actions, track);
        self.alike.samples.push(|| StepSample {
            number: 0,
            begin_ns,
            is_alike,
            exposed,
            waiting: exposed_wait,
            sync,
            moments: if is_alike { moments } else { moments.without_lists() },
            staged: (!actions.is_empty()).then(staged),
        });
    }
}

#[cfg(test)]
mod tests {
    use paceline_collectives::OpKind;

    use super::*;
    use crate::record::op_moments::tests::record;

    fn span(start_ns: u64, end_ns: u64) -> Span {
        Span { start_ns, end_ns }
    }

    #[test]
    fn the_times_of_a_step_add_up() {
        let mut track = SpanTrack::with_capacity(10);
        track.push(span::FORWARD, span(0, 100));
        track.push(span::BACKWARD, span(100, 300));
        track.push(span::EXPOSED, span(250, 260));
        track.push(span::GRAD_SYNC, span(260, 265));
        track.push(span::EXPOSED, span(300, 340));
        track.push(span::OPTIMIZER, span(340, 350));
        let mut meter = Meter::default();
        meter.records.push(record(Purpose::Other, [140, 150, 255, 320]));
        let times = meter.times(span(0, 360), 7, &DeviceWork::default(), &track, Some(&[]));
        assert_eq!((times.step, times.data), (360, 7));
        assert_eq!((times.forward, times.backward, times.optimizer), (100, 185, 10));
        assert_eq!((times.sync, times.exposed, times.hidden), (5, 50, 140));
        assert_eq!((times.communicating, times.rest()), (170, 10));
        assert_eq!((times.wait, times.moving, times.exposed_wait), (105, 65, 5));
        assert_eq!((times.ops, times.bytes), (1, 8));
    }

    #[test]
    fn messages_that_end_in_another_order_make_no_step_unlike() {
        let message = |submitted_ns, bytes| OpRecord {
            kind: OpKind::Recv,
            bytes,
            ..record(Purpose::Other, [submitted_ns, 20, 30, 40])
        };
        let bucket = |submitted_ns| record(Purpose::Bucket(0), [submitted_ns, 20, 30, 50]);
        let mut meter = Meter::default();
        for records in [
            vec![message(1, 8), message(2, 16), record(Purpose::Loss, [3, 4, 5, 6]), bucket(4)],
            vec![message(2, 16), bucket(4), record(Purpose::Loss, [3, 4, 5, 60])],
        ] {
            meter.records = records;
            let track = SpanTrack::with_capacity(1);
            meter.times(span(0, 100), 0, &DeviceWork::default(), &track, Some(&[]));
        }
        let AlikeSteps { count, num_unlike, bucket_ops, .. } = meter.alike();
        assert_eq!((count, num_unlike, bucket_ops), (2, 0, vec![1]));
    }

    #[test]
    fn the_loss_is_no_communication_of_the_strategy() {
        let mut track = SpanTrack::with_capacity(10);
        track.push(span::BACKWARD, span(0, 300));
        let mut meter = Meter::default();
        meter.records.push(record(Purpose::Loss, [6, 7, 90, 95]));
        meter.records.push(record(Purpose::Other, [100, 110, 120, 150]));
        let times = meter.times(span(0, 300), 0, &DeviceWork::default(), &track, Some(&[]));
        assert_eq!((times.communicating, times.hidden), (40, 40));
        assert_eq!((times.ops, times.wait), (2, 93));
    }
}
