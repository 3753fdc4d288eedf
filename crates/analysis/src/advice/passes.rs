//! The gains that a replay of backward passes predicts: from other buckets, from having buckets, from fewer bytes, and from no
//! operations that the passes wait for.
//!
//! Input: steps as all ranks saw them, which gradients travel together, and the cost of an operation. Each step is replayed
//! on its own, as it is and changed: an operation begins when the last rank has come to it. Output: the gain of the steps. This
//! module does not know how a program makes such a change.

use paceline_table::stats::median;

use super::gain::Gain;
use super::observed::{Observed, RankStep, Seen};
use super::replay::{Backward, Bucket, Played};

/// The backward pass of a step on all ranks.
struct Step<'a> {
    /// The pass of the last rank: an operation begins when all have come to it.
    last: Backward,
    /// The same without the time that the passes take to prepare buckets, and the ends of the passes of all ranks.
    without: (Backward, Vec<f64>),
    /// When all operations were done and all passes had ended.
    finish: f64,
    /// How long the forward pass waited for operations.
    forward_blocked: f64,
    /// How long both passes waited.
    blocked: f64,
    seen: &'a Seen,
}

/// The gain of steps that take no time to prepare buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unprepared {
    /// The gain of a step.
    pub gain: Gain,
    /// The exposed communication that would be gone, in milliseconds: a median over the steps. It may be negative.
    pub removes_ms: f64,
    /// The exposed communication that there would be, in milliseconds: a median over the steps.
    pub exposed_ms: f64,
}

/// Measured backward passes, which can be replayed.
pub struct Passes<'a> {
    plan: Vec<Bucket>,
    cost: &'a dyn Fn(u64) -> f64,
    steps: Vec<Step<'a>>,
}

impl<'a> Passes<'a> {
    /// From measured steps with these buckets, in the order of sending, and this opening message ([`Backward`]). An operation
    /// on `bytes` bytes takes `cost(bytes)` milliseconds. `None` if it is not known when some gradient was final.
    pub fn measured(
        observed: &'a Observed,
        plan: Vec<Bucket>,
        opening_bytes: Option<u64>,
        cost: &'a dyn Fn(u64) -> f64,
    ) -> Option<Self> {
        let mut gradients = plan.iter().flat_map(|bucket| &bucket.gradients);
        if gradients.any(|id| !observed.gradients.contains(id)) {
            return None;
        }
        let steps = observed.alike().map(|seen| step(seen, observed, &plan, opening_bytes));
        let steps: Vec<Step> = steps.collect();
        (!steps.is_empty()).then_some(Self { plan, cost, steps })
    }

    fn play(&self, backward: &Backward) -> Played {
        backward.play(&self.plan, self.cost)
    }

    /// By how much each measured step ended later than its replay.
    fn missed(&self, now: &[Played]) -> Vec<f64> {
        self.steps.iter().zip(now).map(|(step, of)| step.finish - of.finish()).collect()
    }

    /// By how much steps usually end later than operations of their size explain, in milliseconds.
    pub fn unexplained_ms(&self) -> Option<f64> {
        median(self.missed(&self.as_is()))
    }

    fn as_is(&self) -> Vec<Played> {
        self.steps.iter().map(|step| self.play(&step.last)).collect()
    }

    /// The gain from the replays of each step as it was and changed. The error of a step's replay is added to the
    /// spread, but not to the gain. `None` if the replay misses more than it promises.
    fn gain(&self, now: &[Played], changed: &[f64]) -> Option<Gain> {
        let missed = self.missed(now);
        let usual = median(missed.iter().copied())?;
        let steps = now.iter().zip(changed).zip(&missed);
        let gain =
            Gain::of(steps.map(|((now, changed), missed)| now.finish() - changed + missed - usual));
        gain.filter(|gain| usual.abs() <= gain.ms)
    }

    /// The milliseconds from the start of the backward pass until it has ended and these buckets are there; the part of them that
    /// is exposed communication; and the gain of a step over the buckets as they are: medians over the replayed steps.
    pub fn with_buckets(&self, plan: &[Bucket]) -> Option<[f64; 3]> {
        let played = || self.steps.iter().map(|step| (step, step.last.play(plan, self.cost)));
        let whole = median(played().map(|(step, of)| of.finish() - step.last.begin))?;
        let exposed = median(played().map(|(_, of)| of.exposed()))?;
        let gain = played().map(|(step, of)| self.play(&step.last).finish() - of.finish());
        Some([whole, exposed, median(gain)?])
    }

