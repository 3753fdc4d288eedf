//! The buckets of PyTorch's `DistributedDataParallel` have another size than suits the link: too large, so that little is
//! hidden, or too small, so that each pays the latency.
//!
//! Seen: on a processor, where the traces show when each gradient was final, by a replay of all ranks with buckets of
//! [several sizes](crate::advice::sizes). The gain is that of the best size, with the spread over the steps. Where more buckets
//! hide more, at least half of that comes: transfers beside the backward pass take a core to copy and to sum, which the ranks
//! compute on if no other is free. It replaces the evidence that [`first_bucket`](super::first_bucket) and
//! [`small_collectives`](super::small_collectives) see on one rank.

use std::collections::HashMap;

use super::super::names::Class;
use super::super::recorded::Recorded;
use super::super::replay::Plan;
use super::super::{Advice, evidence};
use super::interrupted::Interrupted;
use super::{Cause, scaled};
use crate::advice::gain::Gain;
use crate::advice::reducer::Reducer;
use crate::advice::sizes::Sizes;
use crate::hta::CollectiveKind;
use crate::timeline::Timeline;

/// The part of hidden transfers that is gained although their threads use the cores of the ranks.
const HIDDEN_AT_LEAST: f64 = 0.5;

/// The effect of buckets of other sizes; `None` if the traces do not show it.
pub(in super::super) fn sizes(timelines: &[Timeline]) -> Option<Sizes> {
    Sizes::of(&Reducer::of(timelines).ok()?)
}

/// The part of the exposed communication that the best size leaves.
pub(in super::super) fn left(sizes: &Sizes) -> f64 {
    let best = sizes.best.as_ref().map(|(mib, ..)| *mib);
    let point = sizes.points.iter().find(|of| Some(of.mib) == best);
    point.map_or(1.0, |of| (of.exposed_ms / sizes.now_ms[1]).clamp(0.0, 1.0))
}

/// Leaves this part of the all-reduces of a rank, for the causes that come later.
pub(in super::super) fn leave(part: f64, (of, plan): (&Recorded, &mut Plan)) {
    Interrupted::of(of, plan).relieve_most(plan, |_| 1.0 - part);
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Communication && of.collective(work) == CollectiveKind::AllReduce {
            plan.work_ns[at] = scaled(plan.work_ns[at], part);
        }
    }
}

/// The advice, if a size gains.
pub(in super::super) fn advise(
    sizes: &Sizes,
    recorded: &[Recorded],
    step_ms: f64,
) -> Option<Advice> {
    let (mib, count, gain) = sizes.best?;
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
    let (cause, at_least) = if (count as f64) < now {
        (Cause::SmallCollectives, 1.0)
    } else {
        (Cause::FirstBucket, HIDDEN_AT_LEAST)
    };
    let gain = Gain { low_ms: at_least * gain.low_ms, ..gain };
    Some(Advice {
        cause,
        title: cause.title().to_owned(),
        change: format!("DistributedDataParallel(model, bucket_cap_mb={mib})"),
        gain,
        step_ms,
        evidence: evidence(it, text, &what, at),
    })
}
