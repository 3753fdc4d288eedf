//! The measured steps of a rank, in bounded memory, and of all ranks together.
//!
//! Means are exact, from sums over all steps. Medians and percentiles need single steps: up to [`MAX_STEPS`] are kept. In
//! longer runs a random half of the steps is kept, then a quarter, and so on. A hash of the step's number decides, so all
//! ranks keep the same steps.

use std::f64::consts::SQRT_2;

use paceline_host::text::ms;
use paceline_strategies::StepLoss;
use paceline_table::stats::{STUDENT_90_OF_7, Summary, nearest_rank};
use serde::{Deserialize, Serialize};

use crate::record::ranks::Ranks;
use crate::record::times::StepTimes;

/// The largest number of single steps kept: 1.5 MiB per rank. A longer run keeps at least half as many, whose 99th percentile
/// is, with 95 % confidence, between the 98.9th and 99.1st.
pub const MAX_STEPS: usize = 1 << 16;

/// Parts into which a run is cut to see how its steps drift: one more than the degrees of freedom of [`STUDENT_90_OF_7`].
const PARTS: usize = 8;

/// The values that are kept of a step, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStep {
    /// Its number in the run.
    pub number: u64,
    /// The step, from the arrival of the batch to the end of the optimizer.
    pub step: u64,
    /// The part of exposed communication in which an operation waited for the slowest rank.
    pub exposed_wait: u64,
}

/// The measured steps of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepLog {
    /// Ordered by number.
    kept: Vec<KeptStep>,
    /// Steps are kept if their hash ends with at least this many zero bits.
    level: u32,
    count: u64,
    sums: StepTimes,
    /// Samples of steps in which all ranks know the global count.
    shared_samples: u64,
    /// Samples of this rank in steps in which each rank knows only its own.
    own_samples: u64,
    /// Tokens of this rank.
    own_tokens: u64,
}

impl StepLog {
    /// A log with room for a run of `num_steps` steps.
    pub fn new(num_steps: u64) -> Self {
        let room = usize::try_from(num_steps).unwrap_or(usize::MAX).min(MAX_STEPS);
        Self { kept: Vec::with_capacity(room), ..Self::default() }
    }

    /// Adds a step. Numbers must increase.
    pub fn push(&mut self, number: u64, times: &StepTimes, loss: &StepLoss) {
        self.count += 1;
        self.sums.add(times);
        let samples = if loss.is_shared { &mut self.shared_samples } else { &mut self.own_samples };
        *samples += loss.samples as u64;
        self.own_tokens += loss.own_tokens as u64;
        let &StepTimes { step, exposed_wait, .. } = times;
        self.keep(KeptStep { number, step, exposed_wait }, MAX_STEPS);
    }

    fn keep(&mut self, step: KeptStep, most: usize) {
        keep(&mut self.kept, &mut self.level, most, step, |step| step.number);
    }
}

/// Adds a step to those that are kept at this level, at most `most`. If there are more, the level rises, which drops about
/// half.
pub(super) fn keep<T>(
    kept: &mut Vec<T>,
    level: &mut u32,
    most: usize,
    step: T,
    number: fn(&T) -> u64,
) {
    while is_kept(number(&step), *level) && kept.len() == most {
        *level += 1;
        kept.retain(|step| is_kept(number(step), *level));
    }
    if is_kept(number(&step), *level) {
        kept.push(step);
    }
}

/// Whether a level keeps this step: it keeps one of 2^level.
pub(super) fn is_kept(number: u64, level: u32) -> bool {
    zeros(number) >= level
}

/// The number of zero bits at the end of a hash of the number. It is n or more for one in 2^n numbers.
fn zeros(number: u64) -> u32 {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).trailing_zeros()
}

/// The logs of all ranks.
#[derive(Debug)]
pub struct AllSteps<'a> {
    logs: Vec<&'a StepLog>,
}

impl<'a> AllSteps<'a> {
    /// Combines the logs. All ranks make the same steps.
    pub fn new(logs: impl IntoIterator<Item = &'a StepLog>) -> Self {
        Self { logs: logs.into_iter().collect() }
    }