    /// The best of other buckets, each with its name, and its gain. The second value is whether it is certain that none would
    /// gain more than `least_ms`.
    pub fn other_buckets<T>(
        &self,
        plans: impl IntoIterator<Item = (T, Vec<Bucket>)>,
        least_ms: f64,
    ) -> (Option<(T, Gain)>, bool) {
        let now = self.as_is();
        let mut tried: Vec<Vec<Bucket>> = vec![self.plan.clone()];
        let mut best: Option<(T, Gain, usize)> = None;
        let mut usual_gain = f64::NEG_INFINITY;
        for (name, plan) in plans {
            if tried.contains(&plan) {
                continue;
            }
            let changed = self.steps.iter().map(|step| step.last.play(&plan, self.cost).finish());
            let changed: Vec<f64> = changed.collect();
            let count = plan.len();
            tried.push(plan);
            let gains = now.iter().zip(&changed).map(|(now, then)| now.finish() - then);
            usual_gain = usual_gain.max(median(gains).unwrap_or(0.0));
            let Some(gain) = self.gain(&now, &changed) else { continue };
            // Fewer operations win, unless more of them gain a tenth more.
            let is_better = best.as_ref().is_none_or(|(_, of, fewest)| {
                let tenth = 0.1 * of.low_ms.abs();
                gain.low_ms > of.low_ms + if count > *fewest { tenth } else { -tenth }
            });
            if is_better {
                best = Some((name, gain, count));
            }
        }
        (best.map(|(name, gain, _)| (name, gain)), usual_gain <= least_ms)
    }

    /// Half of the bytes, where a bucket of `bytes` bytes takes `before(bytes)` milliseconds to convert before it is sent, and
    /// `after(bytes)` once it has arrived. The second value is the milliseconds for converting, which the gain has taken off.
    pub fn half_the_bytes(
        &self,
        before: impl Fn(u64) -> f64,
        after: impl Fn(u64) -> f64,
    ) -> Option<(Gain, f64)> {
        let halved = |bytes: u64| (self.cost)(bytes / 2);
        let bytes = || self.plan.iter().map(|bucket| bucket.bytes);
        let changed = self.steps.iter().map(|step| {
            let played = step.last.play_with(&self.plan, self.cost, halved, &before);
            played.finish_after(bytes(), &after)
        });
        let gain = self.gain(&self.as_is(), &changed.collect::<Vec<_>>())?;
        Some((gain, bytes().map(|bytes| before(bytes) + after(bytes)).sum()))
    }

    /// The buckets sent beside the pass, in steps that did not do so.
    pub fn beside_the_pass(&self) -> Option<Gain> {
        Gain::of(self.missed(&self.as_is()))
    }

    /// Buckets sent without preparation, in steps that took time to prepare them.
    pub fn unprepared(&self) -> Option<Unprepared> {
        let exposed = |step: &Step| {
            let (backward, ends) = &step.without;
            let played = self.play(backward);
            let of_rank =
                |end: &f64| played.blocked + (played.finish() - end - played.blocked).max(0.0);
            let of_ranks = ends.iter().map(of_rank).sum::<f64>() / ends.len().max(1) as f64;
            of_ranks + step.forward_blocked
        };
        let exposed: Vec<f64> = self.steps.iter().map(exposed).collect();
        let steps = || self.steps.iter().zip(&exposed);
        Some(Unprepared {
            gain: Gain::of(steps().map(|(step, of)| step.seen.exposed + step.seen.sync - of))?,
            removes_ms: median(steps().map(|(step, of)| step.seen.exposed - of))?,
            exposed_ms: median(exposed.iter().copied())?,
        })
    }

    /// No operations that the passes wait for. `None` if the passes wait for no operations now.
    pub fn without_blocking(&self) -> Option<Gain> {
        if self.steps.iter().all(|step| step.last.blocking.is_empty() && step.blocked == 0.0) {
            return None;
        }
        let gain = |step: &Step| {
            let without = Backward { blocking: Vec::new(), ..step.last.clone() };
            step.forward_blocked + self.play(&step.last).finish() - self.play(&without).finish()
        };
        Gain::of(self.steps.iter().map(gain))
    }
}

fn step<'a>(
    seen: &'a Seen,
    observed: &Observed,
    plan: &[Bucket],
    opening_bytes: Option<u64>,
) -> Step<'a> {
    let num_gradients = observed.gradients.iter().max().map_or(0, |last| last + 1);
    let ready = |rank: &RankStep, moved: &dyn Fn(f64) -> f64| {
        let mut ready = vec![0.0; num_gradients];
        for (id, at) in observed.gradients.iter().zip(&rank.ready) {
            ready[*id] = moved(*at);
        }
        ready
    };
    let of_rank = |rank: &RankStep, moved: &dyn Fn(f64) -> f64| {
        let waited = observed.blocking_ops.iter().map(|&at| {
            let [submitted, .., done] = rank.ops[at];
            let begin = moved(submitted);
            (begin, begin + (done - submitted), observed.bytes[at])
        });
        let waited: Vec<_> = waited.collect();
        Backward::new(ready(rank, moved), rank.backward.map(moved), opening_bytes, &waited)
    };
    let as_measured: Vec<Backward> =
        seen.ranks.iter().map(|rank| of_rank(rank, &|at| at)).collect();
    let without = seen.ranks.iter().map(|rank| {
        let preparing = preparing(rank, &ready(rank, &|at| at), observed, plan);
        of_rank(rank, &|at| {
            let before = preparing.iter().filter(|(sent, _)| *sent <= at);
            at - before.map(|(_, ms)| ms).sum::<f64>()
        })
    });
    let without: Vec<Backward> = without.collect();
    let ends = |all: &[Backward]| all.iter().map(|of| of.end).collect::<Vec<f64>>();
    let blocked = |is_of: &dyn Fn(&RankStep, f64) -> bool| {
        let of_rank = |rank: &RankStep| {
            let ops = observed.blocking_ops.iter().map(|at| rank.ops[*at]);
            let ops = ops.filter(|[submitted, ..]| is_of(rank, *submitted));
            ops.map(|[submitted, .., done]| done - submitted).sum::<f64>()
        };
        seen.ranks.iter().map(of_rank).sum::<f64>() / seen.ranks.len().max(1) as f64
    };
    let done = seen.ranks.iter().flat_map(|rank| rank.ops.iter().map(|op| op[3]));
    let pass_ends = seen.ranks.iter().map(|rank| rank.backward[1]);
    Step {
        finish: done.chain(pass_ends).fold(f64::NEG_INFINITY, f64::max),
        forward_blocked: blocked(&|rank, at| at < rank.backward[0]),
        blocked: blocked(&|_, _| true),
        without: (last(&without), ends(&without)),
        last: last(&as_measured),
        seen,
    }
}

