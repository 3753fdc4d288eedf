//! The gradients and buckets that traces of PyTorch's `DistributedDataParallel` show.
//!
//! Autograd records each gradient as it becomes final, with its shape if the profiler records shapes. The backend
//! records each all-reduce. Buckets are filled in the order in which gradients become final, so their sizes show which
//! gradients travel together. Input: the timelines of all ranks. Output: steps that can be replayed, and the buckets of any
//! size. Only passes of the processor are read: on a device, a gradient is final when its kernel ends.

use std::collections::{HashMap, VecDeque};

use paceline_table::stats::{quantile, two_term_fit};

use super::cost::Cost;
use super::observed::{Observed, RankStep, Seen};
use super::replay::Bucket;
use crate::backward::{self, BackwardPass};
use crate::hta::{CollectiveKind, collective_kind};
use crate::ranks::{Clocks, MatchedCollective, align, match_collectives};
use crate::steps::{self, Step};
use crate::timeline::{FinalGradient, Timeline};

/// From this number on, all-reduces of a step are many: most of their time may be latency.
const MANY: usize = 20;

/// A time in which the link was busy.
struct Busy {
    operations: f64,
    bytes: f64,
    ms: f64,
}

/// The gradients and buckets of a training run.
#[derive(Clone, Debug, PartialEq)]
pub struct Reducer {
    /// Its steps.
    pub observed: Observed,
    /// Its buckets.
    pub plan: Vec<Bucket>,
    /// The bytes of each gradient, in the order in which they are final.
    pub gradient_bytes: Vec<u64>,
}

impl Reducer {
    /// Reads the steps of all ranks. `None` unless these are the traces of two ranks or more of `DistributedDataParallel` on the
    /// processor, with the shapes of gradients and all-reduces, and with a step that has a backward pass on every rank.
    pub fn of(timelines: &[Timeline]) -> Option<Self> {
        let is_readable = |of: &Timeline| of.kernels.is_empty() && !of.gradients.is_empty();
        if timelines.len() < 2 || !timelines.iter().all(is_readable) {
            return None;
        }
        let clocks = align(timelines);
        let matched = match_collectives(timelines, &clocks);
        let of_steps = steps_of(timelines, &clocks, &matched.all);
        let (first, operations) = of_steps.first()?;
        let gradients: Vec<Vec<FinalGradient>> = timelines.iter().map(sorted).collect();
        let sizes: Vec<u64> =
            finals(&gradients[0], &first[0]).iter().map(|of| of.num_elems).collect();
        let elems = operations.iter().map(|of| of.num_elems);
        let elems: Vec<u64> = elems.collect::<Option<Vec<u64>>>()?;
        let elem_bytes = elem_bytes(timelines);
        let plan = plan_of(&sizes, &elems, elem_bytes)?;
        let mut seen = Vec::new();
        for (found, operations) in &of_steps {
            let is_alike =
                operations.iter().map(|of| of.num_elems.unwrap_or(0)).eq(elems.iter().copied());
            let base_ns = clocks.ranks[0].align(found[0].time.start_ns);
            let ms = |at_ns: i64| at_ns.saturating_sub(base_ns) as f64 / 1e6;
            let rank = |place: usize| {
                let (clock, pass) = (&clocks.ranks[place], found[place]);
                let ready = in_order(&sizes, finals(&gradients[place], &pass))?;
                let ready: Vec<f64> = ready.into_iter().map(|at| ms(clock.align(at))).collect();
                let op = |(of, bucket): (&&MatchedCollective, &Bucket)| {
                    let arrival = of.arrivals.iter().find(|arrival| arrival.place == place)?;
                    let submitted =
                        bucket.gradients.iter().map(|id| ready[*id]).fold(f64::MIN, f64::max);
                    let [started, done] = [arrival.start_ns, arrival.end_ns].map(ms);
                    let present = ms(arrival.start_ns.saturating_add(arrival.wait_ns));
                    Some([submitted, started, present, done])
                };
                let ops = operations.iter().zip(&plan).map(op).collect::<Option<Vec<_>>>()?;
                let ends = [pass.time.start_ns, pass.time.end_ns()];
                let backward = ends.map(|at| ms(clock.align(at)));
                Some(RankStep { backward, ready, ops, waiting: 0.0 })
            };
            let ranks: Option<Vec<RankStep>> = (0..timelines.len()).map(rank).collect();
            let Some(ranks) = ranks.filter(|_| is_alike) else { continue };
            let exposed = found.iter().map(|pass| pass.wait.dur_ns as f64 / 1e6).sum::<f64>();
            let exposed = exposed / timelines.len() as f64;
            seen.push(Seen { is_alike, exposed, waiting: 0.0, sync: 0.0, ranks });
        }
        let observed = Observed {
            steps: seen,
            gradients: (0..sizes.len()).collect(),
            bytes: plan.iter().map(|bucket| bucket.bytes).collect(),
            bucket_ops: (0..plan.len()).collect(),
            blocking_ops: Vec::new(),
        };
        let gradient_bytes = sizes.iter().map(|elems| elems.saturating_mul(elem_bytes)).collect();
        Some(Self { observed, plan, gradient_bytes })
    }

