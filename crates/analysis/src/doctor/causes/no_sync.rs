//! Gradients are exchanged after every micro-batch of a step, although only their sum is needed.
//!
//! Seen: two or more backward passes in a step, each with all-reduces that the reducer launched. Taken away: the all-reduces of all
//! passes except the last, at most with the waits for slower ranks in them. On a processor, what the calls beside them
//! [lost](super::interrupted) comes back.

use super::*;
use crate::backward::{self, BackwardPass};

pub(in super::super) const CAUSE: Cause = Cause {
    key: "no_sync",
    title: "Gradients are exchanged after every micro-batch",
    gain: Known::Exactly,
    find: Find::Meeting(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let passes = backward::passes(of.timeline);
    let mut tally = Tally::default();
    let mut most = base.clone();
    let mut repeated = 0usize;
    let next_of = |pass: &BackwardPass| {
        let next = passes.iter().find(|next| next.time.start_ns > pass.time.start_ns);
        next.map_or(i64::MAX, |next| next.time.start_ns)
    };
    let by_launch = of.by_launch();
    for (step, _) in (0..).zip(&of.steps) {
        let is_in = |at_ns: i64| of.step_at(at_ns) == Some(step);
        let of_step = passes.iter().filter(|pass| is_in(pass.time.start_ns));
        // The all-reduces that each pass launched.
        let mut all: Vec<Vec<usize>> = of_step
            .map(|pass| {
                // Threads of a backend may begin the last transfers after the pass, which waits for them.
                let until_ns = if of.on_device() { pass.time.end_ns() } else { next_of(pass) };
                let works = by_launch.between(pass.time.start_ns, until_ns);
                let is_all_reduce =
                    |at: &usize| of.collective(&of.works[*at]) == CollectiveKind::AllReduce;
                works.filter(is_all_reduce).collect()
            })
            .collect();
        all.retain(|works| !works.is_empty());
        all.pop();
        repeated += if of.counts(Some(step)) { all.len() } else { 0 };
        for at in all.into_iter().flatten() {
            tally.add_work(of, &of.works[at]);
            most.is_gone[at] = true;
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{:.1} backward passes per step exchange gradients before the last one does: {count:.0} all-reduces, {ms:.2} ms",
        of.per_step(repeated as f64)
    );
    let change = "with model.no_sync(): loss = loss_of(model(inputs)); loss.backward()  # forward too, for all micro-batches but the last";
    let mut least = most.clone();
    let interrupted = Interrupted::of(of, base);
    let is_gone = most.is_gone.clone();
    let less = |at: u32| if is_gone[at as usize] { 1.0 } else { 0.0 };
    interrupted.relieve_least(&mut least, less);
    interrupted.relieve_most(&mut most, less);
    Some(tally.found(text, change, [least, most]))
}
