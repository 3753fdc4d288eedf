//! When in a step its operations and gradients take place: means over steps that are alike.
//!
//! Steps are alike if they have the operations and gradients of the first measured step, in its order. Other steps, such as
//! those in which `local_sgd` averages, are only counted.

use paceline_collectives::{OpRecord, Purpose};
use paceline_host::text::ms;
use paceline_strategies::span;
use paceline_trace::{IntervalSet, Span, SpanTrack};
use serde::{Deserialize, Serialize};

use crate::record::gathers::{self, GatherMoments};
use crate::record::op_moments::OpMoments;
use crate::record::samples::StepSamples;

/// When a parameter's gradient was final, in milliseconds since the step began.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadyMoment {
    /// The parameter's index.
    pub param: usize,
    /// When it was final.
    pub at_ms: f64,
}

/// The moments of a step, in milliseconds since it began; also their sums and means over alike steps, and over ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// Number of operations, whether or not they are followed.
    pub num_ops: usize,
    /// The operations, in order; empty if there are too many to follow.
    pub ops: Vec<OpMoments>,
    /// The gradients, in the order in which they are final.
    pub ready: Vec<ReadyMoment>,
    /// The uses of gathered units, in order.
    pub gathers: Vec<GatherMoments>,
    /// End of the backward pass before the last one, start and end of the last one, and when ranks began to send the
    /// parameters that they had updated. Zero for those that the step does not have.
    pub passes: [f64; 4],
}

/// Steps with more operations are not followed one by one.
const MAX_OPS: usize = 512;

impl Moments {
    /// The moments of a step that began at `begin_ns`.
    pub fn of(
        begin_ns: u64,
        records: &[OpRecord],
        track: &SpanTrack,
        computing: &IntervalSet,
    ) -> Self {
        let since = |ns: u64| ms(ns.saturating_sub(begin_ns));
        let op = |record: &OpRecord| {
            let times = &record.times;
            let span = Span { start_ns: times.started_ns, end_ns: times.finished_ns };
            let hidden = IntervalSet::union([span]).intersection(computing);
            OpMoments { hidden_ms: ms(hidden.len_ns()), ..OpMoments::of(record, since) }
        };
        let followed = if records.len() <= MAX_OPS { records } else { &[] };
        let ready = track.marked(span::GRADIENT_READY);
        let ready = ready.map(|mark| ReadyMoment { param: mark.id, at_ms: since(mark.at_ns) });
        let (mut earlier, mut last): (_, Option<Span>) = (None, None);
        track.named(span::BACKWARD).for_each(|span| earlier = last.replace(span));
        let sent = track.named(span::PARAM_BROADCAST).next();
        let [begin, sent] = [last, sent].map(|of| of.map(|of| of.start_ns));
        let [earlier, end] = [earlier, last].map(|of| of.map(|of| of.end_ns));
        Self {
            num_ops: records.len(),
            ops: followed.iter().map(op).collect(),
            ready: ready.collect(),
            gathers: gathers::uses(begin_ns, track, records),
            passes: [earlier, begin, end, sent].map(|ns| ns.map_or(0.0, since)),
        }
    }

    /// The means over ranks, of the operations, gradients and gathers that all have.
    pub fn mean<'a>(ranks: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut ranks = ranks.into_iter();
        let Some(first) = ranks.next() else { return Self::default() };
        let (mut mean, mut count) = (first.clone(), 1.0);
        for of_rank in ranks {
            mean.ops.truncate(of_rank.ops.len());
            mean.ready.truncate(of_rank.ready.len());
            mean.gathers.truncate(of_rank.gathers.len());
            mean.add(of_rank);
            count += 1.0;
        }
        mean.divide(count);
        mean
    }

    /// The moments of a step whose operations and gradients cannot be compared with other steps.
    pub fn without_lists(self) -> Self {
        Self { passes: self.passes, ..Self::default() }
    }

    /// How many numbers it has.
    pub fn numbers(&self) -> usize {
        5 + 2 * self.ready.len() + 6 * self.ops.len() + 9 * self.gathers.len()
    }

    /// Whether a step has the same operations, gradients and gathers.
    fn is_like(&self, step: &Self) -> bool {
        let op = |of: &OpMoments| of.bytes;
        let param = |of: &ReadyMoment| of.param;
        let gather = |of: &GatherMoments| (of.unit, of.is_backward, of.op.bytes);
        self.num_ops == step.num_ops
            && self.ops.iter().map(op).eq(step.ops.iter().map(op))
            && self.ready.iter().map(param).eq(step.ready.iter().map(param))
            && self.gathers.iter().map(gather).eq(step.gathers.iter().map(gather))
    }

    fn add(&mut self, other: &Self) {
        let add = |sum: &mut OpMoments, mut of: OpMoments| {
            sum.times().into_iter().zip(of.times()).for_each(|(sum, of)| *sum += *of);
        };
        self.ops.iter_mut().zip(&other.ops).for_each(|(sum, of)| add(sum, *of));
        for (sum, of) in self.gathers.iter_mut().zip(&other.gathers) {
            add(&mut sum.op, of.op);
            sum.needed_ms += of.needed_ms;
            sum.exposed_ms += of.exposed_ms;
        }
        self.ready.iter_mut().zip(&other.ready).for_each(|(sum, of)| sum.at_ms += of.at_ms);
        self.passes.iter_mut().zip(other.passes).for_each(|(sum, of)| *sum += of);
    }

    fn divide(&mut self, count: f64) {
        let gathers = self.gathers.iter_mut();
        let gathers = gathers.flat_map(|of| {
            of.op.times().into_iter().chain([&mut of.needed_ms, &mut of.exposed_ms])
        });
        let ops = self.ops.iter_mut().flat_map(OpMoments::times);
        let ready = self.ready.iter_mut().map(|of| &mut of.at_ms);
        ops.chain(gathers).chain(ready).chain(&mut self.passes).for_each(|sum| *sum /= count);
    }
}

