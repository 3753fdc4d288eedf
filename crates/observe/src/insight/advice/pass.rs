//! What the replay of backward passes can tell: bucket sizes, buckets at all, compression, and the blocking sums of a
//! synchronized batch norm.
//!
//! Input: measured steps as all ranks saw them, and what an operation costs. Each step is replayed on its own, as it is
//! and changed: an operation begins when the last rank has come to it. Output: remedies, each with what the steps would gain.

use paceline_model::Layout;
use paceline_strategies::{Bucket, BucketCaps};
use paceline_table::stats::median;

use super::gain::{Gain, Remedy};
use crate::insight::observed::{Observed, RankStep, Seen};
use crate::insight::replay::{Backward, Blocking, Played, bytes_of, sizes};

/// What an operation on this many bytes takes, in milliseconds.
pub type Cost<'a> = &'a dyn Fn(u64) -> f64;

/// What rounding gradients to 16 bits and widening them takes, in milliseconds per gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conversion {
    /// Rounding, before a bucket is sent.
    pub narrow_ms: f64,
    /// Widening, after it has arrived.
    pub widen_ms: f64,
}

/// A rank's operation that a pass waits for: when the pass came to it, when it was done, and its bytes.
type Waited = (f64, f64, u64);

/// The backward pass of a rank, from when the gradients of its layout are final. The waits for `statistics`, the sums of a
/// synchronized batch norm, are taken out of the times.
pub fn backward<'a>(
    mut ready: Vec<f64>,
    [begin, end]: [f64; 2],
    statistics: &[Waited],
    layout: &'a Layout,
) -> Backward<'a> {
    let within = || statistics.iter().filter(|(at, ..)| *at >= begin);
    let waited = |until: f64| -> f64 {
        within().filter(|(_, done, _)| *done <= until).map(|(at, done, _)| done - at).sum()
    };
    ready.iter_mut().for_each(|at| *at -= waited(*at));
    let blocking = within().map(|(at, _, bytes)| Blocking { at: at - waited(*at), bytes: *bytes });
    Backward { layout, ready, begin, end: end - waited(end), blocking: blocking.collect() }
}

/// The backward pass of a step on all ranks.
struct Step<'a> {
    /// That of the last rank: an operation begins when all have come to it.
    last: Backward<'a>,
    /// The same without the time that compression takes in the passes, and the ends of the passes of all ranks.
    without: (Backward<'a>, Vec<f64>),
    /// When all operations were done and all passes had ended.
    finish: f64,
    /// For how long the forward pass waited for statistics.
    forward_statistics: f64,
    /// For how long both passes did.
    statistics: f64,
    seen: &'a Seen,
}

/// Measured backward passes, which can be replayed.
pub struct Passes<'a> {
    caps: BucketCaps,
    plan: Vec<Bucket>,
    cost: Cost<'a>,
    steps: Vec<Step<'a>>,
}

impl<'a> Passes<'a> {
    /// From what a run has measured; `None` if it is not known when some gradient was final.
    pub fn measured(
        caps: BucketCaps,
        observed: &'a Observed,
        layout: &'a Layout,
        cost: Cost<'a>,
    ) -> Option<Self> {
        if layout.trained().any(|(id, _)| !observed.params.contains(&id.0)) {
            return None;
        }
        let mut passes = Self { caps, plan: Vec::new(), cost, steps: Vec::new() };
        let steps: Vec<Step> =
            observed.alike().map(|seen| passes.step(seen, observed, layout)).collect();
        passes.plan = steps.first()?.last.plan(caps);
        passes.steps = steps;
        Some(passes)
    }

