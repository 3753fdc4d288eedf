//! Batches are copied from pageable memory, which the driver copies once more, or the host waits for each copy.
//!
//! Seen: `Memcpy HtoD (Pageable -> Device)`, and calls that return only after a copy to the device. Taken away: at least the waits
//! of the host; at most half of the time of pageable copies too, because pinned memory is read about twice as fast. A copy to the
//! host fetches a result, which is the cause `synchronizations`.

use super::*;

/// The time of a call that only queues a copy.
const QUEUED_NS: i64 = 10_000;

/// Smaller tensors are values of the program, not batches of a loader.
const SMALL_BYTES: u64 = 1 << 12;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "copies",
    title: "Batches are copied from pageable memory, or the host waits for the copies",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let (mut pageable, mut bytes, mut waited_ns) = (0usize, 0u64, 0i64);
    for (at, work) in of.works.iter().enumerate() {
        let Some(call) = work.call.map(|call| call as usize) else { continue };
        let Class::CopyIn { is_pageable } = work.class else { continue };
        let blocks = base.blocks[call] && of.calls[call].waits_for == Some(at as u32);
        let is_it = is_pageable || blocks;
        if !is_it {
            continue;
        }
        if of.counts(work.step) {
            tally.add_work(of, work);
            pageable += usize::from(is_pageable);
            bytes = bytes.saturating_add(work.bytes);
            waited_ns += if blocks { of.calls[call].time.dur_ns } else { 0 };
        }
        for plan in [&mut least, &mut most] {
            plan.blocks[call] = false;
            plan.call_ns[call] = plan.call_ns[call].min(QUEUED_NS);
        }
        if is_pageable {
            most.work_ns[at] = scaled(base.work_ns[at], 0.5);
        }
    }
    tally.longest?;
    // The waits that follow such a copy within the same operator.
    for (at, call) in of.calls_of(CallKind::Wait) {
        let class = call.waits_for.map(|work| of.works[work as usize].class);
        if matches!(class, Some(Class::CopyIn { .. }))
            && (of.is_within(call, "aten::copy_") || of.is_within(call, "aten::_to_copy"))
            && !of.is_within(call, names::LOADER)
        {
            (least.blocks[at], most.blocks[at]) = (false, false);
            let counts = of.counts(of.step_at(call.time.start_ns));
            waited_ns += if counts { call.time.dur_ns } else { 0 };
        }
    }
    let (count, ms) = tally.per_step(of);
    let speed = match (bytes, tally.total_ns) {
        (0, _) | (_, ..=0) => String::new(),
        (bytes, ns) => format!(" at {:.1} GB/s", bytes as f64 / ns as f64),
    };
    let text = format!(
        "{count:.1} copies to the device per step take {ms:.2} ms{speed}, {:.0} % of them from pageable memory, and the host \
         waits {:.2} ms for them",
        100.0 * pageable as f64 / tally.count as f64,
        of.per_step(waited_ns as f64 / 1e6)
    );
    let change = match (pageable, bytes / tally.count as u64) {
        (0, _) => "batch = batch.to(device, non_blocking=True)",
        (_, 1..SMALL_BYTES) => {
            "make small tensors on the device, once, before the loop: torch.tensor(value, device=device)"
        }
        _ => "DataLoader(dataset, pin_memory=True)\nbatch = batch.to(device, non_blocking=True)",
    };
    Some(tally.found(text, change, [least, most]))
}