/// The steps that are alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlikeSteps {
    /// Number of steps that are alike.
    pub count: u64,
    /// Number of measured steps that are not.
    pub num_unlike: u64,
    /// Sums over alike steps; means after [`AlikeSteps::mean`].
    pub moments: Moments,
    /// The indices of the operations that carry buckets, in order.
    pub bucket_ops: Vec<usize>,
    /// The numbers of these buckets, or of the units if each is sent alone.
    pub bucket_ids: Vec<usize>,
    /// The indices of the operations that sum the statistics of a synchronized batch norm, in order.
    pub statistics_ops: Vec<usize>,
    /// Some single measured steps, alike or not.
    pub samples: StepSamples,
}

impl AlikeSteps {
    /// Adds a step if it is like the first one. Returns whether it is.
    pub fn add(&mut self, step: &Moments, records: &[OpRecord]) -> bool {
        if self.count == 0 {
            self.moments = step.clone();
            for (at, record) in records.iter().enumerate() {
                match record.purpose {
                    Purpose::Bucket(id) => {
                        self.bucket_ops.push(at);
                        self.bucket_ids.push(id);
                    }
                    Purpose::Statistics => self.statistics_ops.push(at),
                    Purpose::Other | Purpose::Loss | Purpose::Layer | Purpose::Gather(_) => {}
                }
            }
        } else if self.moments.is_like(step) {
            self.moments.add(step);
        } else {
            self.num_unlike += 1;
            return false;
        }
        self.count += 1;
        true
    }

    /// The index of the operation that sums up the gradients of a unit that is sent alone.
    pub fn reduction_of(&self, unit: usize) -> Option<usize> {
        self.bucket_ids.iter().position(|id| *id == unit).map(|at| self.bucket_ops[at])
    }

    /// Turns the sums into means.
    pub fn mean(mut self) -> Self {
        self.moments.divide(self.count.max(1) as f64);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::op_moments::tests::record;

    /// Adds a step with an operation of each size, in which these gradients are final.
    fn add(steps: &mut AlikeSteps, begin: u64, sizes: &[usize], gradients: &[usize]) {
        let mut track = SpanTrack::with_capacity(10);
        let backward = Span { start_ns: begin, end_ns: begin + 100 };
        track.push(span::BACKWARD, backward);
        gradients.iter().for_each(|id| track.mark_at(span::GRADIENT_READY, *id, begin + 4));
        let late = begin / 100;
        let times = [10, 20, 30, 60].map(|at| begin + late + at);
        let record = |&bytes: &usize| OpRecord { bytes, ..record(Purpose::Other, times) };
        let records: Vec<OpRecord> = sizes.iter().map(record).collect();
        let computing = IntervalSet::union([backward]);
        steps.add(&Moments::of(begin, &records, &track, &computing), &records);
    }

    #[test]
    fn operations_are_followed_from_step_to_step() {
        let mut steps = AlikeSteps::default();
        add(&mut steps, 1000, &[8], &[3]);
        add(&mut steps, 2000, &[8], &[3]);
        let AlikeSteps { count, num_unlike, moments, bucket_ops, .. } = steps.mean();
        let mut op = moments.ops[0];
        assert_eq!((op.bytes, moments.ops.len()), (8, 1));
        let ns = |ms: f64| (ms * 1e6).round();
        assert_eq!(op.times().map(|of| ns(*of)), [25.0, 35.0, 45.0, 75.0, 40.0]);
        assert_eq!((moments.ready[0].param, ns(moments.ready[0].at_ms)), (3, 4.0));
        assert_eq!(moments.passes.map(ns), [0.0, 0.0, 100.0, 0.0]);
        assert_eq!((count, num_unlike), (2, 0));
        assert!(bucket_ops.is_empty(), "no bucket was marked");
    }

    #[test]
    fn the_last_pass_is_told_from_earlier_ones_and_from_sending_after_the_update() {
        let mut track = SpanTrack::with_capacity(10);
        for (name, start_ns, end_ns) in [
            (span::BACKWARD, 1100, 1200),
            (span::BACKWARD, 1300, 1400),
            (span::PARAM_BROADCAST, 1500, 1520),
            (span::PARAM_BROADCAST, 1530, 1600),
        ] {
            track.push(name, Span { start_ns, end_ns });
        }
        let moments = Moments::of(1000, &[], &track, &IntervalSet::default());
        let ns = moments.passes.map(|ms| (ms * 1e6).round());
        assert_eq!(ns, [200.0, 300.0, 400.0, 500.0]);
    }

    #[test]
    fn unlike_steps_are_counted_and_change_no_mean() {
        let mut steps = AlikeSteps::default();
        add(&mut steps, 1000, &[8, 8], &[3, 2]);
        let first = steps.clone();
        for (sizes, gradients) in [
            // Another number of operations, another size, one gradient fewer, another order of gradients.
            (&[8][..], &[3, 2][..]),
            (&[8, 4], &[3, 2]),
            (&[8, 8], &[3]),
            (&[8, 8], &[2, 3]),
        ] {
            add(&mut steps, 5000, sizes, gradients);
        }
        assert_eq!(steps, AlikeSteps { num_unlike: 4, ..first });
    }
}
