//! `DistributedDataParallel` sends the buffers of the model, such as the means of batch norms, from rank 0 to all others in each step.
//!
//! Seen: broadcasts at the beginning of `DistributedDataParallel.forward`, with the calls around them that pack the buffers and unpack
//! them. Taken away: the transfers at least; at most also these calls and the host's time between them, and the waits for slower ranks.

use super::*;

const FORWARD: &str = "DistributedDataParallel.forward";

/// Operators directly within the forward pass that pack, send and unpack buffers.
const EXCHANGE: &str = "aten::flatten_dense_tensors aten::unflatten_dense_tensors aten::cat aten::copy_ aten::_foreach_copy_ \
    aten::empty c10d::broadcast_";

pub(in super::super) const CAUSE: Cause = Cause {
    key: "buffers",
    title: "Buffers are sent in each step",
    gain: Known::ByWaits,
    find: Find::Meeting(find),
};

/// When the forward pass around a call began, and the operator directly within it that made the call.
fn forward<'a>(of: &Recorded<'a>, call: &Call) -> Option<(i64, &'a str)> {
    let mut within = of.text(call.name);
    for frame in of.around(call) {
        let name = of.text(frame.name);
        if name.starts_with(FORWARD) {
            return Some((frame.time.start_ns, within));
        }
        within = name;
    }
    None
}

/// The calls that exchange buffers, in each forward pass that has a broadcast.
fn exchanges(of: &Recorded) -> Vec<usize> {
    let mut found = Vec::new();
    let (mut pass_ns, mut calls, mut is_over) = (i64::MIN, Vec::new(), false);
    let mut keep = |calls: &mut Vec<usize>| {
        let sends =
            |at: &usize| forward(of, &of.calls[*at]).is_some_and(|of| of.1.contains("broadcast"));
        if calls.iter().any(sends) {
            found.append(calls);
        }
        calls.clear();
    };
    for (at, call) in of.calls.iter().enumerate() {
        let is_neutral = matches!(call.kind, CallKind::Wait | CallKind::Mark);
        let Some((began_ns, within)) = forward(of, call).filter(|_| !is_neutral) else { continue };
        if began_ns != pass_ns {
            keep(&mut calls);
            (pass_ns, is_over) = (began_ns, false);
        }
        is_over |= EXCHANGE.split(' ').all(|of| of != within);
        if !is_over {
            calls.push(at);
        }
    }
    keep(&mut calls);
    found
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let mut host_ns = 0i64;
    let mut is_of_exchange = vec![false; of.calls.len()];
    for (place, at) in exchanges(of).into_iter().enumerate() {
        is_of_exchange[at] = true;
        // The first call of all has the time before it.
        let lag_ns = if place == 0 { 0 } else { base.lag_ns[at].max(0) };
        let counts = of.counts(of.step_at(of.calls[at].time.start_ns));
        host_ns += if counts { lag_ns + base.call_ns[at].max(0) } else { 0 };
        most.remove_call(at as u32, base.lag_ns[at] - lag_ns);
    }
    for (at, work) in of.works.iter().enumerate() {
        let is_broadcast = work.class == Class::Communication
            && of.collective(work) == CollectiveKind::Broadcast
            && of.is_launched_within(work, FORWARD);
        if is_broadcast {
            tally.add_work(of, work);
            least.work_ns[at] = 0;
        }
        // They stay with no length, because later work waits by them for earlier work.
        if is_broadcast || work.call.is_some_and(|call| is_of_exchange[call as usize]) {
            most.work_ns[at] = 0;
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{count:.0} broadcasts of buffers per step take {ms:.2} ms, and the host packs and unpacks them for {:.2} ms",
        of.per_step(host_ns as f64 / 1e6)
    );
    let change = "before PyTorch 2.13: DistributedDataParallel(model, broadcast_buffers=False)\n\
                  DistributedDataParallel(model, forward_sync_buffers=False)";
    Some(tally.found(text, change, [least, most]))
}