    /// The buckets of this size, as `bucket_cap_mb` makes them: a bucket is closed by the gradient that fills it.
    pub fn buckets(&self, cap_bytes: u64) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        for (id, bytes) in self.gradient_bytes.iter().enumerate() {
            match buckets.last_mut().filter(|last| last.bytes < cap_bytes) {
                Some(last) => {
                    last.bytes = last.bytes.saturating_add(*bytes);
                    last.gradients.push(id);
                }
                None => buckets.push(Bucket { gradients: vec![id], bytes: *bytes }),
            }
        }
        buckets
    }

    /// The milliseconds that an all-reduce takes, from its bytes: a latency, if the steps show it, and a time per byte.
    ///
    /// A backend with several threads carries several all-reduces at once, which share the link. So the times of single ones mean
    /// little, and the fit is of how long the link was busy with how many of them.
    ///
    /// Where sizes differ too little for a fit, but all-reduces are many, the bytes of each took no longer than the quickest one.
    /// The usual one takes longer by its latency.
    pub fn cost(&self) -> (Option<f64>, Cost) {
        let busy: Vec<Busy> = self.observed.alike().flat_map(|step| self.busy(step)).collect();
        let sum = |part: fn(&Busy) -> f64| busy.iter().map(part).sum::<f64>();
        let size = |of: &Busy| of.bytes / of.operations;
        let least = busy.iter().map(size).fold(f64::INFINITY, f64::min);
        let most = busy.iter().map(size).fold(0.0, f64::max);
        let point = |of: &Busy| ([of.operations, of.bytes], of.ms, 1.0);
        let fitted = two_term_fit(busy.iter().map(point));
        // Times of one size say nothing about the latency.
        let fitted = fitted.filter(|[latency, per_byte]| {
            most > 1.1 * least && *latency >= 0.0 && *per_byte >= 0.0
        });
        let known = fitted.or_else(|| {
            (self.plan.len() >= MANY).then_some(())?;
            let usual_ms = sum(|of| of.ms) / sum(|of| of.operations);
            let bytes_ms = self.quickest_ms()?.min(usual_ms);
            Some([usual_ms - bytes_ms, bytes_ms * sum(|of| of.operations) / sum(|of| of.bytes)])
        });
        let by_bytes = sum(|of| of.ms * of.bytes) / sum(|of| of.bytes * of.bytes);
        let [latency, per_byte] = known.unwrap_or([0.0, by_bytes]);
        let cost = move |bytes: u64| latency + per_byte * bytes as f64;
        (known.map(|[latency, _]| latency), Box::new(cost))
    }

    /// The 5th percentile of the times of the all-reduces, from when all ranks had started, in milliseconds.
    fn quickest_ms(&self) -> Option<f64> {
        let time = |step: &Seen, at: usize| step.latest(at, 3) - step.latest(at, 1);
        let all = |step| (0..self.plan.len()).map(move |at| time(step, at));
        let mut times: Vec<f64> = self.observed.alike().flat_map(all).collect();
        times.sort_unstable_by(f64::total_cmp);
        quantile(&times, 0.05)
    }

    /// The times in which the link was busy in a step: from when all ranks had come to an all-reduce until none was left.
    fn busy(&self, step: &Seen) -> Vec<Busy> {
        let (mut all, mut free) = (Vec::<Busy>::new(), f64::NEG_INFINITY);
        for (at, bucket) in self.plan.iter().enumerate() {
            let (begin, done, bytes) =
                (step.latest(at, 0), step.latest(at, 3), bucket.bytes as f64);
            match all.last_mut().filter(|_| begin < free) {
                Some(last) => {
                    last.operations += 1.0;
                    last.bytes += bytes;
                    last.ms += (done - free).max(0.0);
                }
                None => all.push(Busy { operations: 1.0, bytes, ms: done - begin }),
            }
            free = free.max(done);
        }
        all
    }
}

