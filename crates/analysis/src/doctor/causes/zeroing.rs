//! Gradients are set to zero by kernels, although they could be left out until the backward pass writes them.
//!
//! Seen: work that `Optimizer.zero_grad` launches. Taken away: that work and its calls. At most also the additions to these zeros in
//! the backward pass: the first gradient of a step would be taken as it is. With several passes in a step they are needed.

use super::super::names::{Class, ZERO_GRAD};
use super::super::recorded::{CallKind, Recorded};
use super::super::replay::Plan;
use super::{Found, Tally, unprepared};
use crate::{backward, steps};

/// Where autograd adds to gradients.
const ACCUMULATE: &str = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad";

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut most = base.clone();
    for (at, work) in of.works.iter().enumerate() {
        if of.is_launched_within(work, ZERO_GRAD) {
            tally.add_work(of, work);
            most.is_gone[at] = true;
        }
    }
    for (at, call) in of.calls.iter().enumerate() {
        let counts = matches!(call.kind, CallKind::Launch | CallKind::Operator);
        if counts && of.is_within(call, ZERO_GRAD) {
            if !of.on_device {
                tally.add(of.text(call.name).to_owned(), call.time);
            }
            most.remove_call(at as u32, unprepared(base.lag_ns[at]));
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let kind = if of.on_device { "kernels" } else { "operators" };
    let text = format!("{count:.0} {kind} per step set gradients to zero, {ms:.2} ms");
    let least = most.clone();
    if backward::passes(of.timeline).len() <= steps::of(of.timeline).len() {
        take_additions(of, &mut most);
    }
    Some(tally.found(text, "optimizer.zero_grad(set_to_none=True)", [least, most]))
}

/// Takes away what adds to the gradients.
fn take_additions(of: &Recorded, plan: &mut Plan) {
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Elementwise && of.is_launched_within(work, ACCUMULATE) {
            plan.is_gone[at] = true;
        }
    }
    if of.on_device {
        return;
    }
    let operators = of.timeline.operators.iter();
    for addition in operators.filter(|operator| of.text(operator.name) == "aten::add_") {
        let start_ns = addition.time.start_ns;
        let begun = of.calls.partition_point(|call| call.time.start_ns <= start_ns);
        let around = of.calls[..begun].iter().rposition(|call| call.lane == addition.lane);
        let Some(at) = around.filter(|at| of.calls[*at].time.end_ns() > start_ns) else { continue };
        if of.text(of.calls[at].name) == ACCUMULATE {
            plan.call_ns[at] = (plan.call_ns[at] - addition.time.dur_ns).max(0);
        }
    }
}
