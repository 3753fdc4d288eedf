//! Which size of buckets suits a run of PyTorch's `DistributedDataParallel`.
//!
//! Input: a [`Reducer`]. Each of its steps is replayed with `bucket_cap_mb` of several sizes: gradients become final when they
//! did, and all-reduces take as long as those of the traces, by their bytes. Output: a [`Sizes`]. Nothing is run.

use super::gain::Gain;
use super::passes::Passes;
use super::reducer::Reducer;
use super::replay::Bucket;

/// PyTorch's megabyte, in bytes.
const MIB: f64 = 1_048_576.0;
/// Sizes in MiB.
const TRIED: [f64; 13] =
    [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// A gain below this part of the backward pass is not worth a change.
const LEAST_PART: f64 = 0.01;

/// A size, and the steps with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// `bucket_cap_mb`.
    pub mib: f64,
    /// The buckets that it makes.
    pub plan: Vec<Bucket>,
    /// From the start of the backward pass until it has ended and all gradients are there, in milliseconds.
    pub whole_ms: f64,
    /// The part of it that is exposed communication.
    pub exposed_ms: f64,
    /// By how much it is shorter than the replay of the buckets of the traces.
    pub gain_ms: f64,
}

/// The steps with buckets of several sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// The sizes that make different buckets.
    pub points: Vec<Point>,
    /// The backward pass with the buckets of the traces, and the exposed part, in milliseconds.
    pub now_ms: [f64; 2],
    /// The size that gains most, with its number of buckets and its gain; `None` if none is worth a change.
    pub best: Option<(f64, usize, Gain)>,
}

impl Sizes {
    /// Replays the steps of a run. `None` if no step has all gradients.
    pub fn of(reducer: &Reducer) -> Option<Self> {
        let (latency_ms, cost) = reducer.cost();
        let passes = Passes::measured(&reducer.observed, reducer.plan.clone(), None, &*cost)?;
        let [now_ms, now_exposed_ms, _] = passes.with_buckets(&reducer.plan)?;
        let mut points: Vec<Point> = Vec::new();
        for mib in TRIED {
            let plan = reducer.buckets((mib * MIB) as u64);
            let Some([whole_ms, exposed_ms, gain_ms]) = passes.with_buckets(&plan) else {
                continue;
            };
            match points.last_mut().filter(|last| last.plan == plan) {
                // The same buckets.
                Some(last) => last.mib = mib,
                None => points.push(Point { mib, plan, whole_ms, exposed_ms, gain_ms }),
            }
        }
        // Without a latency, only sizes like the measured ones are believed.
        let least = match latency_ms {
            Some(_) => 0,
            None => reducer.plan.iter().map(|of| of.bytes).min().unwrap_or(0) / 2,
        };
        // The last bucket has the rest.
        let is_known =
            |of: &&Point| of.plan.iter().rev().skip(1).all(|bucket| bucket.bytes >= least);
        let plans = points.iter().rev().filter(is_known);
        let plans = plans.map(|of| ((of.mib, of.plan.len()), of.plan.clone()));
        let least_ms = LEAST_PART * now_ms;
        let (best, _) = passes.other_buckets(plans, least_ms);
        let best = best.filter(|(_, gain)| gain.holds(least_ms));
        Some(Self {
            points,
            now_ms: [now_ms, now_exposed_ms],
            best: best.map(|((mib, count), gain)| (mib, count, gain)),
        })
    }
}
