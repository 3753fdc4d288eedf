//! The device is idle because its work is launched late: the host cannot prepare kernels as fast as the device executes them.
//!
//! Seen: launches that come when all work before them has ended. Taken away, on top of all other causes: at most the host's time
//! before all launches, up to 200 us each, and in them, as a CUDA graph does; at least half of it, as compiled code does.

use super::super::names::{Class, brief};
use super::super::recorded::{CallKind, Recorded};
use super::super::replay::Plan;
use super::{Found, Tally, scaled, unprepared};
use crate::timeline::TimeRange;

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if !of.on_device {
        return None;
    }
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, _) in of.calls_of(CallKind::Launch) {
        let kept_ns = unprepared(base.lag_ns[at]);
        least.lag_ns[at] = kept_ns + (base.lag_ns[at] - kept_ns) / 2;
        least.call_ns[at] = scaled(base.call_ns[at], 0.5);
        (most.lag_ns[at], most.call_ns[at]) = (kept_ns, 0);
    }
    // What computation waited for: launches that came when it had nothing left to do.
    let mut tally = Tally::default();
    let (mut busy_ns, mut done_ns) = (0i64, i64::MAX);
    let works = || of.works.iter().filter(|work| work.class != Class::Communication);
    for work in works() {
        busy_ns = busy_ns.saturating_add(work.time.dur_ns);
        let call_ns = work.call.map(|call| of.calls[call as usize].time.start_ns);
        if work.time.start_ns > done_ns && call_ns.is_some_and(|call_ns| call_ns > done_ns) {
            let idle = TimeRange { start_ns: done_ns, dur_ns: work.time.start_ns - done_ns };
            tally.add(brief(of.text(work.name)), idle);
        }
        let end_ns = work.time.end_ns();
        done_ns = if done_ns == i64::MAX { end_ns } else { done_ns.max(end_ns) };
    }
    tally.longest?;
    let (late, ms) = tally.per_step(of);
    let count = works().count().max(1);
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
    let change = match has_graphs {
        true => {
            "model = torch.compile(model, mode=\"reduce-overhead\")  (CUDA graphs)\n\
             or: a larger batch; torch.cuda.make_graphed_callables(model, (sample,))"
        }
        false => "model = torch.compile(model)\nor: a larger batch",
    };
    Some(tally.found(text, change, [least, most]))
}
