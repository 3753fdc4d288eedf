//! The buckets of PyTorch's `DistributedDataParallel` have another size than suits the link: too large, so that little is
//! hidden, or too small, so that each pays the latency.
//!
//! Seen: on a processor, where the traces show when each gradient was final, by a replay of all ranks with buckets of
//! [several sizes](crate::advice::sizes). The gain is that of the best size, with the spread over the steps. Where more buckets
//! hide more, at least half of that comes: transfers beside the backward pass take a core to copy and to sum, which the ranks
//! compute on if no other is free. If the gain differs between steps by a multiple, ranks wait for each other, which no bucket changes, and
//! nothing is advised. It replaces the evidence that `first_bucket` and `small_collectives` see on one rank.

use super::*;

/// The part of hidden transfers that is gained although their threads use the cores of the ranks.
const HIDDEN_AT_LEAST: f64 = 0.5;

/// Gains of one step in ten and of nine in ten that are this many times apart are those of waits.
const TIMES: f64 = 3.0;

/// Advice for fewer and larger buckets, if these gain.
pub(super) fn fewer(ranks: &Ranks, cause: &'static Cause) -> Option<Finding> {
    other(ranks, cause, |best, now| best < now, 1.0)
}

/// Advice for more and smaller buckets, if these gain.
pub(super) fn more(ranks: &Ranks, cause: &'static Cause) -> Option<Finding> {
    let (_, _, gain) = ranks.sizes.as_ref()?.best?;
    if !is_steady(gain) {
        return None;
    }
    other(ranks, cause, |best, now| best >= now, HIDDEN_AT_LEAST)
}

/// Whether steps gain about the same.
fn is_steady(gain: Gain) -> bool {
    gain.high_ms <= TIMES * gain.low_ms
}

fn other(
    ranks: &Ranks,
    cause: &'static Cause,
    is_it: fn(f64, f64) -> bool,
    at_least: f64,
) -> Option<Finding> {
    let sizes = ranks.sizes.as_ref()?;
    let ((mib, count, gain), it) = (sizes.best?, ranks.recorded.first()?);
    let mut tally = Tally::default();
    for work in it.works.iter().filter(|work| work.class == Class::Communication) {
        // An operator's whole name, by which a viewer finds it.
        tally.add_of(it, work, it.text(work.name).to_owned(), work.time);
    }
    let (now, _) = tally.per_step(it);
    if !is_it(count as f64, now) {
        return None;
    }
    let [whole_ms, exposed_ms] = sizes.now_ms;
    let text = format!(
        "{now:.0} all-reduces per step leave {exposed_ms:.2} of {whole_ms:.2} ms of the backward pass exposed; {count} of up to \
         {mib} MiB would be better"
    );
    // The part of the exposed communication that stays.
    let best = sizes.points.iter().find(|of| of.mib == mib);
    let part = best.map_or(1.0, |of| (of.exposed_ms / exposed_ms).clamp(0.0, 1.0));
    let left = ranks.recorded.iter().zip(&ranks.bases).map(|(of, base)| leave(part, of, base));
    ranks.finding(
        cause,
        cause.title.to_owned(),
        format!("DistributedDataParallel(model, bucket_cap_mb={mib})"),
        Gain { low_ms: at_least * gain.low_ms, ..gain },
        evidence(it, text, &tally),
        left.enumerate().collect(),
    )
}

/// Leaves this part of the all-reduces of a rank, for the causes that come later.
fn leave(part: f64, of: &Recorded, base: &Plan) -> Plan {
    let mut plan = base.clone();
    Interrupted::of(of, base).relieve_most(&mut plan, |_| 1.0 - part);
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Communication && of.collective(work) == CollectiveKind::AllReduce {
            plan.work_ns[at] = scaled(plan.work_ns[at], part);
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_that_differ_by_a_multiple_are_those_of_waits() {
        // With a slow link, and with ranks that wait for each other on busy cores.
        assert!(is_steady(Gain::between(7.3, 14.2, 7)));
        assert!(!is_steady(Gain::between(5.1, 24.7, 7)));
        assert!(!is_steady(Gain::between(-0.1, 2.0, 7)));
    }
}
