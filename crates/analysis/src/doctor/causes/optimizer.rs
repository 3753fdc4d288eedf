//! The optimizer launches kernels for each parameter and operation, instead of one that does all.
//!
//! Seen: 20 or more kernels within an `Optimizer.step`, none of them fused. Of several optimizers, the slowest counts. Taken away: at least
//! the time of the host between all launches but a few; at most two thirds of the kernels' time too, because a fused step reads and
//! writes each value once.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::timeline::NameId;

/// A fused optimizer launches about this many kernels.
const FEW: usize = 4;
/// Fewer kernels than this per step are not worth fusing.
const MANY: f64 = 20.0;

/// Whether a call launched a kernel that a fused step replaces: one that works element by element. Products, as Shampoo has
/// them, stay.
fn is_simple(of: &Recorded, launched: Option<u32>) -> bool {
    launched.map(|work| &of.works[work as usize]).is_some_and(|work| {
        work.class == Class::Elementwise || of.text(work.name).contains("multi_tensor_apply")
    })
}

pub(in super::super) const CAUSE: Cause = Cause {
    key: "optimizer",
    title: "The optimizer is not fused",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

/// Whether a trace has gradients that are sparse, which no fused step accepts.
fn has_sparse_gradients(of: &Recorded) -> bool {
    let is_one = |name: &str| name.ends_with("_sparse_backward") || name == "aten::_coalesce";
    of.timeline.names.iter().any(is_one)
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if has_sparse_gradients(of) {
        return None;
    }
    let names: BTreeSet<NameId> = of.frames.iter().map(|frame| frame.name).collect();
    let spans = names.into_iter().filter(|name| of.text(*name).starts_with(OPTIMIZER));
    let found = spans.take(8).filter_map(|span| of_span(of, base, span));
    found.max_by_key(|found| found.tally.total_ns)
}

/// The steps of the optimizer whose spans have this name.
fn of_span(of: &Recorded, base: &Plan, span: NameId) -> Option<Found> {
    let is_in = |call: &Call| of.around(call).any(|frame| frame.name == span);
    let name = of.text(span).split('#').nth(1).and_then(|name| name.strip_suffix(".step"));
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let launched = of.launched();
    let mut kept: BTreeMap<Option<u32>, usize> = BTreeMap::new();
    let (mut is_foreach, mut is_fused) = (false, name.is_some_and(|name| name.contains("Fused")));
    for (at, call) in of.calls.iter().enumerate() {
        let is_replaced = matches!(call.kind, CallKind::Launch | CallKind::Operator)
            && (!of.on_device() || is_simple(of, launched[at]));
        if !is_replaced || !is_in(call) {
            continue;
        }
        if call.kind == CallKind::Operator {
            tally.add_operator(of, call);
            is_fused |= of.text(call.name).contains("fused");
            least.call_ns[at] = scaled(base.call_ns[at], 0.5);
            most.call_ns[at] = scaled(base.call_ns[at], 1.0 / 3.0);
        }
        let kept = kept.entry(of.step_at(call.time.start_ns)).or_default();
        *kept += 1;
        if *kept > FEW {
            for plan in [&mut least, &mut most] {
                plan.lag_ns[at] = unprepared(base.lag_ns[at]);
                if call.kind == CallKind::Launch {
                    plan.call_ns[at] = 0;
                }
            }
        }
    }
    for (at, work) in of.works.iter().enumerate() {
        let call = work.call.filter(|_| of.on_device()).map(|call| call as usize);
        if call.is_some_and(|call| is_simple(of, launched[call]) && is_in(&of.calls[call])) {
            tally.add_work(of, work);
            let name = of.text(work.name);
            is_fused |= name.contains("Fused") || name.contains("fused_");
            is_foreach |= name.contains("multi_tensor_apply");
            most.work_ns[at] = scaled(base.work_ns[at], 1.0 / 3.0);
        }
    }
    let (count, ms) = tally.per_step(of);
    if is_fused || count < MANY {
        return None;
    }
    let kind = if of.on_device() { "kernels" } else { "operators" };
    let how = if is_foreach { " (foreach)" } else { "" };
    let named = name.unwrap_or("the optimizer");
    let text = format!("{count:.0} {kind} per step in {named}.step{how}, {ms:.2} ms");
    let change = remedies::optimizer(name.unwrap_or_default(), of.on_device(), is_foreach)?;
    Some(tally.found(text, change, [least, most]))
}