/// When this rank had prepared each bucket, and how long that took: from its last gradient, or from the bucket
/// before it, until it was submitted.
fn preparing(
    rank: &RankStep,
    measured: &[f64],
    observed: &Observed,
    plan: &[Bucket],
) -> Vec<(f64, f64)> {
    let mut before = f64::NEG_INFINITY;
    let sent = plan.iter().zip(&observed.bucket_ops).map(|(bucket, at)| {
        let submitted = rank.ops[*at][0];
        let ready = bucket.gradients.iter().map(|id| measured[*id]);
        let ms = (submitted - ready.fold(before, f64::max)).max(0.0);
        before = submitted;
        (submitted, ms)
    });
    sent.collect()
}

/// The pass of the last rank: each of its times is that of the rank that comes last.
fn last(ranks: &[Backward]) -> Backward {
    let later = |mut all: Backward, rank: &Backward| {
        all.ready.iter_mut().zip(&rank.ready).for_each(|(at, of)| *at = at.max(*of));
        all.blocking.iter_mut().zip(&rank.blocking).for_each(|(at, of)| at.at = at.at.max(of.at));
        (all.begin, all.end) = (all.begin.max(rank.begin), all.end.max(rank.end));
        all
    };
    ranks[1..].iter().fold(ranks[0].clone(), later)
}

/// The same for steps that are not replayed: the passes would not wait for these operations.
pub fn without_blocking(observed: &Observed) -> Option<Gain> {
    if observed.blocking_ops.is_empty() {
        return None;
    }
    Gain::of(observed.alike().map(|step| {
        let of_rank = |rank: &RankStep| -> f64 {
            observed.blocking_ops.iter().map(|at| rank.ops[*at][3] - rank.ops[*at][0]).sum()
        };
        step.ranks.iter().map(of_rank).sum::<f64>() / step.ranks.len() as f64
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn changes_of_steps_gain_what_their_replay_does() {
        // Four gradients of 1 MiB, final at 20, 30, 40 and 50 ms, where the pass ends. They travel in one bucket until 82 ms.
        let rank = RankStep {
            backward: [10.0, 50.0],
            ready: vec![20.0, 30.0, 40.0, 50.0],
            ops: vec![[50.0, 50.0, 50.0, 82.0]],
            waiting: 0.0,
        };
        let seen = Seen { is_alike: true, exposed: 32.0, ranks: vec![rank; 2], ..Seen::default() };
        let mut observed = Observed {
            steps: vec![seen; 6],
            gradients: vec![3, 2, 1, 0],
            bytes: vec![4 * MB],
            bucket_ops: vec![0],
            blocking_ops: Vec::new(),
        };
        let cost = |bytes: u64| 8.0 * bytes as f64 / MB as f64;
        let bucket =
            |gradients: Vec<usize>| Bucket { bytes: MB * gradients.len() as u64, gradients };
        let all = vec![bucket(vec![0, 1, 2, 3])];
        let each = vec![bucket(vec![3]), bucket(vec![2]), bucket(vec![1]), bucket(vec![0])];
        let passes = Passes::measured(&observed, all.clone(), None, &cost).unwrap();
        assert_eq!(passes.unexplained_ms(), Some(0.0));
        let steady = |ms| Gain::steady(ms, 6);
        let (best, is_certain) = passes.other_buckets([("all", all.clone()), ("each", each)], 1.0);
        assert_eq!((best, is_certain), (Some(("each", steady(24.0))), false));
        assert_eq!(passes.other_buckets([("all", all.clone())], 1.0), (None, true));
        // 1 ms per MiB before, and 1 ms after, of the 16 ms that half of the bytes take less.
        let convert = |bytes: u64| bytes as f64 / MB as f64;
        assert_eq!(passes.half_the_bytes(convert, convert), Some((steady(8.0), 8.0)));
        assert_eq!((passes.without_blocking(), without_blocking(&observed)), (None, None));
        observed.gradients.pop();
        assert!(Passes::measured(&observed, all, None, &cost).is_none(), "a gradient is unknown");
    }
}
