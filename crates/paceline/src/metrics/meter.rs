//! What each step cost: from spans, marks and records of operations to times that add up.

use std::collections::BTreeMap;
use std::path::PathBuf;

use paceline_collectives::{Group, OpRecord, OpTimes};
use paceline_memory::{Allocator, Category};
use paceline_strategies::span;
use paceline_trace::{IntervalSet, Lane, Span};
use serde::{Deserialize, Serialize};

use crate::resources;

/// The times of one step on one rank, in nanoseconds. Those from `forward` to `exposed` are disjoint times
/// of the main thread; what is left of `step` is in none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// From the batch being there to the end of the optimizer.
    pub step: u64,
    /// Waiting for the batch, before the step.
    pub data: u64,
    /// Forward pass and loss.
    pub forward: u64,
    /// Backward pass, without synchronisation inside it.
    pub backward: u64,
    /// Arithmetic and copies that synchronisation adds.
    pub sync: u64,
    /// Optimizer.
    pub optimizer: u64,
    /// The main thread was blocked on communication.
    pub exposed: u64,
    /// Part of it: the operation itself waited for the slowest rank.
    pub exposed_wait: u64,
    /// Communication, but for the sums of the loss, ran while the main thread computed.
    pub hidden: u64,
    /// Communication, but for the sums of the loss, ran at all.
    pub communicating: u64,
    /// Communication waited for the slowest rank.
    pub wait: u64,
    /// Communication moved and reduced data.
    pub moving: u64,
    /// Operations.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl StepTimes {
    /// The main thread computed.
    pub fn compute(&self) -> u64 {
        self.forward + self.backward + self.sync + self.optimizer
    }

    /// The part of the step that no span accounts for.
    pub fn rest(&self) -> u64 {
        self.step.saturating_sub(self.compute() + self.exposed)
    }
}

/// Where an operation lay in its step, in nanoseconds since the step began: means over steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpMean {
    /// Size of the message.
    pub bytes: u64,
    /// Submitted: for a bucket, its gradients were final.
    pub ready: f64,
    /// Its turn came.
    pub sent: f64,
    /// All ranks had arrived.
    pub present: f64,
    /// The result was there.
    pub done: f64,
    /// Time of it during which the main thread computed.
    pub hidden: f64,
}

/// When a parameter's gradient was final, in nanoseconds since the step began: mean over steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadyMean {
    /// The parameter's number.
    pub param: usize,
    /// When.
    pub at: f64,
}

/// Sums over steps that are alike: as many operations and gradients as the first one.
#[derive(Debug, Default)]
struct Shape {
    steps: u64,
    num_ops: usize,
    /// None of them where there are too many.
    ops: Vec<OpMean>,
    ready: Vec<ReadyMean>,
    /// The operations that carry buckets, in order.
    bucket_ops: Vec<usize>,
    backward_begin: f64,
    backward_end: f64,
}

/// More operations than this are not followed one by one.
const MAX_OPS: usize = 512;

/// Turns what a step recorded into times.
#[derive(Debug)]
pub struct Meter {
    records: Vec<OpRecord>,
    /// Operations of steps that left no record, because there were too many.
    num_lost: u64,
    shape: Shape,
}

impl Meter {
    /// A meter with room for the records of a step.
    pub fn new() -> Self {
        Self { records: Vec::with_capacity(1000), num_lost: 0, shape: Shape::default() }
    }

    /// Reads a group's records of the step.
    pub fn read(&mut self, group: &Group) {
        self.num_lost += group.fresh_records(&mut self.records);
    }

    /// The records of the step.
    pub fn records(&self) -> &[OpRecord] {
        &self.records
    }

    /// What a group has done since belongs to no step.
    pub fn forget(&mut self, group: &Group) {
        group.fresh_records(&mut self.records);
        self.records.clear();
    }

