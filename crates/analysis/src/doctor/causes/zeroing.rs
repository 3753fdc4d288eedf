//! Gradients are set to zero by kernels, although they could be left out until the backward pass writes them.
//!
//! Seen: work that `Optimizer.zero_grad` launches. Taken away: that work and its calls. At most also the additions to these zeros in
//! the backward pass: the first gradient of a step would be taken as it is. With several passes in a step they are needed.
//!
//! Only on a device, whose allocator keeps memory. On a processor the gradients are allocated again in each step, and the system
//! clears their pages: steps of 20 ms with 16 MB of gradients became 0.8 ms longer by the change, not shorter.

use super::*;
use crate::{backward, steps};

/// Where autograd adds to gradients.
const ACCUMULATE: &str = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad";

pub(in super::super) const CAUSE: Cause = Cause {
    key: "zeroing",
    title: "Gradients are set to zero by kernels",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if !of.on_device() {
        return None;
    }
    let mut tally = Tally::default();
    let mut most = base.clone();
    for (at, work) in of.works.iter().enumerate() {
        if of.is_launched_within(work, ZERO_GRAD) {
            tally.add_work(of, work);
            most.is_gone[at] = true;
        }
    }
    for (at, call) in of.calls.iter().enumerate() {
        if call.kind == CallKind::Launch && of.is_within(call, ZERO_GRAD) {
            most.remove_call(at as u32, unprepared(base.lag_ns[at]));
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!("{count:.0} kernels per step set gradients to zero, {ms:.2} ms");
    let least = most.clone();
    if backward::passes(of.timeline).len() <= steps::of(of.timeline).len() {
        for (at, work) in of.works.iter().enumerate() {
            most.is_gone[at] |=
                work.class == Class::Elementwise && of.is_launched_within(work, ACCUMULATE);
        }
    }
    Some(tally.found(text, "optimizer.zero_grad(set_to_none=True)", [least, most]))
}
