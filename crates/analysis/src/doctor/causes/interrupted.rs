//! The time that calls of a processor lose to the transfers beside them: the threads of a backend copy and sum, and where no
//! core is free they take the one on which a rank computes.
//!
//! Seen: calls beside a transfer that take longer than the same call does in the quickest quarter of the steps, or than calls of
//! its name take outside of transfers; and calls that start a transfer beside those of the same name that start none. A plan
//! that takes transfers away gives this back: half of the first at least, and the larger of both at most, or half of the call.

use std::hash::Hash;

use foldhash::HashMap;
use paceline_table::stats::quantile;

use super::*;
use crate::timeline::NameId;

/// With fewer calls of a name, its usual time is not known.
const FEW: usize = 5;
/// A call that takes this many times as long as others of its name works on larger tensors.
const SLOWEST: i64 = 3;

/// A call is slower by the effect of the strongest of the transfers beside it. Backends have a few threads.
const MOST_BESIDE: usize = 64;

/// How long a call takes, and the host before it.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    call_ns: i64,
    lag_ns: i64,
}

impl Times {
    /// How much longer these times are than others, or zero.
    fn beyond(self, other: Self) -> Self {
        let more = |now: i64, then: i64| now.saturating_sub(then).max(0);
        Self { call_ns: more(self.call_ns, other.call_ns), lag_ns: more(self.lag_ns, other.lag_ns) }
    }
}

/// The loss of a call, and the transfers beside it.
struct Lost {
    call: usize,
    least: Times,
    most: Times,
    beside: Vec<u32>,
}

/// The cost of the transfers, by call. Empty on a device, whose streams need no core.
#[derive(Default)]
pub(super) struct Interrupted(Vec<Lost>);

impl Interrupted {
    pub(super) fn of(of: &Recorded, base: &Plan) -> Self {
        if of.on_device() {
            return Self::default();
        }
        let is_operator = |at: &usize| of.calls[*at].kind == CallKind::Operator;
        let operators: Vec<usize> = (0..of.calls.len()).filter(is_operator).collect();
        let beside = beside(of, base);
        let places = places(of);
        let name = |at: usize| of.calls[at].name;
        let times = |at: usize| Times { call_ns: base.call_ns[at], lag_ns: base.lag_ns[at] };
        let launched = of.launched();
        let starts = |at: usize| launched[at].is_some();
        let all = || operators.iter().copied();
        let here = quick(all().map(|at| (places[at], times(at))), 1);
        let not_starting =
            quick(all().filter(|at| !starts(*at)).map(|at| (name(at), times(at))), 1);
        let outside = all().filter(|at| !starts(*at) && beside[*at].is_empty());
        let outside = quick(outside.map(|at| (name(at), times(at))), FEW);
        let lost = |at: usize| {
            let alone =
                if starts(at) { not_starting.get(&name(at)) } else { here.get(&places[at]) };
            let alone = *alone.filter(|_| of.calls[at].waits_for.is_none())?;
            let mut now = times(at);
            if of.calls[at].after.is_some() {
                // The host waited for work.
                now.lag_ns = alone.lag_ns;
            }
            let least = now.beyond(alone);
            let is_alike = |of: &&Times| alone.call_ns <= SLOWEST.saturating_mul(of.call_ns);
            let outside = outside.get(&name(at)).filter(is_alike).map(|of| now.beyond(*of));
            // Two threads that share a core get half of it.
            let halved = now.call_ns / 2;
            let most = outside.map_or(least, |of| Times {
                call_ns: of.call_ns.max(least.call_ns),
                lag_ns: of.lag_ns.max(least.lag_ns),
            });
            let most = Times { call_ns: most.call_ns.max(halved), ..most };
            Some(Lost { call: at, least, most, beside: beside[at].clone() })
        };
        Self(all().filter(|at| !beside[*at].is_empty()).filter_map(lost).collect())
    }

    /// Gives back the least loss, by how much of each transfer the plan takes away.
    pub(super) fn relieve_least(&self, plan: &mut Plan, less: impl Fn(u32) -> f64) {
        self.relieve(plan, |lost| (lost.least, 0.5), less);
    }

    /// Gives back the largest loss.
    pub(super) fn relieve_most(&self, plan: &mut Plan, less: impl Fn(u32) -> f64) {
        self.relieve(plan, |lost| (lost.most, 1.0), less);
    }

    fn relieve(
        &self,
        plan: &mut Plan,
        part: impl Fn(&Lost) -> (Times, f64),
        less: impl Fn(u32) -> f64,
    ) {
        for lost in &self.0 {
            let (times, part) = part(lost);
            let less = lost.beside.iter().map(|work| less(*work)).fold(0.0, f64::max);
            let by = |ns: i64| (part * less * ns as f64) as i64;
            plan.call_ns[lost.call] -= by(times.call_ns);
            plan.lag_ns[lost.call] -= by(times.lag_ns);
        }
    }
}

/// The transfers beside each call and the host's time before it, at most as many as make a difference.
fn beside(of: &Recorded, base: &Plan) -> Vec<Vec<u32>> {
    let mut transfers: Vec<(i64, i64, u32)> = (of.works.iter().zip(0u32..))
        .filter(|(work, _)| work.class == Class::Communication)
        .map(|(work, at)| (work.time.start_ns, work.time.end_ns(), at))
        .collect();
    transfers.sort_unstable();
    let longest = transfers.iter().map(|(from, to, _)| to - from).max().unwrap_or(0);
    let of_call = |(call, lag_ns): (&Call, &i64)| {
        let from_ns = call.time.start_ns.saturating_sub((*lag_ns).max(0));
        let first = transfers.partition_point(|of| of.0 < from_ns.saturating_sub(longest));
        let last = transfers.partition_point(|of| of.0 < call.time.end_ns());
        let these = transfers.get(first..last).unwrap_or_default();
        these.iter().filter(|of| of.1 > from_ns).map(|of| of.2).take(MOST_BESIDE).collect()
    };
    of.calls.iter().zip(&base.lag_ns).map(of_call).collect()
}

/// The times of calls with the same key in the quickest quarter of cases, if there are `fewest` or more.
fn quick<K: Eq + Hash>(
    calls: impl Iterator<Item = (K, Times)>,
    fewest: usize,
) -> HashMap<K, Times> {
    let mut groups: HashMap<K, Vec<Times>> = HashMap::default();
    for (key, times) in calls {
        groups.entry(key).or_default().push(times);
    }
    groups.retain(|_, calls| calls.len() >= fewest);
    let quarter = |calls: &[Times], part: fn(&Times) -> i64| {
        let mut sorted: Vec<f64> = calls.iter().map(|of| part(of) as f64).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        quantile(&sorted, 0.25).unwrap_or_default() as i64
    };
    let times = |calls: Vec<Times>| Times {
        call_ns: quarter(&calls, |of| of.call_ns),
        lag_ns: quarter(&calls, |of| of.lag_ns),
    };
    groups.into_iter().map(|(key, calls)| (key, times(calls))).collect()
}

/// The name of a call, and how many calls of this name come before it in its step.
pub(super) type Place = (NameId, usize);

/// The place of each call.
pub(super) fn places(of: &Recorded) -> Vec<Place> {
    let mut counts: HashMap<NameId, usize> = HashMap::default();
    let place = |call: &Call| {
        if call.kind == CallKind::Mark {
            counts.clear();
        }
        let count = counts.entry(call.name).or_default();
        *count += 1;
        (call.name, *count)
    };
    of.calls.iter().map(place).collect()
}