    /// The number of measured steps.
    pub fn count(&self) -> u64 {
        self.logs.iter().map(|log| log.count).min().unwrap_or(0)
    }

    /// Steps that are kept one by one.
    pub fn num_kept(&self) -> usize {
        self.logs.iter().map(|log| log.kept.len()).min().unwrap_or(0)
    }

    /// Each step that all ranks have kept, in rank order. A rank that has joined later lacks the first ones.
    pub fn each(&self) -> impl Iterator<Item = Vec<KeptStep>> + '_ {
        let shortest = self.logs.iter().min_by_key(|log| log.kept.len());
        shortest.into_iter().flat_map(|log| &log.kept).filter_map(|step| {
            let of = |log: &&StepLog| {
                let at = log.kept.binary_search_by_key(&step.number, |of| of.number).ok()?;
                Some(log.kept[at])
            };
            self.logs.iter().map(of).collect()
        })
    }

    /// A part of each kept step, on the rank where it is largest.
    fn slowest(&self, part: fn(&KeptStep) -> u64) -> Vec<u64> {
        self.each().map(|ranks| ranks.iter().map(part).max().unwrap_or(0)).collect()
    }

    /// A quantile of the times of the kept steps, without the wait for data, in milliseconds.
    pub fn step_ms(&self, ranks: Ranks, quantile: f64) -> Option<f64> {
        let of = |steps: &[u64]| nearest_rank(steps, quantile).map(ms);
        if ranks == Ranks::SlowestOfStep {
            return of(&self.slowest(|step| step.step));
        }
        let steps = |log: &&StepLog| log.kept.iter().map(|step| step.step).collect::<Vec<_>>();
        let each: Option<Vec<f64>> = self.logs.iter().map(|log| of(&steps(log))).collect();
        ranks.combine(each?)
    }

    /// An estimate of how far apart the mean steps of two such runs are in 8 of 10 cases, in milliseconds. Neighboring steps
    /// share their disturbances, so it compares the means of eight parts of the run, not single steps. `None` for fewer than
    /// eight steps.
    pub fn apart_ms(&self) -> Option<f64> {
        let steps: Vec<f64> = self.slowest(|step| step.step).into_iter().map(ms).collect();
        let parts = steps.chunks_exact((steps.len() / PARTS).max(1));
        let means = parts.map(|part| part.iter().sum::<f64>() / part.len() as f64);
        let of = Summary::of(means.collect()).filter(|of| of.count >= PARTS as u64)?;
        Some(STUDENT_90_OF_7 * SQRT_2 * of.error())
    }

    /// The mean over the measured steps of a part of a step, combined over the ranks.
    pub fn combine(&self, ranks: Ranks, part: impl Fn(&StepTimes) -> u64) -> Option<f64> {
        let mean = |log: &&StepLog| part(&log.sums) as f64 / log.count as f64;
        (self.count() > 0).then(|| ranks.combine(self.logs.iter().map(mean))).flatten()
    }

    /// The mean over ranks and steps of a part of a step.
    pub fn mean(&self, part: impl Fn(&StepTimes) -> u64) -> Option<f64> {
        self.combine(Ranks::Mean, part)
    }

    /// A part of the steps in percent of another, each combined over the ranks; `None` if the other is zero.
    pub fn pct(
        &self,
        ranks: Ranks,
        part: fn(&StepTimes) -> u64,
        of: fn(&StepTimes) -> u64,
    ) -> Option<f64> {
        let whole = self.combine(ranks, of).filter(|whole| *whole > 0.0)?;
        Some(100.0 * self.combine(ranks, part)? / whole)
    }

    /// Samples per second of all ranks in the measured steps, with the wait for data: a mean, so occasional stalls count.
    pub fn samples_per_s(&self, ranks: Ranks) -> Option<f64> {
        Some(self.samples() as f64 / self.seconds(ranks)?)
    }

    /// Tokens per second of all ranks, padding left out, in the same time; `None` if the model has no tokens.
    pub fn tokens_per_s(&self, ranks: Ranks) -> Option<f64> {
        Some(self.tokens()? as f64 / self.seconds(ranks)?)
    }

    /// The mean number of tokens of a sample, padding left out; `None` if the model has no tokens.
    pub fn tokens_per_sample(&self) -> Option<f64> {
        Some(self.tokens()? as f64 / self.samples() as f64)
    }

    /// Samples of all ranks in the measured steps.
    fn samples(&self) -> u64 {
        let shared = self.logs.first().map_or(0, |log| log.shared_samples);
        shared + self.logs.iter().map(|log| log.own_samples).sum::<u64>()
    }

    fn tokens(&self) -> Option<u64> {
        Some(self.logs.iter().map(|log| log.own_tokens).sum()).filter(|tokens| *tokens > 0)
    }

    /// The time of all measured steps with the wait for data, combined over the ranks. The times of each rank are added up
    /// first: ranks that do not wait for each other are slow in different steps, so the sum of the slowest would be more than
    /// any rank took.
    fn seconds(&self, ranks: Ranks) -> Option<f64> {
        let of_rank = |log: &&StepLog| (log.sums.step + log.sums.data) as f64 / 1e9;
        ranks.combine(self.logs.iter().map(of_rank)).filter(|seconds| *seconds > 0.0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Ranks::{SlowestOfStep, SlowestRank};
    use super::*;

    pub fn loss(count: usize, is_shared: bool) -> StepLoss {
        StepLoss {
            loss: 1.0,
            correct: 0.0,
            count,
            samples: count,
            own_tokens: 0,
            is_shared,
            local_sum: 1.0,
            stops: false,
            regroups: false,
        }
    }

    fn log(walls_ms: &[(u64, u64)]) -> StepLog {
        let mut log = StepLog::default();
        for (number, (step, data)) in walls_ms.iter().enumerate() {
            let (step, data) = (step * 1_000_000, data * 1_000_000);
            let times = StepTimes { step, data, ..StepTimes::default() };
            log.push(number as u64, &times, &loss(100, true));
        }
        log
    }

    #[test]
    fn a_log_is_bounded_and_ranks_keep_the_same_steps() {
        let (mut one, mut other) = (StepLog::default(), StepLog::default());
        for number in 7..10_007 {
            one.keep(KeptStep { number, step: 1, ..KeptStep::default() }, 64);
            other.keep(KeptStep { number, step: 2, ..KeptStep::default() }, 64);
            assert!(one.kept.len() <= 64);
        }
        let numbers = |log: &StepLog| log.kept.iter().map(|step| step.number).collect::<Vec<_>>();
        assert_eq!(numbers(&one), numbers(&other));
        assert!(numbers(&one).is_sorted_by(|a, b| a < b));
        // The kept steps are a sample of the whole run: about as many are of its first half as of its
        // second, and about as many are odd as even.
        let part = |is: fn(&u64) -> bool| numbers(&one).iter().filter(|n| is(n)).count();
        assert!(one.kept.len() > 20, "{}", one.kept.len());
        assert!(part(|n| *n < 5007) > 5 && part(|n| *n >= 5007) > 5, "{:?}", numbers(&one));
        assert!(part(|n| n % 2 == 0) > 5 && part(|n| n % 2 == 1) > 5, "{:?}", numbers(&one));
    }

    #[test]
    fn nothing_is_left_out_below_the_bound() {
        let mut log = StepLog::default();
        for number in 0..64 {
            log.keep(KeptStep { number, ..KeptStep::default() }, 64);
        }
        assert_eq!((log.kept.len(), log.level), (64, 0));
    }

    #[test]
    fn means_count_steps_that_are_not_kept() {
        let mut log = StepLog::default();
        for number in 0..3 * MAX_STEPS as u64 {
            let times = StepTimes { forward: number, ..StepTimes::default() };
            log.push(number, &times, &loss(1, true));
        }
        assert!((MAX_STEPS / 4..=MAX_STEPS).contains(&log.kept.len()), "{}", log.kept.len());
        let all = AllSteps::new([&log]);
        assert_eq!(all.count(), 3 * MAX_STEPS as u64);
        assert_eq!(all.mean(|times| times.forward), Some((3 * MAX_STEPS - 1) as f64 / 2.0));
    }

    #[test]
    fn the_slowest_rank_of_each_step_counts() {
        let (one, other) = (log(&[(10, 0), (30, 0), (10, 5)]), log(&[(20, 0), (10, 0), (12, 0)]));
        let all = AllSteps::new([&one, &other]);
        assert_eq!(all.slowest(|step| step.step), [20, 30, 12].map(|ms| ms * 1_000_000));
        assert_eq!(
            (all.step_ms(SlowestOfStep, 0.5), all.step_ms(SlowestOfStep, 0.99)),
            (Some(20.0), Some(30.0))
        );
        let none = AllSteps::new([]);
        assert_eq!(
            (
                none.samples_per_s(SlowestRank),
                none.step_ms(SlowestOfStep, 0.5),
                none.mean(|t| t.step)
            ),
            (None, None, None)
        );
    }

    #[test]
    fn ranks_that_do_not_wait_take_as_long_as_the_one_that_takes_longest() {
        // Each rank is slow in other steps: 60 and 55 ms in all, and 90 ms would be the sum of the slowest.
        let (one, other) = (log(&[(10, 0), (40, 0), (10, 0)]), log(&[(35, 0), (10, 0), (5, 5)]));
        let all = AllSteps::new([&one, &other]);
        assert!((all.samples_per_s(SlowestRank).unwrap() - 300.0 / 0.060).abs() < 1e-6);
    }

    #[test]
    fn a_slow_loader_shows_in_samples_per_second() {
        let fast = log(&[(10, 0); 20]);
        // Every tenth batch is late: a median would not notice.
        let mut stalls = [(10, 0); 20];
        (0..20).step_by(10).for_each(|at| stalls[at].1 = 100);
        let slow = log(&stalls);
        let (fast, slow) = (AllSteps::new([&fast]), AllSteps::new([&slow]));
        assert_eq!(fast.step_ms(SlowestOfStep, 0.5), slow.step_ms(SlowestOfStep, 0.5));
        assert!((fast.samples_per_s(SlowestRank).unwrap() - 10_000.0).abs() < 1e-6);
        assert!((slow.samples_per_s(SlowestRank).unwrap() - 5_000.0).abs() < 1e-6);
    }

    #[test]
    fn runs_whose_steps_drift_are_farther_apart() {
        let apart = |slow: fn(u64) -> bool| {
            let walls = (0..80).map(|number| (if slow(number) { 12 } else { 10 }, 0));
            AllSteps::new([&log(&walls.collect::<Vec<_>>())]).apart_ms()
        };
        // The same steps: every other one is slow, or the second half of the run.
        assert_eq!(apart(|number| number % 2 == 0), Some(0.0));
        let drift = apart(|number| number >= 40).unwrap();
        // The means of the parts are 10 and 12, their deviation is 2 * sqrt(2 / 7), and 1.415 * sqrt(2 / 8) of it counts.
        assert!((drift - 0.7564).abs() < 1e-3, "{drift}");
        assert_eq!(AllSteps::new([&log(&[(10, 0); PARTS - 1])]).apart_ms(), None);
    }

    #[test]
    fn samples_that_ranks_do_not_share_are_added_up() {
        let mut logs = [StepLog::default(), StepLog::default()];
        for (rank, log) in logs.iter_mut().enumerate() {
            let times = StepTimes { step: 1_000_000_000, ..StepTimes::default() };
            log.push(0, &times, &loss(10 + rank, false));
            log.push(1, &times, &loss(21, true));
        }
        assert_eq!(AllSteps::new(&logs).samples_per_s(SlowestRank), Some(21.0));
    }
}