    /// The times of the step that `whole` spans, from the main lane's spans and the records. Only
    /// steps that count enter the means of operations and gradients.
    pub fn times(&mut self, whole: Span, data_ns: u64, lane: &Lane, counts: bool) -> StepTimes {
        let exposed = IntervalSet::union(lane.named(span::EXPOSED));
        let sync = IntervalSet::union(lane.named(span::GRAD_SYNC)).difference(&exposed);
        let busy = |name: &str| {
            IntervalSet::union(lane.named(name)).difference(&exposed).difference(&sync)
        };
        let (forward, backward) = (busy(span::FORWARD), busy(span::BACKWARD));
        let optimizer = busy(span::OPTIMIZER);
        let computing = [span::FORWARD, span::BACKWARD, span::GRAD_SYNC, span::OPTIMIZER];
        let computing = IntervalSet::union(computing.iter().flat_map(|name| lane.named(name)))
            .difference(&exposed);
        // The few bytes of the loss wait for the slowest rank while all compute: that says nothing about
        // how well the strategy hides its own communication.
        let loss = lane.marked(span::LOSS_SENT).next();
        let loss = loss.and_then(|mark| first_after(&self.records, mark.at_ns));
        let of_strategy = self.records.iter().enumerate().filter(|(at, _)| Some(*at) != loss);
        let communicating = IntervalSet::union(of_strategy.map(|(_, record)| Span {
            start_ns: record.times.started_ns,
            end_ns: record.times.finished_ns,
        }));
        let waiting = IntervalSet::union(self.records.iter().map(|record| Span {
            start_ns: record.times.started_ns,
            end_ns: record.times.present_ns,
        }));
        let total = |part: fn(&OpTimes) -> u64| self.records.iter().map(|r| part(&r.times)).sum();
        let times = StepTimes {
            step: whole.len_ns(),
            data: data_ns,
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
            ops: self.records.len() as u64,
            bytes: self.records.iter().map(|record| record.bytes as u64).sum(),
        };
        if counts {
            self.shape.add(whole.start_ns, &self.records, lane, &computing);
        }
        times
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

/// The operation that was submitted right after a moment.
fn first_after(records: &[OpRecord], at_ns: u64) -> Option<usize> {
    records.iter().position(|record| record.times.submitted_ns >= at_ns)
}

impl Shape {
    fn add(&mut self, begin: u64, records: &[OpRecord], lane: &Lane, computing: &IntervalSet) {
        let num_ready = lane.marked(span::GRADIENT_READY).count();
        if self.steps == 0 {
            let num_ops = if records.len() <= MAX_OPS { records.len() } else { 0 };
            self.ops = vec![OpMean::default(); num_ops];
            let ready = lane.marked(span::GRADIENT_READY);
            self.ready = ready.map(|mark| ReadyMean { param: mark.id, at: 0.0 }).collect();
            let buckets = lane.marked(span::BUCKET_SENT);
            self.bucket_ops = buckets.filter_map(|mark| first_after(records, mark.at_ns)).collect();
            self.num_ops = records.len();
        }
        if records.len() != self.num_ops || num_ready != self.ready.len() {
            return;
        }
        self.steps += 1;
        let since = |ns: u64| ns.saturating_sub(begin) as f64;
        for (op, OpRecord { bytes, times, .. }) in self.ops.iter_mut().zip(records) {
            let span = Span { start_ns: times.started_ns, end_ns: times.finished_ns };
            op.bytes = *bytes as u64;
            op.ready += since(times.submitted_ns);
            op.sent += since(times.started_ns);
            op.present += since(times.present_ns);
            op.done += since(times.finished_ns);
            op.hidden += IntervalSet::union([span]).intersection(computing).len_ns() as f64;
        }
        for (ready, mark) in self.ready.iter_mut().zip(lane.marked(span::GRADIENT_READY)) {
            ready.at += since(mark.at_ns);
        }
        if let Some(backward) = lane.named(span::BACKWARD).max_by_key(|span| span.end_ns) {
            self.backward_begin += since(backward.start_ns);
            self.backward_end += since(backward.end_ns);
        }
    }

    /// From sums to means.
    fn mean(mut self) -> Self {
        let steps = self.steps.max(1) as f64;
        for op in &mut self.ops {
            for sum in [&mut op.ready, &mut op.sent, &mut op.present, &mut op.done, &mut op.hidden]
            {
                *sum /= steps;
            }
        }
        self.ready.iter_mut().for_each(|ready| ready.at /= steps);
        self.backward_begin /= steps;
        self.backward_end /= steps;
        self
    }
}

/// The entry of all categories together, beside those of each.
pub const TOTAL: &str = "total";

/// What one rank has to say at the end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RankReport {
    /// The steps that count, in order.
    pub steps: Vec<StepTimes>,
    /// The operations of a step, in order.
    pub ops: Vec<OpMean>,
    /// The gradients of a step, in the order in which they are final.
    pub ready: Vec<ReadyMean>,
    /// Which operations carry buckets.
    pub bucket_ops: Vec<usize>,
    /// The begin of the last backward pass, in nanoseconds since the step began: mean over steps.
    pub backward_begin: f64,
    /// Its end.
    pub backward_end: f64,
    /// The most bytes alive at once, by category.
    pub peak_bytes: BTreeMap<String, u64>,
    /// Proportional set size in bytes.
    pub resident_bytes: u64,
    /// Spans, marks and operations that found no room.
    pub dropped_spans: u64,
    /// The trace that was written.
    pub trace: Option<PathBuf>,
    /// Digest of this rank's parameters.
    pub weights_sha256: String,
}

impl RankReport {
    /// The report of this rank now, without a trace.
    pub fn new(
        steps: Vec<StepTimes>,
        meter: Meter,
        allocator: &Allocator,
        lane: &Lane,
        weights_sha256: String,
    ) -> Self {
        let peak =
            |category: Category| (category.name().to_owned(), allocator.usage(category).peak_bytes);
        let mut peak_bytes: BTreeMap<_, _> = Category::ALL.into_iter().map(peak).collect();
        peak_bytes.insert(TOTAL.into(), allocator.total().peak_bytes);
        let dropped_spans = lane.dropped() + meter.num_lost;
        let Shape { ops, ready, bucket_ops, backward_begin, backward_end, .. } = meter.shape.mean();
        Self {
            steps,
            ops,
            ready,
            bucket_ops,
            backward_begin,
            backward_end,
            peak_bytes,
            resident_bytes: resources::resident_bytes().unwrap_or(0),
            dropped_spans,
            trace: None,
            weights_sha256,
        }
    }
}

/// The value below which the given part of `values` lies (nearest rank); zero for none.
pub fn quantile(values: &[u64], part: f64) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use paceline_collectives::{OpKind, ReduceOp};
    use paceline_memory::DType;

