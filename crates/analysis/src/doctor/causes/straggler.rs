//! One rank makes the others wait: by its computation, by its loader or by its host.
//!
//! Seen: the rank comes last at most collectives. The gain is what the steps would gain if it came no later than the next rank: an
//! upper bound, since something else may then take as long. At the low end, half of it.

use std::collections::HashMap;

use paceline_table::stats::median;

use super::super::names::{Class, brief};
use super::super::recorded::Recorded;
use super::super::together::Together;
use super::super::{Advice, evidence};
use super::{Cause, loader};
use crate::advice::gain::Gain;
use crate::steps;

/// A rank's mean times per step in milliseconds: computation, and the loader.
fn times(of: &Recorded) -> [f64; 2] {
    let computes = |class: Class| {
        matches!(class, Class::Layout | Class::SinglePrecision | Class::Elementwise | Class::Other)
    };
    let ns: i64 = match of.on_device {
        true => {
            of.works.iter().filter(|work| computes(work.class)).map(|work| work.time.dur_ns).sum()
        }
        false => of.calls.iter().map(|call| call.time.dur_ns).sum(),
    };
    let loading: i64 = loader::spans(of).iter().map(|span| span.dur_ns).sum();
    [ns, loading].map(|ns| of.per_step(ns as f64 / 1e6))
}

pub(in super::super) fn advise(
    together: &Together,
    recorded: &[Recorded],
    step_ms: f64,
    least_ms: f64,
) -> Option<Advice> {
    // Collectives of the last step count here too.
    let steps = recorded.iter().map(|of| steps::of(of.timeline).len()).max()?;
    let (rank, times_last, all, high_ms) = together.last(steps)?;
    // It must be the same rank that comes last, not one after the other.
    if 2 * times_last <= all || high_ms * 0.75 < least_ms || recorded.len() < 2 {
        return None;
    }
    let it = recorded.iter().find(|of| of.rank == rank)?;
    let own = times(it);
    let others: Vec<[f64; 2]> = recorded.iter().filter(|of| of.rank != rank).map(times).collect();
    let usual = [0, 1].map(|at| median(others.iter().map(|of| of[at])).unwrap_or(0.0));
    let excess = [own[0] - usual[0], own[1] - usual[1]];
    let (by, text, change) = if excess[1] > high_ms / 3.0 && excess[1] > excess[0] {
        (
            "data",
            format!(
                "its loader takes {:.2} ms per step, that of the others {:.2}",
                own[1], usual[1]
            ),
            "give this rank's loader more workers, or move its files to a faster disk: DataLoader(..., num_workers=8)",
        )
    } else if excess[0] > high_ms / 3.0 {
        (
            "computation",
            format!("it computes for {:.2} ms per step, the others for {:.2}", own[0], usual[0]),
            "balance the batches (sequence lengths, samples per rank); compare clocks: nvidia-smi -q -d CLOCK,PERFORMANCE",
        )
    } else {
        (
            "its host",
            format!(
                "it computes as long as the others ({:.2} and {:.2} ms per step) but launches later",
                own[0], usual[0]
            ),
            "look for what else uses its cores: torchrun with numactl per rank; gc.freeze(); logging on this rank only",
        )
    };
    let text = format!(
        "rank {rank} is last at {times_last} of {all} collectives, in each step by up to {high_ms:.2} ms; {text}"
    );
    let gain = Gain { ms: 0.75 * high_ms, low_ms: high_ms / 2.0, high_ms, steps };
    let mut what: HashMap<String, i64> = HashMap::new();
    for work in it.works.iter().filter(|work| work.class != Class::Communication) {
        *what.entry(brief(it.text(work.name))).or_default() += work.time.dur_ns;
    }
    let longest = it.works.iter().filter(|work| work.class != Class::Communication);
    let at = longest.max_by_key(|work| work.time.dur_ns).map(|work| work.time);
    Some(Advice {
        cause: Cause::Straggler,
        title: format!("Rank {rank} makes the others wait, by {by}"),
        change: change.to_owned(),
        gain,
        step_ms,
        evidence: evidence(it, text, &what, at),
    })
}