    fn step(&self, seen: &'a Seen, observed: &Observed, layout: &'a Layout) -> Step<'a> {
        let of_rank = |rank: &RankStep, moved: &dyn Fn(f64) -> f64| {
            let mut ready = vec![0.0; layout.params().len()];
            for (param, at) in observed.params.iter().zip(&rank.ready) {
                ready[*param] = moved(*at);
            }
            let statistics = observed.statistics_ops.iter().map(|&at| {
                let [submitted, .., done] = rank.ops[at];
                let begin = moved(submitted);
                (begin, begin + (done - submitted), observed.bytes[at])
            });
            backward(ready, rank.backward.map(moved), &statistics.collect::<Vec<_>>(), layout)
        };
        let as_measured: Vec<Backward> =
            seen.ranks.iter().map(|rank| of_rank(rank, &|at| at)).collect();
        let without = seen.ranks.iter().zip(&as_measured).map(|(rank, backward)| {
            let compressing = self.compressing(rank, backward, observed);
            of_rank(rank, &|at| {
                let before = compressing.iter().filter(|(sent, _)| *sent <= at);
                at - before.map(|(_, ms)| ms).sum::<f64>()
            })
        });
        let without: Vec<Backward> = without.collect();
        let ends = |all: &[Backward]| all.iter().map(|of| of.end).collect::<Vec<f64>>();
        let statistics = |is_of: &dyn Fn(&RankStep, f64) -> bool| {
            let of_rank = |rank: &RankStep| {
                let ops = observed.statistics_ops.iter().map(|at| rank.ops[*at]);
                let ops = ops.filter(|[submitted, ..]| is_of(rank, *submitted));
                ops.map(|[submitted, .., done]| done - submitted).sum::<f64>()
            };
            seen.ranks.iter().map(of_rank).sum::<f64>() / seen.ranks.len().max(1) as f64
        };
        let done = seen.ranks.iter().flat_map(|rank| rank.ops.iter().map(|op| op[3]));
        let pass_ends = seen.ranks.iter().map(|rank| rank.backward[1]);
        Step {
            finish: done.chain(pass_ends).fold(f64::NEG_INFINITY, f64::max),
            forward_statistics: statistics(&|rank, at| at < rank.backward[0]),
            statistics: statistics(&|_, _| true),
            without: (last(&without), ends(&without)),
            last: last(&as_measured),
            seen,
        }
    }

    /// When this rank had compressed each bucket, and how long that took: from its last gradient, or from the bucket
    /// before it, until it was submitted.
    fn compressing(
        &self,
        rank: &RankStep,
        backward: &Backward,
        observed: &Observed,
    ) -> Vec<(f64, f64)> {
        let final_at = |bucket: &Bucket| {
            let of = |id: usize| observed.params.iter().position(|param| *param == id);
            let ready = bucket.params.iter().filter_map(|id| Some(rank.ready[of(id.0)?]));
            ready.fold(f64::NEG_INFINITY, f64::max)
        };
        let plan = backward.plan(self.caps);
        let mut before = f64::NEG_INFINITY;
        let sent = plan.iter().zip(&observed.bucket_ops).map(|(bucket, at)| {
            let submitted = rank.ops[*at][0];
            let ms = (submitted - final_at(bucket).max(before)).max(0.0);
            before = submitted;
            (submitted, ms)
        });
        sent.collect()
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
        self.steps
            .iter()
            .map(|step| step.last.play_plan(&self.plan, self.cost, self.cost, |_| 0.0))
            .collect()
    }

    /// The gain from the replays of each step as it was and changed. What the replay of a step misses is added to the
    /// spread, but not to the gain. `None` if the replay misses more than it promises.
    fn gain(&self, now: &[Played], changed: &[f64]) -> Option<Gain> {
        let missed = self.missed(now);
        let usual = median(missed.iter().copied())?;
        let steps = now.iter().zip(changed).zip(&missed);
        let gain =
            Gain::of(steps.map(|((now, changed), missed)| now.finish() - changed + missed - usual));
        gain.filter(|gain| usual.abs() <= gain.ms)
    }

    /// For `ddp`: other sizes of buckets. The second value is whether it is certain that none would help.
    pub fn other_buckets(&self, least_ms: f64) -> (Option<Remedy>, bool) {
        let Some(first) = self.steps.first() else { return (None, false) };
        let now = self.as_is();
        let mut plans: Vec<(BucketCaps, Vec<Bucket>)> = Vec::new();
        for caps in sizes() {
            let plan = first.last.plan(caps);
            if plan != self.plan && plans.iter().all(|(_, of)| *of != plan) {
                plans.push((caps, plan));
            }
        }
        let mut best: Option<(Gain, usize, BucketCaps)> = None;
        let mut usual_gain = f64::NEG_INFINITY;
        for (caps, plan) in &plans {
            let changed = self
                .steps
                .iter()
                .map(|step| step.last.play_plan(plan, self.cost, self.cost, |_| 0.0).finish());
            let changed: Vec<f64> = changed.collect();
            let gains = now.iter().zip(&changed).map(|(now, then)| now.finish() - then);
            usual_gain = usual_gain.max(median(gains).unwrap_or(0.0));
            let Some(gain) = self.gain(&now, &changed) else { continue };
            // Fewer operations win, unless more of them gain a tenth more.
            let is_better = best.is_none_or(|(of, count, _)| match plan.len() > count {
                true => gain.low_ms > of.low_ms + 0.1 * of.low_ms.abs(),
                false => gain.low_ms > of.low_ms - 0.1 * of.low_ms.abs(),
            });
            if is_better {
                best = Some((gain, plan.len(), *caps));
            }
        }
        let remedy = best.map(|(gain, _, caps)| Remedy {
            change: format!(
                "`--bucket-cap-mb {} --first-bucket-mb {}`",
                mib(caps.bytes),
                mib(caps.first_bytes)
            ),
            removes_ms: gain.ms,
            gain,
            costs: None,
            also: None,
            changes_weights: false,
        });
        (remedy, usual_gain <= least_ms)
    }

    /// For `ddp`: half of the bytes.
    pub fn half_the_bytes(&self, conversion: Conversion) -> Option<Remedy> {
        let elems = |bytes: u64| bytes as f64 / size_of::<f32>() as f64;
        let narrow = |bytes: u64| conversion.narrow_ms * elems(bytes);
        let widen = |bytes: u64| conversion.widen_ms * elems(bytes);
        let halved = |bytes: u64| (self.cost)(bytes / 2);
        let now = self.as_is();
        let changed = self.steps.iter().map(|step| {
            let played = step.last.play_plan(&self.plan, self.cost, halved, narrow);
            played.finish_after(self.plan.iter().map(bytes_of), widen)
        });
        let changed: Vec<f64> = changed.collect();
        let gain = self.gain(&now, &changed)?;
        let converting: f64 =
            self.plan.iter().map(bytes_of).map(|bytes| narrow(bytes) + widen(bytes)).sum();
        Some(Remedy {
            change: "`--strategy bf16`".to_owned(),
            removes_ms: gain.ms + converting,
            gain,
            costs: Some(("converting", converting)),
            also: None,
            changes_weights: true,
        })
    }

    /// For strategies that block where `ddp` would communicate beside the pass.
    pub fn with_ddp(&self) -> Option<Remedy> {
        let gains: Vec<f64> = self
            .as_is()
            .iter()
            .zip(&self.steps)
            .map(|(of, step)| step.finish - of.finish())
            .collect();
        let gain = Gain::of(gains)?;
        Some(Remedy {
            change: "`--strategy ddp`".to_owned(),
            gain,
            removes_ms: gain.ms,
            costs: None,
            also: Some("It sends the same bytes in buckets during the backward pass".to_owned()),
            changes_weights: false,
        })
    }

    /// For strategies that compress gradients, which takes time too: none. What would be exposed then is the second value.
    pub fn without_compression(&self) -> Option<(Remedy, f64)> {
        let exposed = |step: &Step| {
            let (backward, ends) = &step.without;
            let played = backward.play_plan(&self.plan, self.cost, self.cost, |_| 0.0);
            let of_rank =
                |end: &f64| played.blocked + (played.finish() - end - played.blocked).max(0.0);
            let of_ranks = ends.iter().map(of_rank).sum::<f64>() / ends.len().max(1) as f64;
            of_ranks + step.forward_statistics
        };
        let exposed: Vec<f64> = self.steps.iter().map(exposed).collect();
        let steps = || self.steps.iter().zip(&exposed);
        let gain = Gain::of(steps().map(|(step, of)| step.seen.exposed + step.seen.sync - of))?;
        let removes_ms = median(steps().map(|(step, of)| step.seen.exposed - of))?;
        let remedy = Remedy {
            change: "`--strategy ddp`".to_owned(),
            gain,
            removes_ms,
            costs: None,
            also: None,
            changes_weights: true,
        };
        Some((remedy, median(exposed)?))
    }

    /// No synchronized batch norms.
    pub fn without_statistics(&self) -> Option<Remedy> {
        if self.steps.iter().all(|step| step.last.blocking.is_empty() && step.statistics == 0.0) {
            return None;
        }
        let gain = |step: &Step| {
            let play = |of: &Backward| of.play_plan(&self.plan, self.cost, self.cost, |_| 0.0);
            let without = Backward { blocking: Vec::new(), ..step.last.clone() };
            step.forward_statistics + play(&step.last).finish() - play(&without).finish()
        };
        no_statistics(self.steps.iter().map(gain))
    }
}

