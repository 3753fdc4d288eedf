//! The prediction: the time measured without communication, plus the exposed communication of a link.

use std::collections::HashMap;

use paceline_analysis::advice::replay::{Backward, Bucket, Played};
use paceline_collectives::{Algorithm, Cost, Link, OpKind};
use paceline_failure::{Failure, Result};
use paceline_model::Layout;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::anatomy::{Anatomy, ReadyLine};
use paceline_observe::insight::buckets::{ELEM_BYTES, LOSS_BYTES, plan, plans};
use paceline_settings::config::TrainConfig;
use paceline_strategies::BucketCaps;
use paceline_table::stats::two_term_fit;
use serde::Serialize;

use super::efficiency::{efficiency_pct, least_bandwidth};
use super::network::Network;
use crate::noise::{self, Spread};
use crate::spec::{self, Spec};
use crate::study::{layout_of, median_of, spread_of};

/// The measured times of a step without communication: medians over the rounds, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Calibration {
    /// Ranks that computed side by side.
    pub ranks: usize,
    /// The step of the slowest rank.
    pub step_ms: f64,
    /// The time that the main thread computed.
    pub compute_ms: f64,
    /// The start of the backward pass since the step began.
    pub backward_begin_ms: f64,
    /// The end of the backward pass since the step began.
    pub backward_end_ms: f64,
    /// The optimizer's time, if it works on each bucket while others travel; zero if it waits for all.
    pub by_bucket_ms: f64,
    /// The step over the rounds; `None` if nothing was run.
    pub spread: Option<Spread>,
    /// When each gradient was final, since the step began, in the order of time.
    pub ready: Vec<ReadyLine>,
    /// The traced steps from which all of this comes; `None` if it comes from runs or numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traced: Option<TracedSteps>,
}

/// The steps of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TracedSteps {
    /// How many steps count.
    pub steps: usize,
    /// The step without communication is at least this long in 9 of 10 steps, in milliseconds.
    pub low_ms: f64,
    /// The step without communication is at most this long in 9 of 10 steps, in milliseconds.
    pub high_ms: f64,
    /// The step as traced, communication included: the median, in milliseconds.
    pub traced_ms: f64,
    /// Whether the ranks sum up their loss when the backward pass begins, as those of paceline do.
    pub sums_loss: bool,
}

impl Calibration {
    /// The calibration from the rounds of a run without communication, for a run of `ddp` with this configuration.
    pub fn of(config: &TrainConfig, ranks: usize, rounds: &[RunSummary]) -> Result<Self> {
        let missing = || Failure::Run("a summary lacks the anatomy of its steps".to_owned());
        let anatomies: Vec<Anatomy> = rounds.iter().map(|run| run.part("anatomy")).collect();
        let first = anatomies.first().ok_or_else(missing)?;
        // The anatomy has means, which a few slow steps raise. They are scaled to the median step.
        let usual = |part: &dyn Fn(&RunSummary, &Anatomy) -> Option<f64>| {
            let of_round = |(run, anatomy): (&RunSummary, &Anatomy)| {
                let usual_by_mean = run.number("step_ms_median")? / run.number("step_ms")?;
                Some(part(run, anatomy)? * usual_by_mean)
            };
            noise::median(rounds.iter().zip(&anatomies).map(of_round)).ok_or_else(missing)
        };
        let ready_of = |at: usize| {
            let param = first.ready[at].param.clone();
            Ok(ReadyLine { param, ready_ms: usual(&|_, of| Some(of.ready.get(at)?.ready_ms))? })
        };
        Ok(Self {
            ranks,
            step_ms: median_of(rounds, "step_ms_median")?,
            compute_ms: usual(&|run, _| run.number("compute_ms"))?,
            backward_begin_ms: usual(&|_, of| Some(of.backward_begin_ms))?,
            backward_end_ms: usual(&|_, of| Some(of.backward_end_ms))?,
            by_bucket_ms: if config.steps_by_bucket() {
                usual(&|run, _| run.number("optimizer_ms"))?
            } else {
                0.0
            },
            spread: spread_of(rounds, "step_ms_median"),
            ready: (0..first.ready.len()).map(ready_of).collect::<Result<_>>()?,
            traced: None,
        })
    }

