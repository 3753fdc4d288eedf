//! When in a step its operations and gradients take place: means over steps that are alike.
//!
//! Steps are alike if they have the same operations and gradients as the first measured step, in the same
//! order. Other steps, such as those in which `local_sgd` averages, do not enter the means. They are only
//! counted.

use paceline_collectives::{OpRecord, Purpose};
use paceline_strategies::span;
use paceline_trace::{IntervalSet, Span, SpanTrack};
use serde::{Deserialize, Serialize};

use crate::record::gathers::GatherMean;
use crate::record::samples::StepSamples;

/// The times of an operation in its step, in nanoseconds since the step began: means over steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpMean {
    /// Size of the message in bytes.
    pub bytes: u64,
    /// When it was submitted. For a bucket, this is when its gradients were final.
    pub ready: f64,
    /// When it started.
    pub sent: f64,
    /// When all ranks had arrived.
    pub present: f64,
    /// When the result was there.
    pub done: f64,
    /// The part of its time during which the main thread computed.
    pub hidden: f64,
}

/// When a parameter's gradient was final, in nanoseconds since the step began: mean over steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradReadiness {
    /// The parameter's index.
    pub param: usize,
    /// When it was final.
    pub at: f64,
}

/// The steps that are alike: sums over them, which [`AlikeSteps::mean`] turns into means at the end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlikeSteps {
    /// Number of steps that are alike.
    pub count: u64,
    /// Number of measured steps that are not.
    pub num_unlike: u64,
    /// Number of operations of a step, whether or not they are followed.
    pub num_ops: usize,
    /// The operations of a step, in order; empty if there are too many to follow.
    pub ops: Vec<OpMean>,
    /// The gradients of a step, in the order in which they are final.
    pub ready: Vec<GradReadiness>,
    /// The uses of gathered units, in order.
    pub gathers: Vec<GatherMean>,
    /// The indices of the operations that carry buckets, in order.
    pub bucket_ops: Vec<usize>,
    /// The numbers of these buckets, or of the units if each is sent alone.
    pub bucket_ids: Vec<usize>,
    /// The indices of the operations that sum the statistics of a synchronized batch norm, in order.
    pub statistics_ops: Vec<usize>,
    /// The start of the last backward pass, in nanoseconds since the step began.
    pub backward_begin: f64,
    /// The end of the last backward pass, in nanoseconds since the step began.
    pub backward_end: f64,
    /// Some of the measured steps one by one, those that are not alike too.
    pub samples: StepSamples,
}

/// If a step has more operations than this, they are not followed one by one.
const MAX_OPS: usize = 512;

impl AlikeSteps {
    /// Adds a step, with the time at which it began, if it is like the first one. Returns whether it is.
    pub fn add(
        &mut self,
        begin_ns: u64,
        records: &[OpRecord],
        track: &SpanTrack,
        computing: &IntervalSet,
        gathers: &[GatherMean],
    ) -> bool {
        if self.count == 0 {
            let num_ops = if records.len() <= MAX_OPS { records.len() } else { 0 };
            let op = |record: &OpRecord| OpMean { bytes: record.bytes as u64, ..OpMean::default() };
            self.ops = records[..num_ops].iter().map(op).collect();
            let ready = track.marked(span::GRADIENT_READY);
            self.ready = ready.map(|mark| GradReadiness { param: mark.id, at: 0.0 }).collect();
            for (at, record) in records.iter().enumerate() {
                match record.purpose {
                    Purpose::Bucket(id) => {
                        self.bucket_ops.push(at);
                        self.bucket_ids.push(id);
                    }
                    Purpose::Statistics => self.statistics_ops.push(at),
                    Purpose::Other | Purpose::Loss | Purpose::Gather(_) => {}
                }
            }
            self.num_ops = records.len();
            let empty = |of: &GatherMean| GatherMean {
                unit: of.unit,
                is_backward: of.is_backward,
                bytes: of.bytes,
                ..GatherMean::default()
            };
            self.gathers = gathers.iter().map(empty).collect();
        }
        let same_gathers = self.gathers.len() == gathers.len()
            && self.gathers.iter().zip(gathers).all(|(sum, of)| sum.is_like(of));
        if !self.is_like(records, track) || !same_gathers {
            self.num_unlike += 1;
            return false;
        }
        self.count += 1;
        let since = |ns: u64| ns.saturating_sub(begin_ns) as f64;
        for (op, OpRecord { times, .. }) in self.ops.iter_mut().zip(records) {
            let span = Span { start_ns: times.started_ns, end_ns: times.finished_ns };
            op.ready += since(times.submitted_ns);
            op.sent += since(times.started_ns);
            op.present += since(times.present_ns);
            op.done += since(times.finished_ns);
            op.hidden += IntervalSet::union([span]).intersection(computing).len_ns() as f64;
        }
        for (sum, of) in self.gathers.iter_mut().zip(gathers) {
            sum.add(of);
        }
        for (ready, mark) in self.ready.iter_mut().zip(track.marked(span::GRADIENT_READY)) {
            ready.at += since(mark.at_ns);
        }
        if let Some(backward) = track.named(span::BACKWARD).max_by_key(|span| span.end_ns) {
            self.backward_begin += since(backward.start_ns);
            self.backward_end += since(backward.end_ns);
        }
        true
    }