/// The pass of the last rank: each of its times is that of the rank that comes last.
fn last<'a>(ranks: &[Backward<'a>]) -> Backward<'a> {
    let later = |mut all: Backward<'a>, rank: &Backward<'a>| {
        all.ready.iter_mut().zip(&rank.ready).for_each(|(at, of)| *at = at.max(*of));
        all.blocking.iter_mut().zip(&rank.blocking).for_each(|(at, of)| at.at = at.at.max(of.at));
        (all.begin, all.end) = (all.begin.max(rank.begin), all.end.max(rank.end));
        all
    };
    ranks[1..].iter().fold(ranks[0].clone(), later)
}

/// The statistics of a step that is not replayed: the passes would not wait for them.
pub fn waits_for_statistics(observed: &Observed) -> Option<Remedy> {
    if observed.statistics_ops.is_empty() {
        return None;
    }
    no_statistics(observed.alike().map(|step| {
        let of_rank = |rank: &RankStep| -> f64 {
            observed.statistics_ops.iter().map(|at| rank.ops[*at][3] - rank.ops[*at][0]).sum()
        };
        step.ranks.iter().map(of_rank).sum::<f64>() / step.ranks.len() as f64
    }))
}

fn no_statistics(gains: impl Iterator<Item = f64>) -> Option<Remedy> {
    let gain = Gain::of(gains)?;
    Some(Remedy {
        change: "leaving out `--sync-batch-norm`".to_owned(),
        removes_ms: gain.ms,
        gain,
        costs: None,
        also: Some("Each rank would normalize by its own samples".to_owned()),
        changes_weights: true,
    })
}

/// A size in MiB, as a flag takes it.
fn mib(bytes: usize) -> String {
    // The smallest size that is tried, 2^14 bytes, has six decimals in MiB.
    let text = format!("{:.6}", bytes as f64 / 1048576.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
