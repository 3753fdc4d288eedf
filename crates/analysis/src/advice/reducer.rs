//! What traces of PyTorch's `DistributedDataParallel` show of its gradients and buckets.
//!
//! Autograd records each gradient as it becomes final, with its shape if the profiler was told to record shapes. The backend
//! records each all-reduce. Buckets are filled in the order in which gradients become final, so their sizes tell which
//! gradients travel together. Input: the timelines of all ranks. Output: steps that can be replayed, and the buckets of any
//! size. Only passes of the processor are read: on a device, a gradient is final when its kernel ends.

use std::collections::{HashMap, VecDeque};

use paceline_table::stats::two_term_fit;

use super::cost::Cost;
use super::observed::{Observed, RankStep, Seen};
use super::replay::Bucket;
use crate::backward::{self, BackwardPass};
use crate::ranks::{MatchedCollective, align, match_collectives};
use crate::steps::{self, Step};
use crate::timeline::{FinalGradient, TimeRange, Timeline};

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
    /// Reads the steps of all ranks. Errors say what the traces do not show.
    pub fn of(timelines: &[Timeline]) -> Result<Self, String> {
        if timelines.len() < 2 {
            return Err("buckets need the traces of two ranks or more".to_owned());
        }
        if timelines.iter().any(|timeline| !timeline.kernels.is_empty()) {
            return Err("the backward pass ran on a device; gradients are read from passes of the processor".to_owned());
        }
        if timelines.iter().any(|timeline| timeline.gradients.is_empty()) {
            return Err(
                "no gradient has a size; pass record_shapes=True to torch.profiler.profile"
                    .to_owned(),
            );
        }
        let clocks = align(timelines);
        let matched = match_collectives(timelines, &clocks);
        let passes: Vec<Vec<BackwardPass>> = timelines.iter().map(backward::passes).collect();
        let all_steps: Vec<Vec<Step>> = timelines.iter().map(steps::of).collect();
        let mut of_steps = Vec::new();
        for Step { number, .. } in &all_steps[0] {
            let step_of =
                |place: usize| all_steps[place].iter().find(|step| step.number == *number);
            let pass_of = |place: usize| last_within(&passes[place], step_of(place)?.time);
            let found: Option<Vec<BackwardPass>> = (0..timelines.len()).map(pass_of).collect();
            let Some(found) = found else { continue };
            let begin =
                found.iter().zip(&clocks.ranks).map(|(of, clock)| clock.align(of.time.start_ns));
            let begin_ns = begin.min().unwrap_or_default();
            let operations = matched.all.iter().filter(|of| {
                of.step == Some(*number)
                    && of.arrivals.len() == timelines.len()
                    && is_all_reduce(&of.name)
                    && of.last().end_ns > begin_ns
            });
            of_steps.push((found, operations.collect::<Vec<&MatchedCollective>>()));
        }
        let Some((first, operations)) = of_steps.first() else {
            return Err("no step has a backward pass on every rank".to_owned());
        };
        let gradients = finals(&timelines[0], &first[0]);
        let sizes: Vec<u64> = gradients.iter().map(|of| of.num_elems).collect();
        let elems: Option<Vec<u64>> = operations.iter().map(|of| of.num_elems).collect();
        let elems = elems.ok_or("the all-reduces have no sizes; pass record_shapes=True")?;
        let elem_bytes = elem_bytes(timelines);
        let plan = plan_of(&sizes, &elems, elem_bytes)?;
        let mut seen = Vec::new();
        for (found, operations) in &of_steps {
            let is_alike =
                operations.iter().map(|of| of.num_elems.unwrap_or(0)).eq(elems.iter().copied());
            let base_ns = clocks.ranks[0].align(found[0].time.start_ns);
            let ms = |at_ns: i64| (at_ns - base_ns) as f64 / 1e6;
            let rank = |place: usize| {
                let (clock, pass) = (&clocks.ranks[place], found[place]);
                let ready = in_order(&sizes, &finals(&timelines[place], &pass))?;
                let ready: Vec<f64> = ready.into_iter().map(|at| ms(clock.align(at))).collect();
                let op = |(of, bucket): (&&MatchedCollective, &Bucket)| {
                    let arrival = of.arrivals.iter().find(|arrival| arrival.place == place)?;
                    let submitted =
                        bucket.gradients.iter().map(|id| ready[*id]).fold(f64::MIN, f64::max);
                    let times =
                        [arrival.start_ns, arrival.start_ns + arrival.wait_ns, arrival.end_ns];
                    let [started, present, done] = times.map(ms);
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
        let gradient_bytes = sizes.iter().map(|elems| elems * elem_bytes).collect();
        Ok(Self { observed, plan, gradient_bytes })
    }

    /// The buckets of this size, as `bucket_cap_mb` makes them: a bucket is closed by the gradient that fills it.
    pub fn buckets(&self, cap_bytes: u64) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        for (id, bytes) in self.gradient_bytes.iter().enumerate() {
            match buckets.last_mut().filter(|last| last.bytes < cap_bytes) {
                Some(last) => {
                    last.bytes += bytes;
                    last.gradients.push(id);
                }
                None => buckets.push(Bucket { gradients: vec![id], bytes: *bytes }),
            }
        }
        buckets
    }

    /// What an all-reduce takes, in milliseconds, from its bytes: a latency, if the steps tell it, and a time per byte.
    ///
    /// A backend with several threads carries several all-reduces at once, which share the link. So the times of single ones mean
    /// little, and what is fitted is how long the link was busy with how many of them.
    pub fn cost(&self) -> (Option<f64>, Cost) {
        let busy: Vec<Busy> = self.observed.alike().flat_map(|step| self.busy(step)).collect();
        let sum = |part: fn(&Busy) -> f64| busy.iter().map(part).sum::<f64>();
        let size = |of: &Busy| of.bytes / of.operations;
        let least = busy.iter().map(size).fold(f64::INFINITY, f64::min);
        let most = busy.iter().map(size).fold(0.0, f64::max);
        let point = |of: &Busy| ([of.operations, of.bytes], of.ms, 1.0);
        let fitted = two_term_fit(busy.iter().map(point));
        // Times of one size tell nothing of the latency.
        let fitted = fitted.filter(|[latency, per_byte]| {
            most > 1.1 * least && *latency >= 0.0 && *per_byte >= 0.0
        });
        let by_bytes = sum(|of| of.ms * of.bytes) / sum(|of| of.bytes * of.bytes);
        let [latency, per_byte] = fitted.unwrap_or([0.0, by_bytes]);
        let cost = move |bytes: u64| latency + per_byte * bytes as f64;
        (fitted.map(|[latency, _]| latency), Box::new(cost))
    }

    /// The times in which the link was busy in a step: from when all ranks had come to an all-reduce until none was left.
    fn busy(&self, step: &Seen) -> Vec<Busy> {
        let latest = |at: usize, part: usize| {
            step.ranks.iter().map(|rank| rank.ops[at][part]).fold(f64::NEG_INFINITY, f64::max)
        };
        let (mut all, mut free) = (Vec::<Busy>::new(), f64::NEG_INFINITY);
        for (at, bucket) in self.plan.iter().enumerate() {
            let (begin, done, bytes) = (latest(at, 0), latest(at, 3), bucket.bytes as f64);
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

fn is_all_reduce(name: &str) -> bool {
    name.replace('_', "").to_ascii_lowercase().contains("allreduce")
}

/// The last pass that begins in this step. Earlier ones of the step accumulate.
fn last_within(passes: &[BackwardPass], step: TimeRange) -> Option<BackwardPass> {
    let within =
        |pass: &&BackwardPass| (step.start_ns..step.end_ns()).contains(&pass.time.start_ns);
    passes.iter().rfind(within).copied()
}

/// The gradients of a pass, in the order in which they were final.
fn finals(timeline: &Timeline, pass: &BackwardPass) -> Vec<FinalGradient> {
    let within =
        |of: &&FinalGradient| (pass.time.start_ns..=pass.time.end_ns()).contains(&of.at_ns);
    let mut finals: Vec<FinalGradient> =
        timeline.gradients.iter().filter(within).copied().collect();
    finals.sort_unstable();
    finals
}

/// When the gradients of these sizes were final, if those of the pass have just these sizes in any order. Of several with the
/// same size the first one is the first.
fn in_order(sizes: &[u64], finals: &[FinalGradient]) -> Option<Vec<i64>> {
    let mut by_size: HashMap<u64, VecDeque<i64>> = HashMap::new();
    for of in finals {
        by_size.entry(of.num_elems).or_default().push_back(of.at_ns);
    }
    let ready = sizes.iter().map(|elems| by_size.get_mut(elems)?.pop_front());
    let ready = ready.collect::<Option<Vec<i64>>>()?;
    (ready.len() == finals.len()).then_some(ready)
}

/// Which gradients travel together, if all-reduces of `elems` elements carry gradients of `sizes` in this order.
fn plan_of(sizes: &[u64], elems: &[u64], elem_bytes: u64) -> Result<Vec<Bucket>, String> {
    let (mut plan, mut next) = (Vec::new(), 0);
    for &of_bucket in elems {
        let (mut gradients, mut sum) = (Vec::new(), 0);
        while sum < of_bucket && next < sizes.len() {
            gradients.push(next);
            sum += sizes[next];
            next += 1;
        }
        if sum != of_bucket {
            return Err(format!(
                "an all-reduce of {of_bucket} elements is not what the gradients before it add up to ({sum}); is this \
                 DistributedDataParallel without hooks?"
            ));
        }
        plan.push(Bucket { gradients, bytes: of_bucket * elem_bytes });
    }
    match next == sizes.len() && !plan.is_empty() {
        true => Ok(plan),
        false => Err(format!(
            "the all-reduces of the backward pass carry {next} of {} gradients; is this DistributedDataParallel?",
            sizes.len()
        )),
    }
}

/// Bytes of an element, by the type that the all-reduces name.
fn elem_bytes(timelines: &[Timeline]) -> u64 {
    let collectives = timelines.iter().flat_map(|timeline| &timeline.collectives);
    let mut names =
        collectives.filter(|of| is_all_reduce(&of.name)).filter_map(|of| of.dtype.as_deref());
    match names.next().map(str::to_ascii_lowercase) {
        Some(name) if name.contains("half") || name.contains("bfloat16") => 2,
        Some(name) if name.contains("double") => 8,
        _ => 4,
    }
}
