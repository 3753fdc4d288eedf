//! Gradients travel in many small collectives, each of which pays the latency of the network.
//!
//! Seen: 20 or more all-reduces per step, most of which take hardly longer than the shortest ones. That time is taken as the
//! latency. Taken away: the latency and the launch of all but a twentieth of them at most, and of half of them at least.

use super::super::names::Class;
use super::super::recorded::Recorded;
use super::super::replay::Plan;
use super::{Found, Tally, scaled, unprepared};
use crate::hta::CollectiveKind;
use paceline_table::stats::quantile;

/// Fewer per step are not many.
const MANY: f64 = 20.0;

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut all = Vec::new();
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Communication && of.collective(work) == CollectiveKind::AllReduce {
            tally.add_work(of, work);
            all.push(at);
        }
    }
    let (count, ms) = tally.per_step(of);
    if count < MANY {
        return None;
    }
    let mut times: Vec<f64> = all.iter().map(|at| base.work_ns[*at] as f64).collect();
    times.sort_unstable_by(f64::total_cmp);
    let latency_ns = quantile(&times, 0.05)?;
    if quantile(&times, 0.5)? > 2.0 * latency_ns {
        return None;
    }
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (place, at) in all.into_iter().enumerate() {
        for (plan, every) in [(&mut least, 2), (&mut most, 20)] {
            if place % every != 0 {
                plan.work_ns[at] -= scaled(latency_ns as i64, 1.0).min(base.work_ns[at]);
                // What is not called takes no time of the host.
                if let Some(call) = of.works[at].call {
                    plan.remove_call(call, unprepared(base.lag_ns[call as usize]));
                }
            }
        }
    }
    let text = format!(
        "{count:.0} all-reduces per step take {ms:.2} ms, most of them hardly longer than the shortest ({:.0} us)",
        latency_ns / 1e3
    );
    let change = "DistributedDataParallel(model, bucket_cap_mb=25)\n\
                  or, for tensors of your own: one torch.cat, or torch.distributed._coalescing_manager";
    Some(tally.found(text, change, [least, most]))
}
