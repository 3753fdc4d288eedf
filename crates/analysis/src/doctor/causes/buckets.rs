//! The buckets of PyTorch's `DistributedDataParallel` have another size than suits the link: too large, so that little is
//! hidden, or too small, so that each pays the latency.
//!
//! Seen: on a processor, where the traces tell when each gradient was final, by a replay of all ranks with buckets of
//! [several sizes](crate::advice::sizes). The gain is that of the best size, with the spread over the steps. It takes the place
//! of what [`first_bucket`](super::first_bucket) and [`small_collectives`](super::small_collectives) see on one rank.

use std::collections::HashMap;

use super::super::names::Class;
use super::super::recorded::Recorded;
use super::super::{Advice, evidence};
use super::Cause;
use crate::advice::reducer::Reducer;
use crate::advice::sizes::Sizes;
use crate::timeline::Timeline;

/// What buckets of other sizes would do; `None` if the traces do not tell it.
pub(in super::super) fn sizes(timelines: &[Timeline]) -> Option<Sizes> {
    Sizes::of(&Reducer::of(timelines).ok()?)
}

/// Whether the replay of all ranks answers for this cause.
pub(in super::super) fn answers_for(cause: Cause) -> bool {
    matches!(cause, Cause::FirstBucket | Cause::SmallCollectives)
}

pub(in super::super) fn advise(
    sizes: &Sizes,
    recorded: &[Recorded],
    step_ms: f64,
    least_ms: f64,
) -> Option<Advice> {
    let (mib, count, gain) = sizes.best.filter(|(_, _, gain)| gain.ms >= least_ms)?;
    let it = recorded.first()?;
    let exchange = it.works.iter().filter(|work| work.class == Class::Communication);
    let exchange: Vec<_> = exchange.collect();
    let now = it.per_step(exchange.len() as f64);
    let [whole_ms, exposed_ms] = sizes.now_ms;
    let text = format!(
        "{now:.0} all-reduces per step leave {exposed_ms:.2} of {whole_ms:.2} ms of the backward pass exposed; {count} of up to \
         {mib} MiB would be better"
    );
    let mut what: HashMap<String, i64> = HashMap::new();
    for work in &exchange {
        *what.entry(it.text(work.name).to_owned()).or_default() += work.time.dur_ns;
    }
    let at = exchange.iter().max_by_key(|work| work.time.dur_ns).map(|work| work.time);
    let cause = if (count as f64) < now { Cause::SmallCollectives } else { Cause::FirstBucket };
    Some(Advice {
        cause,
        title: cause.title().to_owned(),
        change: format!("DistributedDataParallel(model, bucket_cap_mb={mib})"),
        gain,
        step_ms,
        evidence: evidence(it, text, &what, at),
    })
}
