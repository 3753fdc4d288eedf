//! One rank, or the ranks of one host, make the others wait: by computation, by the loader or by their host.
//!
//! Seen: the rank comes last at most collectives, and later than the others by more than steps differ. The gain is what the steps
//! would gain if it came no later than the others: an upper bound, since something else may then take as long. At the low end,
//! half of it. Ranks of one host take turns in being last; then it is the host that comes last, if the traces name hosts.

use std::collections::{BTreeSet, HashMap};

use paceline_table::stats::median;

use super::super::together::Late;
use super::*;
use crate::steps;

/// A rank is late if its mean delay is larger than this many of its standard errors.
const ERRORS: f64 = 3.0;

/// A rank's mean times per step in milliseconds: computation, and the loader.
fn times(of: &Recorded) -> [f64; 2] {
    let computes = |class: Class| {
        matches!(class, Class::Layout | Class::SinglePrecision | Class::Elementwise | Class::Other)
    };
    let ns: i64 = if of.on_device() {
        let works = of.works.iter().filter(|work| of.counts(work.step) && computes(work.class));
        works.map(|work| work.time.dur_ns).sum()
    } else {
        of.calls.iter().map(|call| call.time.dur_ns).sum()
    };
    let loading = loader::spans(of);
    let loading = loading.iter().filter(|span| of.counts(of.step_at(span.start_ns)));
    let loading: i64 = loading.map(|span| span.dur_ns).sum();
    [ns, loading].map(|ns| of.per_step(ns as f64 / 1e6))
}

/// Whether ranks are late at most collectives and in the mean step, by more than chance. A single step has no chance.
fn is_late<G>(late: &Late<G>, least_ms: f64) -> bool {
    let (mean_ms, error_ms) = late.mean_ms();
    2 * late.times_last > late.all
        && 0.75 * mean_ms >= least_ms
        && mean_ms > ERRORS * error_ms.unwrap_or(0.0)
}

/// The reason of a rank that computes for longer than the others.
const COMPUTATION: &str = "computation";
/// Cores are not equally fast in the short time of a recording: in 16 of 100 runs without a fault, beside a program that takes a core now and then, one rank computed for longer in all
/// steps, and the low end was up to an eighth of a step.
const UNEQUAL: f64 = 0.15;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "straggler",
    title: "One rank makes the others wait",
    gain: Known::ByWaits,
    find: Find::All(find),
};

fn find(ranks: &Ranks, cause: &'static Cause) -> Option<Finding> {
    let Ranks { recorded, together, .. } = ranks;
    let least_ms = ranks.least_ms();
    // Collectives of the last step count here too.
    let steps = recorded.iter().map(|of| steps::of(of.timeline).len()).max()?;
    let hosts: HashMap<usize, &str> =
        recorded.iter().filter_map(|of| Some((of.rank, of.timeline.host.as_deref()?))).collect();
    let of_rank = together.last(steps, |rank| rank)?;
    let are_several = hosts.values().collect::<BTreeSet<_>>().len() > 1;
    let of_host =
        if are_several { together.last(steps, |rank| hosts.get(&rank).copied()) } else { None };
    // If one rank of the host is last most of the time, that rank is the straggler.
    let of_host = of_host.filter(|host| {
        host.group.is_some()
            && is_late(host, least_ms)
            && 4 * of_rank.times_last < 3 * host.times_last
    });
    let (name, these, mean_ms, times_last, all): (String, Vec<usize>, f64, usize, usize) =
        match of_host {
            Some(late) => {
                let host = late.group.unwrap_or_default();
                let mut these: Vec<usize> =
                    hosts.iter().filter(|(_, of)| **of == host).map(|(rank, _)| *rank).collect();
                these.sort_unstable();
                let numbers: Vec<String> = these.iter().take(8).map(usize::to_string).collect();
                let name = format!("The host {host:.48} (ranks {})", numbers.join(", "));
                (name, these, late.mean_ms().0, late.times_last, late.all)
            }
            None if is_late(&of_rank, least_ms) => {
                let rank = of_rank.group;
                let host = hosts.get(&rank).filter(|_| are_several);
                let host = host.map_or(String::new(), |host| format!(" (host {host:.48})"));
                let name = format!("Rank {rank}{host}");
                (name, vec![rank], of_rank.mean_ms().0, of_rank.times_last, of_rank.all)
            }
            None => return None,
        };
    let is_it = |of: &&Recorded| these.contains(&of.rank);
    let it = recorded.iter().find(is_it)?;
    let medians =
        |all: Vec<[f64; 2]>| [0, 1].map(|at| median(all.iter().map(|of| of[at])).unwrap_or(0.0));
    let own = medians(recorded.iter().filter(is_it).map(times).collect());
    let usual = medians(recorded.iter().filter(|of| !is_it(of)).map(times).collect());
    let (by, why, change) = reason(own, usual, mean_ms, it.on_device());
    let text = format!(
        "it is last at {times_last} of {all} collectives, in each step by {mean_ms:.2} ms; {why}"
    );
    let gain = Gain::between(mean_ms / 2.0, mean_ms, steps);
    if by == COMPUTATION && !it.on_device() && gain.low_ms < UNEQUAL * ranks.step_ms {
        return None;
    }
    let tally = Tally::of_works(it, |work| work.class != Class::Communication);
    let title = format!("{name} makes the others wait, by {by}");
    let evidence = evidence(it, text, &tally);
    let finding = ranks.finding(cause, title, change.to_owned(), gain, evidence, Vec::new())?;
    Some(Finding { waits_ms: gain.high_ms, ..finding })
}

/// Why ranks are late that have these times, if the others have the usual ones; and the change.
fn reason(
    [own, own_loader]: [f64; 2],
    [usual, usual_loader]: [f64; 2],
    mean_ms: f64,
    on_device: bool,
) -> (&'static str, String, &'static str) {
    let (excess, excess_loader) = (own - usual, own_loader - usual_loader);
    if excess_loader > mean_ms / 3.0 && excess_loader > excess {
        let why = format!(
            "its loader takes {own_loader:.2} ms per step, that of the others {usual_loader:.2}"
        );
        let change = "give this rank's loader more workers, if cores are free, or move its files to a faster disk: DataLoader(..., num_workers=<more>)";
        ("data", why, change)
    } else if excess > mean_ms / 3.0 {
        let why = format!("it computes for {own:.2} ms per step, the others for {usual:.2}");
        let change = if on_device {
            "balance the batches (sequence lengths, samples per rank); compare clocks: nvidia-smi -q -d CLOCK,PERFORMANCE"
        } else {
            "balance the batches (sequence lengths, samples per rank); look for what else uses its cores: top"
        };
        (COMPUTATION, why, change)
    } else {
        let why = format!(
            "it computes as long as the others ({own:.2} and {usual:.2} ms per step) but launches later"
        );
        let change = "look for what only this rank does, such as logging, and for what else uses its cores: torchrun with numactl per rank; gc.freeze()";
        ("its host", why, change)
    }
}
