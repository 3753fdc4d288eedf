//! Single steps of a rank with the times of their operations and gradients.
//!
//! Means over steps show neither how sure a gain is nor the effect of a change: a disturbed step hides other things than a usual
//! one. So some steps are kept whole, in bounded memory, for advice. All ranks keep the same steps.

use paceline_strategies::{ActionTimes, span};
use paceline_trace::{Span, SpanTrack};
use serde::{Deserialize, Serialize};

use crate::record::readiness::Moments;
use crate::record::steps::{is_kept, keep};

/// The most numbers that are kept: 384 KiB per rank.
const MAX_NUMBERS: usize = 3 << 14;
/// The least and the most steps that are kept of a long run.
const STEPS: (usize, usize) = (16, 512);

/// A step of a rank. Its times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepSample {
    /// Number of measured steps before it.
    pub number: u64,
    /// When it began, on this rank's clock.
    pub begin_ns: u64,
    /// Whether it has the operations and gradients of the first measured step; otherwise its moments have no lists.
    pub is_alike: bool,
    /// Exposed communication.
    pub exposed: u64,
    /// The part of it in which the operation waited for the slowest rank.
    pub waiting: u64,
    /// Arithmetic and copies that synchronization adds.
    pub sync: u64,
    /// The moments of its operations, gradients and gathers.
    pub moments: Moments,
    /// The actions of the rank as a part of a pipeline.
    pub staged: Option<StagedStep>,
}

/// A step of a rank of a pipeline. All times are in milliseconds; moments count from the start of the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StagedStep {
    /// For each piece of arithmetic, in order: when the rank became idle before it, when it began and ended, when its message
    /// could be received, and when that had arrived. The last two are zero without a message.
    pub actions: Vec<[f32; 5]>,
    /// How long the rank waited for its samples before the step.
    pub data: f32,
    /// How long it waited for all other ranks.
    pub barrier: f32,
    /// The whole step.
    pub step: f32,
}

impl StagedStep {
    /// The step that `whole` spans, before which the rank has waited `data_ns` for its samples.
    pub fn new(whole: Span, data_ns: u64, actions: &[ActionTimes], track: &SpanTrack) -> Self {
        let ms = |ns: u64| (ns as f64 / 1e6) as f32;
        let since = |ns: u64| ms(ns.saturating_sub(whole.start_ns));
        let action = |of: &ActionTimes| {
            let (asked_ns, message) = match of.awaited {
                Some((asked_ns, times)) => {
                    (asked_ns, [times.submitted_ns, times.finished_ns].map(since))
                }
                None => (of.span.start_ns, [0.0; 2]),
            };
            let [asked, start, end] = [asked_ns, of.span.start_ns, of.span.end_ns].map(since);
            [asked, start, end, message[0], message[1]]
        };
        let arithmetic = actions.iter().filter(|of| of.action.kind.computes());
        let actions: Vec<_> = arithmetic.map(action).collect();
        let barrier = track.named(span::BARRIER).map(|span| span.len_ns()).sum();
        Self { actions, data: ms(data_ns), barrier: ms(barrier), step: ms(whole.len_ns()) }
    }
}

impl StepSample {
    fn numbers(&self) -> usize {
        let staged = self.staged.as_ref().map_or(0, |staged| 3 + 5 * staged.actions.len());
        6 + self.moments.numbers() + staged
    }
}

/// The steps that a rank keeps, ordered by number. A longer run keeps a random half of its steps, then a quarter, and so on, as
/// [`StepLog`](crate::record::steps::StepLog).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepSamples {
    /// The steps.
    pub kept: Vec<StepSample>,
    level: u32,
    count: u64,
    /// The most steps kept, by the size of the first one.
    room: usize,
}

impl StepSamples {
    /// Counts a measured step, and adds it if it is kept.
    pub fn push(&mut self, sample: impl FnOnce() -> StepSample) {
        let number = self.count;
        self.count += 1;
        if !is_kept(number, self.level) {
            return;
        }
        let sample = StepSample { number, ..sample() };
        if number == 0 {
            self.room = (MAX_NUMBERS / sample.numbers()).clamp(STEPS.0, STEPS.1);
        }
        keep(&mut self.kept, &mut self.level, self.room, sample, |step| step.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::readiness::ReadyMoment;

    #[test]
    fn samples_are_bounded_and_ranks_keep_the_same_steps() {
        let kept = |num_ready: usize, steps: u64| {
            let mut samples = StepSamples::default();
            for _ in 0..steps {
                let ready = vec![ReadyMoment { param: 0, at_ms: 0.0 }; num_ready];
                let moments = Moments { ready, ..Moments::default() };
                samples.push(|| StepSample { moments, ..StepSample::default() });
                assert!(samples.kept.len() <= STEPS.1);
            }
            samples.kept.iter().map(|step| step.number).collect::<Vec<_>>()
        };
        assert_eq!(kept(10, 300), (0..300).collect::<Vec<_>>());
        let long = kept(10, 20_000);
        assert!(long.len() > STEPS.1 / 4 && long.is_sorted(), "{} steps", long.len());
        assert_eq!(long, kept(10, 20_000));
        // Only a few steps of ten thousand numbers find room.
        let large = kept(10_000, 500);
        assert!((STEPS.0 / 4..=STEPS.0).contains(&large.len()), "{} steps", large.len());
    }
}
