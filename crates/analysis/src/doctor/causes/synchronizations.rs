//! The host waits for the device within the loop, so that afterwards the device waits for the next launches.
//!
//! Seen: calls such as `cudaStreamSynchronize` and copies to the host that block, in at least half of the steps. The operator
//! around them shows what needs it: `aten::item` for `.item()`, `float()` and `if tensor`, `aten::nonzero` for masks.
//! A copy to the host outside of these operators is a `.cpu()` or `.to("cpu")`.
//! Waits within copies to the device and for allocations are other causes. Taken away: the waits; at least all but the last one
//! of each step, if there are several. No more is gained than the time in which the device does nothing.
//!
//! On a processor nothing waits, but a loop over the elements of a tensor pays for an operator or several for each: 32 or more values in a step that follow
//! each other. Taken away: at most the whole loop, and half of it at least.

use std::collections::BTreeMap;

use super::*;

/// Operators that need a value of the device on the host, and what to write instead.
const OPERATORS: [(&str, &str); 4] = [
    // `aten::masked_select` calls it, too.
    ("aten::nonzero", "use torch.where(mask, a, b) in the place of masks that change a shape"),
    ("aten::unique", "move unique() out of the loop, or to the loader"),
    ("aten::is_nonzero", "keep conditions on tensors on the device: torch.where"),
    ("aten::item", "keep sums on the device: total += loss.detach(); call .item() every 100 steps"),
];

/// The lines to write instead of a copy to the host that the host waits for.
const FETCH: &str = "keep results on the device: results.append(result.detach()); every 100 steps: torch.stack(results).cpu()";

/// Whether a call that waits belongs to this cause.
fn is_it(of: &Recorded, call: &Call) -> bool {
    let Some(work) = call.waits_for.map(|work| &of.works[work as usize]) else { return false };
    let is_value = || {
        let mut around = of.around(call).map(|frame| of.text(frame.name));
        around.any(|name| OPERATORS.iter().any(|(operator, _)| *operator == name))
    };
    match call.kind {
        // A copy to the device is the cause `copies`, unless an operator of this cause made it.
        CallKind::Wait => {
            let is_copy = matches!(work.class, Class::CopyIn { .. });
            !of.is_within(call, names::LOADER) && (!is_copy || is_value())
        }
        CallKind::Launch => work.class == Class::CopyOut || is_value(),
        CallKind::Allocate | CallKind::Operator | CallKind::Mark => false,
    }
}

pub(in super::super) const CAUSE: Cause = Cause {
    key: "synchronizations",
    title: "The host waits for the device in the loop",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

/// So many values in a step are fetched by a loop over the elements of a tensor.
const MANY: f64 = 32.0;
/// Values that are further apart are of no loop over elements.
const APART_NS: i64 = 1_000_000;

/// Loops that fetch values on a processor.
fn loops(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    // Optimizers fetch the steps of their parameters.
    let is_value = |(_, call): &(usize, &Call)| {
        of.text(call.name) == "aten::item" && !of.is_within(call, OPTIMIZER)
    };
    let values: Vec<usize> =
        of.calls_of(CallKind::Operator).filter(is_value).map(|(at, _)| at).collect();
    let is_loop = |pair: &&[usize]| {
        of.calls[pair[1]].time.start_ns - of.calls[pair[0]].time.end_ns() <= APART_NS
    };
    for pair in values.windows(2).filter(is_loop) {
        for at in pair[0] + 1..=pair[1] {
            let (call, lag_ns) = (&of.calls[at], base.lag_ns[at].max(0));
            let time = TimeRange::between(call.time.start_ns - lag_ns, call.time.end_ns());
            tally.add_time(of, of.text(call.name).to_owned(), time);
            most.remove_call(at as u32, 0);
            (least.call_ns[at], least.lag_ns[at]) = (base.call_ns[at] / 2, lag_ns / 2);
        }
    }
    let (count, ms) = (of.per_step(values.len() as f64), tally.per_step(of).1);
    let text = format!(
        "a loop fetches {count:.0} values per step one by one, which takes {ms:.2} ms with its operators"
    );
    let change = "compute on whole tensors, and call .item() once: (outputs.argmax(1) == targets).sum().item()";
    let mut found = tally.found(text, change, [least, most]);
    found.title = Some("Values are fetched one by one".to_owned());
    (count >= MANY).then_some(found)
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if !of.on_device() {
        return loops(of, base);
    }
    let mut tally = Tally::default();
    let mut changes: Vec<&str> = Vec::new();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let mut of_steps: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for (at, call) in of.calls.iter().enumerate() {
        if !is_it(of, call) {
            continue;
        }
        tally.add_call(of, call);
        let around: Vec<&str> = of.around(call).map(|frame| of.text(frame.name)).collect();
        let of_operator = OPERATORS.iter().find(|(name, _)| around.contains(name));
        let fetches =
            call.waits_for.is_some_and(|work| of.works[work as usize].class == Class::CopyOut);
        let change = match of_operator {
            Some((_, change)) => change,
            None if fetches => FETCH,
            None => "remove torch.cuda.synchronize() and Event.synchronize() from the loop",
        };
        if !changes.contains(&change) {
            changes.push(change);
        }
        (most.blocks[at], least.blocks[at]) = (false, false);
        of_steps.entry(of.step_at(call.time.start_ns)).or_default().push(at);
    }
    if of_steps.is_empty() || 2 * of_steps.len() < of.steps.len() {
        return None;
    }
    for waits in of_steps.values().filter(|waits| waits.len() > 1) {
        let last = waits[waits.len() - 1];
        least.blocks[last] = base.blocks[last];
    }
    let (count, ms) = tally.per_step(of);
    let text =
        format!("{count:.1} waits per step, {ms:.2} ms, after which the device has to be fed anew");
    // Without an optimizer's span, the replay does not know that the next step follows this one's collectives.
    let room_ms = Some(of.idle_ms(|_| true));
    Some(Found { room_ms, ..tally.found(text, changes.join("\n"), [least, most]) })
}