    /// The ready times for a layout with the same parameters.
    pub fn backward(&self, layout: &Layout) -> Result<Backward> {
        let lines = self.ready.iter().map(|line| (line.param.as_str(), line.ready_ms));
        let lines: HashMap<&str, f64> = lines.collect();
        let mut ready = vec![0.0; layout.params().len()];
        for (id, param) in layout.trained() {
            ready[id.0] = *lines.get(param.name.as_str()).ok_or_else(|| {
                Failure::Run(
                    "a run without communication has not followed all gradients".to_owned(),
                )
            })?;
        }
        let pass = [self.backward_begin_ms, self.backward_end_ms];
        let sums_loss = self.traced.is_none_or(|traced| traced.sums_loss);
        Ok(Backward::new(ready, pass, sums_loss.then_some(LOSS_BYTES), &[]))
    }
}

/// When the buckets of a step are ready, from which the step on any link follows.
#[derive(Clone, Debug)]
pub struct Step {
    /// The step without communication, in milliseconds.
    pub alone_ms: f64,
    by_bucket_ms: f64,
    pub(super) backward: Backward,
    pub(super) plan: Vec<Bucket>,
    caps: BucketCaps,
}

impl Step {
    /// The step of `ddp` with buckets of these sizes.
    pub fn new(calibration: &Calibration, layout: &Layout, caps: BucketCaps) -> Result<Self> {
        let times = [calibration.step_ms, calibration.by_bucket_ms];
        Ok(Self::of(calibration.backward(layout)?, times, layout, caps))
    }

    /// The same of a backward pass in a step of `alone_ms`; see [`Calibration::by_bucket_ms`].
    pub fn of(
        backward: Backward,
        [alone_ms, by_bucket_ms]: [f64; 2],
        layout: &Layout,
        caps: BucketCaps,
    ) -> Self {
        Self { alone_ms, by_bucket_ms, backward, plan: plan(layout, caps), caps }
    }

    /// The milliseconds of the step, if an all-reduce of `bytes` bytes takes `cost(bytes)` milliseconds.
    pub fn step_ms(&self, cost: impl Fn(u64) -> f64) -> f64 {
        let played = self.backward.play(&self.plan, cost);
        self.alone_ms + self.exposed_ms(&played, &self.plan)
    }

    /// The milliseconds of the step on this network.
    pub fn on(&self, network: &Network) -> f64 {
        self.step_ms(|bytes| network.all_reduce_ms(bytes))
    }

    /// The efficiency of the step on this network, in percent.
    pub fn efficiency_pct(&self, network: &Network) -> f64 {
        efficiency_pct(self.alone_ms, self.on(network))
    }

    /// The bandwidth in Gbit/s of the slowest link of this latency with at least this efficiency. `None` if no bandwidth is
    /// enough.
    pub fn slowest_gbit_s(&self, network: &Network, target: f64) -> Option<f64> {
        let efficiency = |bytes_per_s| self.efficiency_pct(&network.with_bandwidth(bytes_per_s));
        least_bandwidth(efficiency, target).map(|bytes_per_s| bytes_per_s * 8e-9)
    }

    /// The exposed communication: by how much the optimizer ends later.
    pub(super) fn exposed_ms(&self, played: &Played, plan: &[Bucket]) -> f64 {
        let all_bytes = plan.iter().map(|bucket| bucket.bytes).sum::<u64>().max(1) as f64;
        let after = |bytes: u64| self.by_bucket_ms * bytes as f64 / all_bytes;
        let finish = played.finish_after(plan.iter().map(|bucket| bucket.bytes), after);
        played.blocked + (finish - played.end - self.by_bucket_ms).max(0.0)
    }

    /// By how much the sums of the loss end later than the pass; a strategy without overlap waits for them.
    pub(super) fn loss_ms(&self, cost: impl Fn(u64) -> f64) -> f64 {
        (self.backward.opening_done(cost) - self.backward.end).max(0.0)
    }
}

