//! The measured steps of a run as advice takes them.
//!
//! Takes the samples of all ranks. Returns each step that all of them kept, on one clock: in milliseconds since rank 0 began
//! the step ([`Observed`]). A gradient's number is that of its parameter. This module does not know what follows from these
//! times.

use paceline_analysis::advice::observed::{Observed, RankStep, Seen};
use paceline_table::stats::median;

use crate::record::rank_report::RankReport;
use crate::record::samples::StepSample;

/// The gathers of a step, in milliseconds since each rank's own step began: means over the ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenGathers {
    /// For each use of a gathered unit, the values of [`StepSample::gathers`].
    pub uses: Vec<[f64; 6]>,
    /// The end of the backward pass.
    pub backward_end: f64,
}

/// Clocks that differ by less, in milliseconds, are one clock: ranks of one host see the same moment as late as the
/// scheduler lets them. Clocks of different hosts differ by the time since each was started.
const ONE_CLOCK_MS: f64 = 20.0;
/// Over how many steps, before and after a step, the difference between two clocks is taken. Clocks drift by some
/// microseconds per second.
const NEIGHBORS: usize = 4;

/// Combines the reports of the ranks, in rank order. Also returns the gathers of each of the steps.
pub fn observed(reports: &[RankReport]) -> (Observed, Vec<SeenGathers>) {
    let Some(first) = reports.first() else { return Default::default() };
    let samples: Vec<&[StepSample]> =
        reports.iter().map(|report| &report.alike.samples.kept[..]).collect();
    let common = samples[0].iter().filter_map(|step| {
        let of_rank =
            |of: &&[StepSample]| of.binary_search_by_key(&step.number, |sample| sample.number).ok();
        let places = samples.iter().map(of_rank).collect::<Option<Vec<_>>>()?;
        Some(places.iter().zip(&samples).map(|(at, of)| &of[*at]).collect())
    });
    let common: Vec<Vec<&StepSample>> = common.collect();
    let apart: Vec<Vec<f64>> = common.iter().map(|step| clocks(step)).collect();
    let steps = common.iter().enumerate().map(|(at, step)| {
        let near = &apart[at.saturating_sub(NEIGHBORS)..(at + NEIGHBORS + 1).min(apart.len())];
        seen(step, &error(&apart, near))
    });
    let alike = &first.alike;
    let observed = Observed {
        steps: steps.collect(),
        gradients: alike.ready.iter().map(|line| line.param).collect(),
        bytes: alike.ops.iter().map(|op| op.bytes).collect(),
        bucket_ops: alike.bucket_ops.clone(),
        blocking_ops: alike.statistics_ops.clone(),
    };
    (observed, common.iter().map(|step| gathers(step)).collect())
}

/// By how many milliseconds the clock of each rank is ahead of rank 0's, as the operations of a step show: all ranks see
/// the moment at which the last one arrives. Zero without operations.
fn clocks(step: &[&StepSample]) -> Vec<f64> {
    let first = step[0];
    let of_rank = |sample: &&StepSample| {
        let begin = between(sample, first);
        let presents = sample.ops.iter().zip(&first.ops);
        median(presents.map(|(own, of)| begin + f64::from(own[2]) - f64::from(of[2])))
    };
    step.iter().map(|sample| of_rank(sample).unwrap_or(0.0)).collect()
}

/// Milliseconds from the start of the step on rank 0 until it began on another rank, each on its own clock.
fn between(sample: &StepSample, first: &StepSample) -> f64 {
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

/// The mean over the ranks.
fn mean(step: &[&StepSample], part: impl Fn(&StepSample) -> f32) -> f64 {
    step.iter().map(|sample| f64::from(part(sample))).sum::<f64>() / step.len() as f64
}

fn gathers(step: &[&StepSample]) -> SeenGathers {
    let num_uses = step.iter().map(|sample| sample.gathers.len()).min().unwrap_or(0);
    let of_use = |at: usize| [0, 1, 2, 3, 4, 5].map(|of| mean(step, |s| s.gathers[at][of]));
    SeenGathers {
        uses: (0..num_uses).map(of_use).collect(),
        backward_end: mean(step, |sample| sample.backward[1]),
    }
}

fn seen(step: &[&StepSample], errors: &[f64]) -> Seen {
    let rank = |(sample, error): (&&StepSample, &f64)| {
        let shift = between(sample, step[0]) - error;
        let at = |ms: f32| f64::from(ms) + shift;
        RankStep {
            backward: sample.backward.map(at),
            ready: sample.ready.iter().map(|ms| at(*ms)).collect(),
            ops: sample.ops.iter().map(|op| op.map(at)).collect(),
            waiting: f64::from(sample.waiting),
        }
    };
    Seen {
        is_alike: step.iter().all(|sample| sample.is_alike),
        exposed: mean(step, |sample| sample.exposed),
        waiting: mean(step, |sample| sample.waiting),
        sync: mean(step, |sample| sample.sync),
        ranks: step.iter().zip(errors).map(rank).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::readiness::{AlikeSteps, GradReadiness, OpMean};

    /// A rank whose clock is ahead by `ahead_ms`, and which begins each step `late_ms` after the hour.
    fn report(ahead_ms: u64, late_ms: u64, numbers: &[u64]) -> RankReport {
        let mut alike = AlikeSteps {
            ops: vec![OpMean { bytes: 8, ..OpMean::default() }],
            ready: vec![GradReadiness { param: 3, at: 0.0 }],
            ..AlikeSteps::default()
        };
        for &number in numbers {
            // The last rank arrives at 20 ms of everybody's time.
            let late = late_ms as f32;
            alike.samples.kept.push(StepSample {
                number,
                begin_ns: (1000 * number + ahead_ms + late_ms) * 1_000_000,
                is_alike: true,
                exposed: 4.0 + late,
                ready: vec![10.0],
                ops: vec![[10.0, 11.0, 20.0 - late, 30.0 - late]],
                ..StepSample::default()
            });
        }
        RankReport { alike, ..RankReport::default() }
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
