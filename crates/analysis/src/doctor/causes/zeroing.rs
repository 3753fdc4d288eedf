//! Gradients are set to zero by kernels, although they could be left out until the backward pass writes them.
//!
//! Seen: work that `Optimizer.zero_grad` launches. Taken away: that work and its calls.

use super::super::names::ZERO_GRAD;
use super::super::recorded::{CallKind, Recorded};
use super::super::replay::Plan;
use super::{Found, Tally, unprepared};

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
    Some(tally.found(text, "optimizer.zero_grad(set_to_none=True)", [most.clone(), most]))
}