/// A step: its last backward pass on each rank, and its all-reduces.
type Paired<'a> = (Vec<BackwardPass>, Vec<&'a MatchedCollective>);

/// The steps that have a backward pass on every rank.
fn steps_of<'a>(
    timelines: &[Timeline],
    clocks: &Clocks,
    all: &'a [MatchedCollective],
) -> Vec<Paired<'a>> {
    let mut of_step: HashMap<u64, Vec<&'a MatchedCollective>> = HashMap::new();
    let is_whole =
        |of: &&MatchedCollective| of.arrivals.len() == timelines.len() && is_all_reduce(&of.name);
    for of in all.iter().filter(is_whole) {
        of_step.entry(of.step.unwrap_or(u64::MAX)).or_default().push(of);
    }
    let passes: Vec<HashMap<u64, BackwardPass>> = timelines.iter().map(last_passes).collect();
    let mut of_steps = Vec::new();
    for Step { number, .. } in steps::of(&timelines[0]) {
        let pass_of = |passes: &HashMap<u64, BackwardPass>| passes.get(&number).copied();
        let found: Option<Vec<BackwardPass>> = passes.iter().map(pass_of).collect();
        let Some(found) = found else { continue };
        let begin =
            found.iter().zip(&clocks.ranks).map(|(of, clock)| clock.align(of.time.start_ns));
        let begin_ns = begin.min().unwrap_or_default();
        let mut operations = of_step.remove(&number).unwrap_or_default();
        operations.retain(|of| of.last().end_ns > begin_ns);
        of_steps.push((found, operations));
    }
    of_steps
}

fn is_all_reduce(name: &str) -> bool {
    collective_kind(name) == Some(CollectiveKind::AllReduce)
}

/// The last backward pass that begins in each step. Earlier ones of a step accumulate.
pub(super) fn last_passes(timeline: &Timeline) -> HashMap<u64, BackwardPass> {
    let steps = steps::of(timeline);
    let of_step = |pass: BackwardPass| {
        let step = steps::at(&steps, pass.time.start_ns)?;
        (pass.time.start_ns < step.time.end_ns()).then_some((step.number, pass))
    };
    backward::passes(timeline).into_iter().filter_map(of_step).collect()
}

/// The gradients of a trace, by time.
pub(super) fn sorted(timeline: &Timeline) -> Vec<FinalGradient> {
    let mut gradients = timeline.gradients.clone();
    gradients.sort_unstable();
    gradients
}

/// The gradients of a pass, in the order in which they were final. `sorted` has those of the whole trace by time.
pub(super) fn finals<'a>(sorted: &'a [FinalGradient], pass: &BackwardPass) -> &'a [FinalGradient] {
    let begin = sorted.partition_point(|of| of.at_ns < pass.time.start_ns);
    let end = sorted.partition_point(|of| of.at_ns <= pass.time.end_ns());
    &sorted[begin.min(end)..end]
}

/// When the gradients of these sizes were final, if those of the pass have just these sizes in any order. Gradients of equal size
/// keep their order.
pub(super) fn in_order(sizes: &[u64], finals: &[FinalGradient]) -> Option<Vec<i64>> {
    let mut by_size: HashMap<u64, VecDeque<i64>> = HashMap::new();
    for of in finals {
        by_size.entry(of.num_elems).or_default().push_back(of.at_ns);
    }
    let ready = sizes.iter().map(|elems| by_size.get_mut(elems)?.pop_front());
    let ready = ready.collect::<Option<Vec<i64>>>()?;
    (ready.len() == finals.len()).then_some(ready)
}

/// Which gradients travel together, if all-reduces of `elems` elements carry all gradients of `sizes` in this order.
fn plan_of(sizes: &[u64], elems: &[u64], elem_bytes: u64) -> Option<Vec<Bucket>> {
    let (mut plan, mut next) = (Vec::new(), 0);
    for &of_bucket in elems {
        let (mut gradients, mut sum) = (Vec::new(), 0u64);
        while sum < of_bucket && next < sizes.len() {
            gradients.push(next);
            sum = sum.saturating_add(sizes[next]);
            next += 1;
        }
        if sum != of_bucket {
            return None;
        }
        plan.push(Bucket { gradients, bytes: of_bucket.saturating_mul(elem_bytes) });
    }
    (next == sizes.len() && !plan.is_empty()).then_some(plan)
}

