//! The measured steps of a run as advice takes them.
//!
//! [`Observed`] has each step that all ranks kept, on one clock: in milliseconds since rank 0 began the step. A gradient has
//! the number of its parameter.

use paceline_analysis::advice::observed::{Observed, RankStep, Seen};
use paceline_host::text::ms;
use paceline_table::stats::median;

use crate::record::op_moments::OpMoments;
use crate::record::rank_report::RankReport;
use crate::record::readiness::Moments;
use crate::record::samples::StepSample;

/// Clocks that differ by fewer milliseconds are one: the scheduler delays what ranks of one host see. Clocks of different
/// hosts differ by the time since each was started.
pub(super) const ONE_CLOCK_MS: f64 = 20.0;
/// Steps before and after a step over which the difference of two clocks is taken: they drift by some microseconds per second.
const NEIGHBORS: usize = 4;

/// The steps that all these ranks have kept, each as they saw it.
pub(super) fn common<'a>(
    reports: impl IntoIterator<Item = &'a RankReport>,
) -> Vec<Vec<&'a StepSample>> {
    let kept = |report: &'a RankReport| &report.alike.samples.kept[..];
    let samples: Vec<&[StepSample]> = reports.into_iter().map(kept).collect();
    let of_step = |step: &StepSample| {
        let of_rank = |kept: &&'a [StepSample]| {
            let at = kept.binary_search_by_key(&step.number, |sample| sample.number).ok()?;
            Some(&kept[at])
        };
        samples.iter().map(of_rank).collect()
    };
    samples.first().into_iter().copied().flatten().filter_map(of_step).collect()
}

/// Combines the reports of the ranks, in rank order. Also returns the mean moments of each step, since each rank's own step
/// began.
pub fn observed(reports: &[RankReport]) -> (Observed, Vec<Moments>) {
    let Some(first) = reports.first() else { return Default::default() };
    let common = common(reports);
    let apart: Vec<Vec<f64>> = common.iter().map(|step| clocks(step)).collect();
    let steps = common.iter().enumerate().map(|(at, step)| {
        let near = &apart[at.saturating_sub(NEIGHBORS)..(at + NEIGHBORS + 1).min(apart.len())];
        seen(step, &error(&apart, near))
    });
    let alike = &first.alike;
    let observed = Observed {
        steps: steps.collect(),
        gradients: alike.moments.ready.iter().map(|of| of.param).collect(),
        bytes: alike.moments.ops.iter().map(|op| op.bytes).collect(),
        bucket_ops: alike.bucket_ops.clone(),
        blocking_ops: alike.statistics_ops.clone(),
    };
    let means = |step: &Vec<&StepSample>| Moments::mean(step.iter().map(|of| &of.moments));
    (observed, common.iter().map(means).collect())
}

/// By how many milliseconds each rank's clock is ahead of rank 0's, by the operations of a step: all ranks see the moment at
/// which the last one arrives. Zero without operations.
fn clocks(step: &[&StepSample]) -> Vec<f64> {
    let first = step[0];
    let of_rank = |sample: &&StepSample| {
        let begin = between(sample, first);
        let presents = sample.moments.ops.iter().zip(&first.moments.ops);
        median(presents.map(|(own, of)| begin + own.present_ms - of.present_ms))
    };
    step.iter().map(|sample| of_rank(sample).unwrap_or(0.0)).collect()
}

/// Milliseconds from the start of the step on rank 0 to that on another rank, each on its own clock.
pub(super) fn between(sample: &StepSample, first: &StepSample) -> f64 {
    (i128::from(sample.begin_ns) - i128::from(first.begin_ns)) as f64 / 1e6
}

/// The part of the difference of clocks that is not the scheduler's.
fn error(all: &[Vec<f64>], near: &[Vec<f64>]) -> Vec<f64> {
    let of = |steps: &[Vec<f64>], rank: usize| median(steps.iter().map(|step| step[rank]));
    let of_rank = |rank: usize| match of(all, rank) {
        Some(apart) if apart.abs() >= ONE_CLOCK_MS => of(near, rank).unwrap_or(apart),
        _ => 0.0,
    };
    (0..all.first().map_or(0, Vec::len)).map(of_rank).collect()
}

fn seen(step: &[&StepSample], errors: &[f64]) -> Seen {
    let mean = |part: fn(&StepSample) -> u64| {
        step.iter().map(|sample| ms(part(sample))).sum::<f64>() / step.len() as f64
    };
    let rank = |(sample, error): (&&StepSample, &f64)| {
        let shift = between(sample, step[0]) - error;
        let at = |ms: f64| ms + shift;
        let op = |of: &OpMoments| [of.ready_ms, of.sent_ms, of.present_ms, of.done_ms].map(at);
        RankStep {
            backward: [1, 2].map(|pass| at(sample.moments.passes[pass])),
            ready: sample.moments.ready.iter().map(|of| at(of.at_ms)).collect(),
            ops: sample.moments.ops.iter().map(op).collect(),
            waiting: ms(sample.waiting),
        }
    };
    Seen {
        is_alike: step.iter().all(|sample| sample.is_alike),
        exposed: mean(|sample| sample.exposed),
        waiting: mean(|sample| sample.waiting),
        sync: mean(|sample| sample.sync),
        ranks: step.iter().zip(errors).map(rank).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::readiness::ReadyMoment;

    /// A rank whose clock is ahead by `ahead_ms`, and which begins each step `late_ms` after the hour.
    fn report(ahead_ms: u64, late_ms: u64, numbers: &[u64]) -> RankReport {
        // The last rank arrives at 20 ms of everybody's time.
        let (present_ms, done_ms) = (20.0 - late_ms as f64, 30.0 - late_ms as f64);
        let op = OpMoments { bytes: 8, ready_ms: 10.0, sent_ms: 11.0, ..OpMoments::default() };
        let moments = Moments {
            ops: vec![OpMoments { present_ms, done_ms, ..op }],
            ready: vec![ReadyMoment { param: 3, at_ms: 10.0 }],
            ..Moments::default()
        };
        let mut report = RankReport::default();
        report.alike.moments = moments.clone();
        for &number in numbers {
            report.alike.samples.kept.push(StepSample {
                number,
                begin_ns: (1000 * number + ahead_ms + late_ms) * 1_000_000,
                is_alike: true,
                exposed: (4 + late_ms) * 1_000_000,
                moments: moments.clone(),
                ..StepSample::default()
            });
        }
        report
    }

    #[test]
    fn all_ranks_are_seen_on_the_clock_of_rank_0() {
        for ahead_ms in [0, 5_000_000] {
            let reports = [report(0, 0, &[0, 1, 2]), report(ahead_ms, 5, &[0, 2])];
            let (observed, gathers) = observed(&reports);
            assert_eq!(gathers.len(), 2);
            assert_eq!(observed.steps.len(), 2, "a step that one rank has not kept is left out");
            let step = &observed.steps[1];
            assert_eq!((step.exposed, observed.gradients[0]), (6.5, 3));
            let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-4, "{a}, not {b}: {step:?}");
            near(step.ranks[0].ready[0], 10.0);
            near(step.ranks[1].ready[0], 15.0);
            near(step.ranks[1].ops[0][3], 30.0);
        }
        assert_eq!(observed(&[]), Default::default());
    }
}
