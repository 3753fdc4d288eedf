//! What the calls of a processor lose to the transfers beside them: the threads of a backend copy and sum, and where no core is
//! free they take the one on which a rank computes.
//!
//! Seen: calls beside a transfer that take longer than the same call does in the quickest quarter of the steps, and calls that start
//! a transfer beside those of the same name that start none. A plan that takes transfers away gives a part of this back.

use std::collections::HashMap;

use paceline_table::stats::quantile;

use super::super::names::Class;
use super::super::recorded::{Call, CallKind, Recorded};
use super::super::replay::Plan;
use crate::timeline::NameId;

/// How long a call takes, and the host before it.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    call_ns: i64,
    lag_ns: i64,
}

/// What the transfers cost, by call.
pub(super) struct Interrupted {
    /// The index of a call, by how much it takes longer than alone, and the transfers beside it.
    calls: Vec<(usize, Times, Vec<u32>)>,
}

impl Interrupted {
    /// Nothing on a device, whose streams need no core.
    pub(super) fn of(of: &Recorded, base: &Plan) -> Self {
        if of.on_device {
            return Self { calls: Vec::new() };
        }
        let places = places(of);
        let mut of_place: HashMap<Place, Vec<usize>> = HashMap::new();
        let mut of_name: HashMap<NameId, Vec<usize>> = HashMap::new();
        for (at, call) in of.calls.iter().enumerate() {
            if call.kind == CallKind::Operator {
                of_place.entry(places[at]).or_default().push(at);
                if of.launched[at].is_none() {
                    of_name.entry(call.name).or_default().push(at);
                }
            }
        }
        let alone = |calls: &Vec<usize>| {
            let quick = |of: &[i64]| {
                let mut times: Vec<f64> = calls.iter().map(|at| of[*at] as f64).collect();
                times.sort_unstable_by(f64::total_cmp);
                Some(quantile(&times, 0.25)? as i64)
            };
            Some(Times { call_ns: quick(&base.call_ns)?, lag_ns: quick(&base.lag_ns)? })
        };
        let of_place: HashMap<Place, Times> =
            of_place.iter().filter_map(|(place, calls)| Some((*place, alone(calls)?))).collect();
        let of_name: HashMap<NameId, Times> =
            of_name.iter().filter_map(|(name, calls)| Some((*name, alone(calls)?))).collect();
        let mut transfers: Vec<(i64, i64, u32)> = (of.works.iter().zip(0u32..))
            .filter(|(work, _)| work.class == Class::Communication)
            .map(|(work, at)| (work.time.start_ns, work.time.end_ns(), at))
            .collect();
        transfers.sort_unstable();
        let longest = transfers.iter().map(|(from, to, _)| to - from).max().unwrap_or(0);
        let beside = |from_ns: i64, to_ns: i64| -> Vec<u32> {
            let first = transfers.partition_point(|of| of.0 < from_ns.saturating_sub(longest));
            let last = transfers.partition_point(|of| of.0 < to_ns);
            let these = transfers.get(first..last).unwrap_or_default();
            these.iter().filter(|of| of.1 > from_ns).map(|of| of.2).collect()
        };
        let mut calls = Vec::new();
        for (at, call) in of.calls.iter().enumerate() {
            let starts = of.launched[at].is_some();
            let known = match starts {
                true => of_name.get(&call.name),
                false => of_place.get(&places[at]),
            };
            let Some(alone) = known.filter(|_| call.waits_for.is_none()) else { continue };
            let lag_ns = if call.after.is_none() { base.lag_ns[at] - alone.lag_ns } else { 0 };
            let more =
                Times { call_ns: (base.call_ns[at] - alone.call_ns).max(0), lag_ns: lag_ns.max(0) };
            if more.call_ns + more.lag_ns > 0 {
                let from_ns = call.time.start_ns - base.lag_ns[at].max(0);
                calls.push((at, more, beside(from_ns, call.time.end_ns())));
            }
        }
        calls.retain(|(_, _, beside)| !beside.is_empty());
        Self { calls }
    }

    /// Gives `part` of what was lost back to the calls beside transfers, by how much of each transfer the plan takes away.
    pub(super) fn relieve(&self, plan: &mut Plan, part: f64, less: impl Fn(u32) -> f64) {
        for (at, more, beside) in &self.calls {
            let less = beside.iter().map(|work| less(*work)).fold(0.0, f64::max);
            let by = |ns: i64| (part * less * ns as f64) as i64;
            plan.call_ns[*at] -= by(more.call_ns);
            plan.lag_ns[*at] -= by(more.lag_ns);
        }
    }
}

/// The name of a call, and how many calls of this name come before it in its step.
type Place = (NameId, usize);

/// The place of each call.
fn places(of: &Recorded) -> Vec<Place> {
    let mut counts: HashMap<NameId, usize> = HashMap::new();
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