    fn is_like(&self, records: &[OpRecord], track: &SpanTrack) -> bool {
        let sizes = self.ops.iter().map(|op| op.bytes);
        let followed = records.iter().map(|record| record.bytes as u64).take(self.ops.len());
        let params = self.ready.iter().map(|ready| ready.param);
        records.len() == self.num_ops
            && sizes.eq(followed)
            && params.eq(track.marked(span::GRADIENT_READY).map(|mark| mark.id))
    }

    /// Turns the sums into means.
    pub fn mean(mut self) -> Self {
        let steps = self.count.max(1) as f64;
        for op in &mut self.ops {
            for sum in [&mut op.ready, &mut op.sent, &mut op.present, &mut op.done, &mut op.hidden]
            {
                *sum /= steps;
            }
        }
        self.gathers.iter_mut().for_each(|of| of.divide(steps));
        self.ready.iter_mut().for_each(|ready| ready.at /= steps);
        self.backward_begin /= steps;
        self.backward_end /= steps;
        self
    }
}

#[cfg(test)]
mod tests {
    use paceline_collectives::{OpKind, OpTimes, ReduceOp};
    use paceline_memory::DType;

    use super::*;

    fn record(
        bytes: usize,
        [submitted_ns, started_ns, present_ns, finished_ns]: [u64; 4],
    ) -> OpRecord {
        let times = OpTimes { submitted_ns, started_ns, present_ns, finished_ns, late_ns: 0 };
        let (kind, dtype, op) = (OpKind::AllReduce, DType::F32, ReduceOp::Sum);
        let purpose = Purpose::Other;
        OpRecord {
            kind,
            group: 0,
            seq: 0,
            ranks: 2,
            bytes,
            dtype,
            op,
            send_bytes: 8,
            recv_bytes: 8,
            purpose,
            times,
        }
    }

    /// Adds a step with an operation of each size, in which these gradients are final.
    fn add(steps: &mut AlikeSteps, begin: u64, sizes: &[usize], gradients: &[usize]) {
        let mut track = SpanTrack::with_capacity(10);
        let backward = Span { start_ns: begin, end_ns: begin + 100 };
        track.push(span::BACKWARD, backward);
        gradients.iter().for_each(|id| track.mark_at(span::GRADIENT_READY, *id, begin + 4));
        let late = begin / 100;
        let record = |bytes: &usize| record(*bytes, [10, 20, 30, 60].map(|at| begin + late + at));
        let records: Vec<OpRecord> = sizes.iter().map(record).collect();
        steps.add(begin, &records, &track, &IntervalSet::union([backward]), &[]);
    }

    #[test]
    fn operations_are_followed_from_step_to_step() {
        let mut steps = AlikeSteps::default();
        add(&mut steps, 1000, &[8], &[3]);
        add(&mut steps, 2000, &[8], &[3]);
        let AlikeSteps { count, num_unlike, ops, ready, backward_end, bucket_ops, .. } =
            steps.mean();
        let expected =
            OpMean { bytes: 8, ready: 25.0, sent: 35.0, present: 45.0, done: 75.0, hidden: 40.0 };
        assert_eq!(ops, [expected]);
        assert_eq!((ready, backward_end), (vec![GradReadiness { param: 3, at: 4.0 }], 100.0));
        assert_eq!((count, num_unlike), (2, 0));
        assert!(bucket_ops.is_empty(), "no bucket was marked");
    }

    #[test]
    fn unlike_steps_are_counted_and_change_no_mean() {
        let mut steps = AlikeSteps::default();
        add(&mut steps, 1000, &[8, 8], &[3, 2]);
        let first = steps.clone();
        for (sizes, gradients) in [
            // Other steps: another number of operations, another size, one gradient fewer, another order
            // of gradients.
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