/// The step of `ddp` with this specification, in milliseconds, from runs without communication. Without a network,
/// communication is free.
pub fn replayed(spec: &Spec, network: Option<Network>, alone: &[RunSummary]) -> Result<f64> {
    let config = spec::resolve(spec)?;
    let calibration = Calibration::of(&config, config.world_size, alone)?;
    let layout = layout_of(&config, config.world_size)?;
    let step = Step::new(&calibration, &layout, config.strategy.caps_for_ddp())?;
    Ok(step.step_ms(|bytes| network.map_or(0.0, |of| of.all_reduce_ms(bytes))))
}

/// The predictions for `ddp`, and the step of `simple_ddp`, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The time of all communication of a step.
    pub comm_ms: f64,
    /// The time for which the step waits for communication.
    pub exposed_ms: f64,
    /// The part of the communication that runs before the end of the backward pass, in percent.
    pub overlap_pct: f64,
    /// The step.
    pub step_ms: f64,
    /// The step of `simple_ddp`, one blocking operation per parameter. `None` if the parameters are not known.
    pub simple_step_ms: Option<f64>,
    /// The bucket size of the shortest step, in MiB.
    pub best_bucket_mb: f64,
    /// The best first bucket for this size, in MiB.
    pub best_first_mb: f64,
    /// The step with these sizes.
    pub best_step_ms: f64,
}

impl Prediction {
    /// The prediction for a step, if an all-reduce takes `cost(bytes)` milliseconds.
    pub fn new(step: &Step, layout: &Layout, cost: &dyn Fn(u64) -> f64) -> Self {
        let exposed = |plan: &[Bucket]| step.exposed_ms(&step.backward.play(plan, cost), plan);
        let played = step.backward.play(&step.plan, cost);
        let comm_ms: f64 = played.buckets.iter().map(|bucket| bucket.done - bucket.sent).sum();
        let (exposed_ms, hidden_ms) = (step.exposed_ms(&played, &step.plan), played.hidden());
        let one_by_one: f64 =
            layout.trained().map(|(_, p)| cost((p.range().len() * ELEM_BYTES) as u64)).sum();
        // Even if they gain little: with a least gain, a row could be worse than one with a larger cost.
        let of = |(caps, plan): (BucketCaps, Vec<Bucket>)| (caps, exposed(&plan));
        // Times are in milliseconds, so this only keeps rounding from making a difference.
        let equal = step.backward.end.abs() * 1e-12;
        let least =
            |best: (BucketCaps, f64), of: (_, f64)| if of.1 < best.1 - equal { of } else { best };
        let best = plans(layout).map(of).reduce(least);
        let best = best.filter(|(_, least)| *least < exposed_ms);
        let (best, least) = best.unwrap_or((step.caps, exposed_ms));
        let mb = |bytes: usize| bytes as f64 / 1048576.0;
        Self {
            comm_ms,
            exposed_ms,
            overlap_pct: if comm_ms > 0.0 { 100.0 * hidden_ms / comm_ms } else { 0.0 },
            step_ms: step.alone_ms + exposed_ms,
            simple_step_ms: Some(step.alone_ms + step.loss_ms(cost) + one_by_one),
            best_bucket_mb: mb(best.bytes),
            best_first_mb: mb(best.first_bytes),
            best_step_ms: step.alone_ms + least,
        }
    }
}

