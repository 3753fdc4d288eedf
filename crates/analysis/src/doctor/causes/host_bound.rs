//! The device is idle because its work is launched late: the host cannot prepare kernels as fast as the device executes them.
//!
//! Seen: launches that come when all work before them has ended. Taken away, on top of all other causes: at most the host's time
//! before all launches, up to 200 us each, and in them, as a CUDA graph does; at least half of it, as compiled code does.
//!
//! On a processor: short operators, PyTorch's work around them and the optimizer, whose times do not depend on the size of a batch, take
//! half of the step or more. A batch of four times the size has them for four times the samples. Taken away, for the samples of a step of today:
//! three quarters of the time between operators and of the optimizer; at most also of the short operators.

use paceline_table::stats::median;

use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "host_bound",
    title: "The device waits for launches",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if of.on_device() { launches(of, base) } else { overhead(of, base) }
}

/// An operator that takes no longer is mostly overhead.
const SHORT_NS: i64 = 20_000;

/// The work of a processor that takes as long for any size of a batch.
fn overhead(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let (begin_ns, end_ns) = of.window();
    // The recording makes short operators longer than all else.
    let unrecorded_ms = median(of.timeline.unrecorded_ms.iter().copied());
    let recorded_ms = of.per_step((end_ns - begin_ns) as f64 / 1e6);
    let slower = unrecorded_ms.map_or(1.0, |ms| (recorded_ms / ms).clamp(1.0, 3.0));
    let short_ns = scaled(SHORT_NS, slower);
    let (mut between_ns, mut optimizer_ns, mut short, mut all) = (0i64, 0i64, 0usize, 0usize);
    for (at, call) in of.calls_of(CallKind::Operator) {
        let lag_ns = base.lag_ns[at].max(0);
        let host_ns = lag_ns - unprepared(lag_ns);
        let before = TimeRange { start_ns: call.time.start_ns - host_ns, dur_ns: host_ns };
        tally.add_time(of, of.text(call.name).to_owned(), before);
        between_ns += host_ns;
        least.lag_ns[at] -= scaled(host_ns, 0.75);
        most.lag_ns[at] -= scaled(host_ns, 0.75);
        all += 1;
        let (call_ns, is_of_optimizer) = (base.call_ns[at], of.is_within(call, OPTIMIZER));
        if call.time.dur_ns <= short_ns || is_of_optimizer {
            short += usize::from(!is_of_optimizer);
            optimizer_ns += if is_of_optimizer { call_ns } else { 0 };
            tally.total_ns += call_ns;
            most.call_ns[at] = scaled(call_ns, 0.25);
            least.call_ns[at] = if is_of_optimizer { most.call_ns[at] } else { call_ns };
        }
    }
    let (_, ms) = tally.per_step(of);
    if 2 * tally.total_ns < end_ns - begin_ns {
        return None;
    }
    let text = format!(
        "{:.0} of {:.0} operators per step take at most {} us; they, the host's time between operators ({:.2} ms) and the optimizer \
         ({:.2} ms) take {ms:.2} ms of a step (the gain is that of its samples in a larger batch)",
        of.per_step(short as f64),
        of.per_step(all as f64),
        short_ns / 1000,
        of.per_step(between_ns as f64 / 1e6),
        of.per_step(optimizer_ns as f64 / 1e6),
    );
    let change = "a larger batch: DataLoader(dataset, batch_size=<four times as many>)\nor: model = torch.compile(model)";
    let mut found = tally.found(text, change, [least, most]);
    found.title = Some("Most of a step does not depend on the size of its batch".to_owned());
    Some(found)
}

/// Launches into an idle device.
fn launches(of: &Recorded, base: &Plan) -> Option<Found> {
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, _) in of.calls_of(CallKind::Launch) {
        let kept_ns = unprepared(base.lag_ns[at]);
        least.lag_ns[at] = kept_ns + (base.lag_ns[at] - kept_ns) / 2;
        least.call_ns[at] = scaled(base.call_ns[at], 0.5);
        (most.lag_ns[at], most.call_ns[at]) = (kept_ns, 0);
    }
    // The waits of computation: launches that came when it had nothing left to do.
    let mut tally = Tally::default();
    let loading = loader::spans(of);
    let (mut busy_ns, mut done_ns) = (0i64, i64::MAX);
    let (mut count, mut room_ns) = (0usize, 0i64);
    for work in of.works.iter().filter(|work| work.class != Class::Communication) {
        if of.counts(work.step) {
            count += 1;
            busy_ns = busy_ns.saturating_add(work.time.dur_ns);
        }
        let call = work.call.map(|call| &of.calls[call as usize]);
        if let Some(call) = call.filter(|call| call.time.start_ns > done_ns) {
            // Later, the work waits on the device.
            let launched_ns = call.time.end_ns().min(work.time.start_ns);
            let idle = TimeRange::between(done_ns, launched_ns);
            // The loader has advice of its own.
            let is_loading = 2 * loader::overlap_ns(&loading, idle) > idle.dur_ns;
            if idle.dur_ns > 0 && !is_loading {
                room_ns += if of.counts(work.step) { work.time.start_ns - done_ns } else { 0 };
                tally.add_of(of, work, brief(of.text(work.name)), idle);
            }
        }
        let end_ns = work.time.end_ns();
        done_ns = if done_ns == i64::MAX { end_ns } else { done_ns.max(end_ns) };
    }
    tally.longest?;
    let (late, ms) = tally.per_step(of);
    let text = format!(
        "{late:.0} of {:.0} kernels per step are launched when the device has nothing left to compute, and it computes nothing for {ms:.2} ms \
         until then; kernels take {:.1} us on average",
        of.per_step(count as f64),
        busy_ns as f64 / 1e3 / count as f64
    );
    // Other devices have no graphs that PyTorch records.
    let mut launches = of.calls_of(CallKind::Launch).map(|(_, call)| of.text(call.name));
    let has_graphs =
        launches.any(|name| ["cuda", "cu", "hip"].iter().any(|of| name.starts_with(of)));
    let change = if has_graphs && !of.can_compile() {
        "a larger batch; or: torch.cuda.make_graphed_callables(model, (sample,))"
    } else if has_graphs {
        "model = torch.compile(model, mode=\"reduce-overhead\")  (CUDA graphs)\n\
             or: a larger batch; torch.cuda.make_graphed_callables(model, (sample,))"
    } else {
        "model = torch.compile(model)\nor: a larger batch"
    };
    // Launches that are quicker gain no more than the time in which the device waits for them.
    Some(Found {
        room_ms: Some(of.per_step(room_ns as f64 / 1e6)),
        ..tally.found(text, change, [least, most])
    })
}
