//! Gradients travel in many small collectives, each of which pays the latency of the network.
//!
//! Seen: 8 or more all-reduces per step, most of which have few bytes, or 20 of an unknown size, most of which take hardly longer than
//! the shortest ones. The time of the shortest is the latency at least. Taken away: it and the launch of half of them at least; all of the time and the launches of
//! all but a twentieth at most. On a processor, the calls beside them [lose](super::interrupted) less.

use paceline_table::stats::quantile;

use super::*;

/// Fewer collectives per step do not count as many: if their bytes are known to be few, and otherwise.
const MANY_SMALL: f64 = 8.0;
const MANY: f64 = 20.0;
/// A collective of more bytes does not count as small. The first bucket of PyTorch, the smallest one, has twice as many.
pub(super) const FEW_BYTES: u64 = 1 << 19;
/// One in 2 all-reduces stays for the least gain, and one in 20 for the most.
const ONE_OF: [usize; 2] = [2, 20];

pub(in super::super) const CAUSE: Cause = Cause {
    key: "small_collectives",
    title: "Many small collectives",
    gain: Known::Exactly,
    find: Find::All(|ranks, cause| {
        buckets::fewer(ranks, cause).or_else(|| ranks.each(cause, find).1)
    }),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut all = Vec::new();
    for (at, work) in of.works.iter().enumerate().filter(|(at, _)| base.has_work(*at)) {
        if work.class == Class::Communication && of.collective(work) == CollectiveKind::AllReduce {
            tally.add_work(of, work);
            all.push(at);
        }
    }
    let (count, ms) = tally.per_step(of);
    let is_small = |at: &usize| of.collective_bytes(&of.works[*at]).is_some_and(|n| n <= FEW_BYTES);
    let are_small = 2 * all.iter().filter(|at| is_small(at)).count() > all.len();
    if count < if are_small { MANY_SMALL } else { MANY } {
        return None;
    }
    let mut times: Vec<f64> = all.iter().map(|at| base.work_ns[*at] as f64).collect();
    times.sort_unstable_by(f64::total_cmp);
    let latency_ns = quantile(&times, 0.05)?;
    if quantile(&times, 0.5)? > 2.0 * latency_ns && !are_small {
        return None;
    }
    let interrupted = Interrupted::of(of, base);
    let [mut least, mut most] = [base.clone(), base.clone()];
    let part = |every: usize| 1.0 - 1.0 / every as f64;
    interrupted.relieve_least(&mut least, |_| part(ONE_OF[0]));
    interrupted.relieve_most(&mut most, |_| part(ONE_OF[1]));
    for ((plan, each_ns), every) in
        [(&mut least, latency_ns as i64), (&mut most, i64::MAX)].into_iter().zip(ONE_OF)
    {
        for (_, &at) in all.iter().enumerate().filter(|(place, _)| place % every != 0) {
            plan.work_ns[at] -= each_ns.min(base.work_ns[at]);
            // A call that is gone takes no time of the host.
            if let Some(call) = of.works[at].call {
                plan.remove_call(call, unprepared(base.lag_ns[call as usize]));
            }
        }
    }
    let text = format!(
        "{count:.0} all-reduces per step take {ms:.2} ms; the shortest take {:.0} us, which is the latency",
        latency_ns / 1e3
    );
    let change = "DistributedDataParallel(model, bucket_cap_mb=25)\n\
                  or, for tensors of your own: one torch.cat, or torch.distributed._coalescing_manager";
    Some(tally.found(text, change, [least, most]))
}