    use super::*;

    fn span(start_ns: u64, end_ns: u64) -> Span {
        Span { start_ns, end_ns }
    }

    fn record(seq: u32, [submitted_ns, started_ns, present_ns, finished_ns]: [u64; 4]) -> OpRecord {
        let times = OpTimes { submitted_ns, started_ns, present_ns, finished_ns };
        let (kind, dtype, op) = (OpKind::AllReduce, DType::F32, ReduceOp::Sum);
        OpRecord { kind, seq, bytes: 8, dtype, op, send_bytes: 8, recv_bytes: 8, times }
    }

    #[test]
    fn the_times_of_a_step_add_up() {
        let mut lane = Lane::with_capacity(10);
        lane.push(span::FORWARD, span(0, 100));
        lane.push(span::BACKWARD, span(100, 300));
        lane.push(span::EXPOSED, span(250, 260));
        lane.push(span::GRAD_SYNC, span(260, 265));
        lane.push(span::EXPOSED, span(300, 340));
        lane.push(span::OPTIMIZER, span(340, 350));
        let mut meter = Meter::new();
        meter.records.push(record(0, [140, 150, 255, 320]));
        let times = meter.times(span(0, 360), 7, &lane, true);
        assert_eq!((times.step, times.data), (360, 7));
        assert_eq!((times.forward, times.backward, times.optimizer), (100, 185, 10));
        assert_eq!((times.sync, times.exposed, times.hidden), (5, 50, 140));
        assert_eq!((times.communicating, times.rest()), (170, 10));
        assert_eq!((times.wait, times.moving, times.exposed_wait), (105, 65, 5));
        assert_eq!((times.ops, times.bytes), (1, 8));
    }

    #[test]
    fn the_loss_is_no_communication_of_the_strategy() {
        let mut lane = Lane::with_capacity(10);
        lane.push(span::BACKWARD, span(0, 300));
        lane.mark_at(span::LOSS_SENT, 0, 5);
        let mut meter = Meter::new();
        meter.records.push(record(0, [6, 7, 90, 95]));
        meter.records.push(record(1, [100, 110, 120, 150]));
        let times = meter.times(span(0, 300), 0, &lane, true);
        assert_eq!((times.communicating, times.hidden), (40, 40));
        assert_eq!((times.ops, times.wait), (2, 93));
    }

    #[test]
    fn operations_are_followed_from_step_to_step() {
        let mut meter = Meter::new();
        let mut lane = Lane::with_capacity(10);
        for begin in [1000, 2000] {
            lane.push(span::BACKWARD, span(begin, begin + 100));
            lane.mark(span::GRADIENT_READY, 3);
            let late = begin / 100;
            meter.records.push(record(0, [10, 20, 30, 60].map(|at| begin + late + at)));
            meter.times(span(begin, begin + 200), 0, &lane, true);
            meter.records.clear();
            lane.clear();
        }
        // Another number of operations, as at the tail of an epoch, is another kind of step.
        meter.times(span(3000, 3100), 0, &lane, true);
        let Shape { ops, ready, backward_end, bucket_ops, .. } = meter.shape.mean();
        let expected =
            OpMean { bytes: 8, ready: 25.0, sent: 35.0, present: 45.0, done: 75.0, hidden: 40.0 };
        assert_eq!(ops, [expected]);
        assert_eq!((ready[0].param, backward_end), (3, 100.0));
        assert!(bucket_ops.is_empty(), "no bucket was marked");
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        assert_eq!(quantile(&[5, 1, 9], 0.5), 5);
        assert_eq!(quantile(&[4, 1, 2, 3], 0.5), 2);
        assert_eq!(quantile(&(1..=200).collect::<Vec<_>>(), 0.99), 198);
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
