//! The first bucket of gradients is sent when most of the backward pass is over, so that little of its time is hidden.
//!
//! Seen: the first all-reduce of a backward pass begins in its second half. Taken away: the time that even buckets would hide.
//! With `m` buckets that are full one after the other, the exchange of a pass ends a bucket after the pass, or when all of it
//! has been sent: `max(T / m, T - B (m - 1) / m)` of its time `T` stay exposed beside a pass of time `B`; two buckets at least,
//! and eight at most.

use super::*;
use crate::backward;

/// How many buckets are advised.
const BUCKETS: f64 = 5.0;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "first_bucket",
    title: "The first bucket is sent late",
    gain: Known::Exactly,
    find: Find::All(|ranks, cause| match ranks.sizes {
        // The replay of all ranks knows better.
        Some(_) => buckets::more(ranks, cause),
        None => ranks.each(cause, find).1,
    }),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let (mut late, mut passes, mut bytes) = (0.0, 0usize, 0u64);
    let by_launch = of.by_launch();
    for pass in backward::passes(of.timeline) {
        let until_ns = pass.wait.end_ns().max(pass.time.end_ns());
        let works = by_launch.between(pass.time.start_ns, until_ns);
        let is_exchange = |at: &usize| {
            base.has_work(*at) && of.collective(&of.works[*at]) == CollectiveKind::AllReduce
        };
        let (exchange, rest): (Vec<usize>, Vec<usize>) =
            works.partition(|at| of.works[*at].class == Class::Communication);
        let exchange: Vec<usize> = exchange.into_iter().filter(is_exchange).collect();
        let time = |at: &usize| of.works[*at].time;
        let (begin_ns, end_ns) = if of.on_device() {
            (
                rest.iter().map(|at| time(at).start_ns).min(),
                rest.iter().map(|at| time(at).end_ns()).max(),
            )
        } else {
            (Some(pass.time.start_ns), Some(pass.time.end_ns()))
        };
        let first_ns = exchange.iter().map(|at| time(at).start_ns).min();
        let (Some(begin_ns), Some(end_ns), Some(first_ns)) = (begin_ns, end_ns, first_ns) else {
            continue;
        };
        let whole = (end_ns - begin_ns).max(1) as f64;
        let part = (first_ns - begin_ns) as f64 / whole;
        passes += 1;
        late += part.min(1.0);
        if part < 0.5 {
            continue;
        }
        let total = exchange.iter().map(|at| base.work_ns[*at]).sum::<i64>() as f64;
        let exposed = |m: f64| (total / m).max(total - whole * (m - 1.0) / m) / total.max(1.0);
        for at in exchange {
            bytes = bytes.saturating_add(of.collective_bytes(&of.works[at]).unwrap_or(0));
            tally.add_work(of, &of.works[at]);
            least.work_ns[at] = scaled(base.work_ns[at], exposed(2.0));
            most.work_ns[at] = scaled(base.work_ns[at], exposed(8.0));
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "the first of {count:.0} all-reduces ({ms:.2} ms per step) begins when {:.0} % of the backward pass are over",
        100.0 * late / passes as f64
    );
    // A fifth of the bytes that a pass exchanges, where the traces have sizes.
    let mib = bytes as f64 / passes as f64 / BUCKETS / (1 << 20) as f64;
    let cap = if bytes == 0 { "5".to_owned() } else { format!("{:.2}", mib.max(0.25)) };
    let change = format!("DistributedDataParallel(model, bucket_cap_mb={cap})");
    Some(tally.found(text, change, [least, most]))
}