/// The link whose all-reduces by this algorithm fit `points`, which are sizes in bytes and times in seconds. The fit minimizes
/// squared relative errors: small messages determine the latency, large ones the bandwidth.
pub fn fit_link(points: &[(f64, f64)], algorithm: Algorithm, ranks: usize) -> Link {
    let points = points.iter().filter(|(_, seconds)| *seconds > 0.0).map(|&(bytes, seconds)| {
        let cost = Cost::of(OpKind::AllReduce, algorithm, ranks, bytes as u64);
        ([f64::from(cost.steps), cost.bytes as f64], seconds, seconds.powi(-2))
    });
    // Too few points do not separate the latency from the bandwidth.
    let fit = two_term_fit(points.clone()).filter(|[latency_s, _]| *latency_s >= 0.0);
    let [latency_s, per_byte] = fit.unwrap_or_else(|| {
        let parts = points.map(|([_, bytes], seconds, _)| bytes / seconds);
        let (sum, squares) =
            parts.fold((0.0, 0.0), |(sum, squares), part| (sum + part, squares + part * part));
        [0.0, sum / squares]
    });
    Link { bytes_per_s: 1.0 / per_byte.max(f64::MIN_POSITIVE), latency_s }
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    /// Two parameters of 1 MB, final at 20 and 30 ms of a step of 40; backward ends at 30.
    fn case() -> (Layout, Calibration) {
        let mut builder = LayoutBuilder::new();
        for unit in ["a", "b"] {
            builder.unit(unit).param("weight", [250_000], Init::Constant(0.0));
        }
        let line = |param: &str, ready_ms| ReadyLine { param: param.to_owned(), ready_ms };
        let ready = vec![line("b.weight", 20.0), line("a.weight", 30.0)];
        let calibration = Calibration {
            ranks: 1,
            step_ms: 40.0,
            compute_ms: 39.0,
            backward_begin_ms: 10.0,
            backward_end_ms: 30.0,
            ready,
            ..Calibration::default()
        };
        (builder.finish(1), calibration)
    }

    #[test]
    fn a_prediction_is_the_step_and_what_is_left_of_the_queue() {
        let (layout, calibration) = case();
        let cost = |bytes: u64| 6.0 * bytes as f64 / 1e6;
        let caps = BucketCaps { first_bytes: 1, bytes: 1 };
        let predicted = |calibration: &Calibration, caps: BucketCaps| {
            Prediction::new(&Step::new(calibration, &layout, caps).unwrap(), &layout, &cost)
        };
        let each = predicted(&calibration, caps);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 0.01, "{a}, not {b}");
        close(each.comm_ms, 12.0);
        close(each.exposed_ms, 6.0);
        close(each.overlap_pct, 50.0);
        close(each.step_ms, 46.0);
        close(each.simple_step_ms.unwrap(), 52.0);
        close(Step::new(&calibration, &layout, caps).unwrap().step_ms(cost), 46.0);
        let both = predicted(&calibration, BucketCaps::new(1 << 30));
        close(both.exposed_ms, 12.0);
        close(both.best_step_ms, 46.0);
        // The optimizer works on the first bucket, for 2 ms, while the second one travels.
        let calibration = Calibration { by_bucket_ms: 4.0, ..calibration };
        let by_bucket = predicted(&calibration, caps);
        close(by_bucket.exposed_ms, 4.0);
        close(by_bucket.step_ms, 44.0);
        close(Step::new(&calibration, &layout, caps).unwrap().step_ms(cost), 44.0);
        close(Step::new(&calibration, &layout, caps).unwrap().step_ms(|_| 0.0), 40.0);
        let mut other = LayoutBuilder::new();
        other.unit("c").param("weight", [1], Init::Constant(0.0));
        assert!(Step::new(&calibration, &other.finish(1), caps).is_err());
    }

    #[test]
    fn links_are_fitted() {
        // Two ranks: three steps, all bytes once and a header of 88 bytes. 10 us and 1 GB/s.
        let points = [1e3, 1e6, 1e7].map(|bytes| (bytes, 30e-6 + (88.0 + bytes) / 1e9));
        let link = fit_link(&points, Algorithm::Direct, 2);
        assert!((link.latency_s - 10e-6).abs() < 1e-9, "{link:?}");
        assert!((link.bytes_per_s / 1e9 - 1.0).abs() < 1e-6, "{link:?}");
        // Four ranks in a ring: seven steps, half as many bytes again and three headers.
        let points = [1e3, 1e6, 1e7].map(|bytes| (bytes, 70e-6 + (264.0 + 1.5 * bytes) / 1e9));
        let link = fit_link(&points, Algorithm::Ring, 4);
        assert!((link.latency_s - 10e-6).abs() < 1e-9, "{link:?}");
        // Small messages are faster than any latency explains.
        let link = fit_link(&[(1e3, 1e-9), (1e6, 1e-3)], Algorithm::Direct, 2);
        assert_eq!(link.latency_s, 0.0);
    }
}