/// Bytes of an element, by the type that the all-reduces name.
pub(super) fn elem_bytes(timelines: &[Timeline]) -> u64 {
    let collectives = timelines.iter().flat_map(|timeline| &timeline.collectives);
    let mut names =
        collectives.filter(|of| is_all_reduce(&of.name)).filter_map(|of| of.dtype.as_deref());
    match names.next().map(str::to_ascii_lowercase) {
        Some(name) if name.contains("half") || name.contains("bfloat16") => 2,
        Some(name) if name.contains("double") => 8,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of buckets of these MiB, whose all-reduces were submitted and done at these times in every one of six steps.
    fn reducer(buckets: &[(u64, [f64; 2])]) -> Reducer {
        let ops = buckets.iter().map(|(_, [begin, done])| [*begin, *begin, *begin, *done]);
        let ready = buckets.iter().map(|(_, [begin, _])| *begin).collect();
        let rank = RankStep { backward: [0.0, 50.0], ready, ops: ops.collect(), waiting: 0.0 };
        let seen = Seen { is_alike: true, ranks: vec![rank; 2], ..Seen::default() };
        let gradient_bytes: Vec<u64> = buckets.iter().map(|(mib, _)| mib << 20).collect();
        let bucket = |(id, bytes): (usize, &u64)| Bucket { gradients: vec![id], bytes: *bytes };
        let plan: Vec<Bucket> = gradient_bytes.iter().enumerate().map(bucket).collect();
        let observed = Observed {
            steps: vec![seen; 6],
            gradients: (0..buckets.len()).collect(),
            bytes: gradient_bytes.clone(),
            bucket_ops: (0..buckets.len()).collect(),
            blocking_ops: Vec::new(),
        };
        Reducer { observed, plan, gradient_bytes }
    }

    #[test]
    fn all_reduces_that_share_the_link_tell_no_latency() {
        // 8 ms for each MiB. The first one is slowed down by the second one, which begins before it is done.
        let shared = reducer(&[(1, [10.0, 24.0]), (3, [12.0, 42.0])]);
        let (latency_ms, cost) = shared.cost();
        assert_eq!((latency_ms, cost(1 << 20)), (None, 8.0));
        // One after the other they do: 2 ms each, and 8 for each MiB.
        let (latency_ms, cost) = reducer(&[(1, [10.0, 20.0]), (3, [30.0, 56.0])]).cost();
        assert!((latency_ms.unwrap() - 2.0).abs() < 1e-9 && (cost(1 << 20) - 10.0).abs() < 1e-9);
        // Times that grow more slowly than the bytes by chance give no negative latency.
        let (latency_ms, cost) = reducer(&[(1, [10.0, 16.0]), (3, [30.0, 56.0])]).cost();
        assert!(latency_ms.is_none() && cost(0) == 0.0);
    }

    #[test]
    fn a_bucket_is_closed_by_the_gradient_that_fills_it() {
        let of = reducer(&[(1, [0.0; 2]), (1, [0.0; 2]), (3, [0.0; 2]), (1, [0.0; 2])]);
        let sizes = |cap: u64| -> Vec<usize> {
            of.buckets(cap).iter().map(|bucket| bucket.gradients.len()).collect()
        };
        assert_eq!(sizes(1), [1, 1, 1, 1]);
        assert_eq!(sizes(2 << 20), [2, 1, 1]);
        assert_eq!(sizes(3 << 20), [3, 1]);
        assert_eq!(sizes(u64::MAX), [4]);
    }

    #[test]
    fn buckets_that_are_no_sums_of_gradients_are_told() {
        let planned = plan_of(&[2, 3, 5], &[5, 5], 4).unwrap();
        let gradients: Vec<_> = planned.into_iter().map(|bucket| bucket.gradients).collect();
        assert_eq!(gradients, [vec![0, 1], vec![2]]);
        for (sizes, elems) in
            [(&[2, 3, 5][..], &[4, 6][..]), (&[2, 3, 5], &[5]), (&[u64::MAX, 9], &[7])]
        {
            assert_eq!(plan_of(sizes, elems, 4), None, "{sizes:?} {elems:?}");
        }
    }
}
