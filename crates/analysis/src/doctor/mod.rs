//! The trace doctor: which change of a PyTorch program would make its steps shorter, by how much, and the evidence in the traces.
//!
//! Input: the timelines of the ranks. Output: a [`Diagnosis`], advice in order of its gain, each with its evidence, the
//! lines of Python and the gain as a range. For the gain, the steps of each rank are replayed with the cause taken away: once
//! as little as can be expected of the change, and once as much. Advice that would gain less than 2 % of a step is left out, and so is a
//! cause that another piece of advice has taken away already.
//!
//! This module knows PyTorch by its traces only. Runs of paceline get advice of their own, elsewhere. It does not know how a report looks.
//!
//! | file | contents |
//! |---|---|
//! | here | the examination of traces |
//! | `finding` | a cause, its advice, and whether the gain is worth a change |
//! | `recorded` | the calls and the work of a rank's steps; `collect` reads them, `connect` infers the waits of each |
//! | `lag` | the work of earlier steps that the device has still to do when the first step begins |
//! | `code` | the line of the user's own Python at a moment |
//! | `replay` | the steps replayed with a changed plan |
//! | `remedies` | which changes PyTorch accepts, by optimizer, device and version |
//! | `together` | the waits in collectives, and which rank came last |
//! | `names` | the meaning of the names of kernels and calls |
//! | `causes/` | one file for each cause: its signs, and the time that the change takes away; and their order |
//! | `tally` | the findings of a finder, and its sums |
//! | [`cards`] | the published speeds of cards |
//! | [`collectives`] | collectives judged by their bus bandwidth |
//! | [`against`] | the same job before and after a change |
//! | `own` | the diagnosis of a run of paceline, for such a comparison |

pub mod against;
pub mod cards;
mod causes;
pub(crate) mod code;
mod collect;
pub mod collectives;
mod connect;
mod finding;
mod lag;
pub(crate) mod names;
mod own;
mod recorded;
mod remedies;
mod replay;
mod tally;
mod together;

#[cfg(test)]
mod planted_cpu_tests;
#[cfg(test)]
mod planted_tests;

use crate::advice::gain::Gain;
use crate::advice::reducer::Reducer;
use crate::advice::sizes::Sizes;
use crate::hta::{Options, check_times};
use crate::ranks::across_ranks;
use crate::read::on_all_cores;
use crate::stats::median;
use crate::steps;
use crate::timeline::Timeline;
use causes::CAUSES;
pub use finding::{Advice, Cause, Evidence, Strip};
use finding::{Find, Ranks, Unpromised, without_waits};
use names::Class;
use recorded::{Recorded, world_size};
use replay::Plan;
use together::Together;

/// Less communication beside which nothing is computed, as a part of a step, needs no advice and no word.
const UNEXPLAINED: f64 = 0.1;

/// The findings of the doctor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diagnosis {
    /// The advice, the largest gain first.
    pub advice: Vec<Advice>,
    /// Causes that these traces cannot show, and what to record for them, in whole sentences.
    pub unseen: Vec<String>,
    /// The mean length of a step, over the steps that count and the ranks, in milliseconds; `None` if nothing could be replayed.
    pub step_ms: Option<f64>,
    /// How many steps were replayed on each rank.
    pub steps: usize,
    /// The length of each replayed step, in milliseconds: means over the ranks.
    pub lengths_ms: Vec<f64>,
    /// The lengths of the steps before the recording in the same way, if all ranks know them.
    pub unrecorded_ms: Vec<f64>,
    /// How many milliseconds of a recorded step show each cause, also those of which nothing is advised.
    pub(crate) seen: Vec<(&'static Cause, f64)>,
}

impl Diagnosis {
    /// The median length of a step before the recording over that of a recorded one. The profiler slows the host down.
    fn scale(&self) -> Option<f64> {
        let median = |lengths: &[f64]| median(lengths.iter().copied());
        Some(median(&self.unrecorded_ms)? / median(&self.lengths_ms)?)
    }

    /// The part of a recorded step that shows a cause.
    fn share(&self, cause: &Cause) -> Option<f64> {
        let seen_ms = self.seen.iter().find(|of| of.0 == cause)?.1;
        Some(seen_ms / median(self.lengths_ms.iter().copied())?)
    }

    /// Gives the gains as parts of a step without the profiler.
    fn for_steps_before(mut self) -> Self {
        if let (Some(scale), Some(recorded_ms)) =
            (self.scale(), median(self.lengths_ms.iter().copied()))
        {
            let step_ms = scale * recorded_ms;
            for of in &mut self.advice {
                of.step_ms = step_ms;
                of.gain =
                    Gain::between(scale * of.gain.low_ms, scale * of.gain.high_ms, of.gain.steps);
            }
            self.unseen.push(format!(
                "The median step took {step_ms:.2} ms before the recording and {recorded_ms:.2} ms in it. Gains are given for the former."
            ));
        }
        self
    }
}

/// A diagnosis, and the speed of collectives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Examination {
    /// The advice.
    pub diagnosis: Diagnosis,
    /// The collectives that lose most time.
    pub collectives: Vec<collectives::Collective>,
}

/// Examines the traces of a run of PyTorch; `None` for traces of paceline, whose runs get advice of their own. A link between
/// ranks carries `link` bytes per second, if that is known.
pub fn examine(
    timelines: &[Timeline],
    options: &Options,
    link: Option<f64>,
) -> Option<Examination> {
    if timelines.iter().any(|of| is_of_paceline(of) || check_times(of).is_err()) {
        return None;
    }
    let together = Together::of(timelines);
    Some(Examination {
        diagnosis: diagnose(timelines, &together, options),
        collectives: collectives::collectives(timelines, &together, link),
    })
}

/// Whether a run of paceline has written this trace.
pub fn is_of_paceline(timeline: &Timeline) -> bool {
    !timeline.run_facts.is_empty()
}

/// Diagnoses the traces of a run for a comparison: of PyTorch as [`examine`] does, of paceline by the critical path across its
/// ranks.
pub fn diagnosis(timelines: &[Timeline], options: &Options) -> Diagnosis {
    match examine(timelines, options, None) {
        Some(examination) => examination.diagnosis,
        None => own::diagnose(&across_ranks(timelines, options)),
    }
}

/// Diagnoses the traces of a run.
fn diagnose(timelines: &[Timeline], together: &Together, options: &Options) -> Diagnosis {
    let mut unseen = unseen(timelines);
    if timelines.iter().any(lacks_steps) {
        return Diagnosis { unseen, ..Diagnosis::default() };
    }
    let rank = |(place, of): (usize, &Timeline)| {
        Recorded::of(&timelines[place], of.rank.unwrap_or(place), options)
    };
    let mut recorded: Vec<Recorded> = on_all_cores(timelines, rank).into_iter().flatten().collect();
    let has_all_ranks = world_size(timelines) <= recorded.len();
    recorded.iter_mut().for_each(|of| of.context.has_all_ranks = has_all_ranks);
    if recorded.len() < timelines.len() {
        unseen.push(
            "The steps of a rank have no operators, or nothing says which call launched which kernel, so they cannot be \
             replayed: record with ProfilerActivity.CPU, and CUDA if there is a card."
                .to_owned(),
        );
    }
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    let of_ranks: Vec<Vec<f64>> =
        recorded.iter().map(|of| of.lengths_ms(&of.as_recorded())).collect();
    let num_steps = of_ranks.iter().map(Vec::len).min().unwrap_or(0);
    let of_step = |at: usize| mean(&of_ranks.iter().map(|of| of[at]).collect::<Vec<_>>());
    let lengths_ms: Vec<f64> = (0..num_steps).map(of_step).collect();
    let first = recorded.iter().map(Recorded::first_steps).min().unwrap_or(0);
    let step_ms = mean(lengths_ms.get(first..).unwrap_or_default());
    // Without a length, or if all work was done before the first step had begun, there is nothing to gain.
    if lengths_ms.is_empty() || step_ms <= 0.0 {
        return Diagnosis { unseen, ..Diagnosis::default() };
    }
    let bases: Vec<Plan> = recorded.iter().map(|of| without_waits(of, together)).collect();
    let waits = recorded.iter().zip(&bases).map(|(of, base)| {
        of.per_step(of.gains_ms(&of.as_recorded(), base)[of.first_steps()..].iter().sum())
    });
    let computes_not = |of: &Recorded| of.idle_ms(|work| work.class != Class::Communication);
    let idle_ms = recorded.iter().map(computes_not).fold(0.0, f64::max);
    let left = Unpromised { step_ms, waits_ms: waits.fold(0.0, f64::max), idle_ms };
    let sizes = Reducer::of(timelines).and_then(|reducer| Sizes::of(&reducer));
    let mut ranks = Ranks { recorded, together, sizes, bases, promised_ms: 0.0, step_ms, left };
    let (mut advice, mut seen) = (Vec::new(), Vec::new());
    for cause in CAUSES {
        let (seen_ms, found) = ranks.find(cause);
        seen.push((*cause, seen_ms));
        advice.extend(found.and_then(|found| ranks.take(found)));
    }
    advice.sort_by(|a, b| b.gain.ms.total_cmp(&a.gain.ms));
    unseen.extend(unexplained(&ranks, &advice));
    let is_marked = timelines.iter().all(|of| of.found.is_none());
    let unrecorded_ms = if is_marked { unrecorded_ms(timelines) } else { Vec::new() };
    let (steps, step_ms) = (ranks.num_steps(), Some(step_ms));
    Diagnosis { advice, unseen, step_ms, steps, lengths_ms, unrecorded_ms, seen }.for_steps_before()
}

/// The lengths of the steps before the recording: means over the ranks, whose last steps are the same.
fn unrecorded_ms(timelines: &[Timeline]) -> Vec<f64> {
    let steps = timelines.iter().map(|of| of.unrecorded_ms.len()).min().unwrap_or(0);
    let of_step = |before: usize| {
        let lengths = timelines.iter().map(|of| of.unrecorded_ms[of.unrecorded_ms.len() - before]);
        lengths.sum::<f64>() / timelines.len() as f64
    };
    (1..=steps).rev().map(of_step).collect()
}

/// A sentence about communication beside which a device computes nothing, if no advice is about it.
fn unexplained(ranks: &Ranks, advice: &[Advice]) -> Option<String> {
    let exposed = |of: &Recorded| {
        of.idle_ms(|work| work.class != Class::Communication) - of.idle_ms(|_| true)
    };
    let recorded = ranks.recorded.iter().filter(|of| of.on_device());
    // A rank that waits longest waits for others.
    let ms = recorded.map(exposed).min_by(f64::total_cmp).unwrap_or_default();
    // The causes of single ranks are not about communication, but for one.
    let is_other =
        |of: &Advice| matches!(of.cause.find, Find::Rank(_)) && of.cause.key != "gathers";
    (ms > UNEXPLAINED * ranks.step_ms && advice.iter().all(is_other)).then(|| {
        format!(
            "For {ms:.2} ms per step, there is communication and nothing is computed, and no advice is about that."
        )
    })
}

fn lacks_steps(timeline: &Timeline) -> bool {
    steps::of(timeline).is_empty() || timeline.lost_kernels() || timeline.is_cut_off()
}

/// Causes that these traces do not show, and what to record for them.
fn unseen(timelines: &[Timeline]) -> Vec<String> {
    type Has = fn(&Timeline) -> bool;
    let facts: [(Has, &str); 5] = [
        (
            |of| !of.is_cut_off(),
            "The file is cut off, so work of its steps may be missing, and nothing is advised.",
        ),
        (
            |of| !of.lost_kernels() || of.is_cut_off(),
            "The profiler recorded the calls that launch kernels and no kernels, so nothing is advised.",
        ),
        (
            |of| !steps::of(of).is_empty(),
            "No step is named, so work of the loop cannot be told from work that is done once, and nothing is advised: pass a \
             schedule to the profiler and call prof.step() after each step, or name a span of the program with --step.",
        ),
        (
            |of| of.has_shapes || !of.products.is_empty(),
            "No product has shapes, so its speed cannot be judged: record with record_shapes=True.",
        ),
        (
            |of| !of.memory.is_empty(),
            "No allocation is recorded, so memory cannot be judged: record with profile_memory=True, or paceline record --memory.",
        ),
    ];
    let missing = facts.into_iter().filter(|(has, _)| !timelines.iter().any(has));
    let mut unseen: Vec<String> = missing.map(|(_, text)| text.to_owned()).collect();
    let lacking: Vec<usize> =
        (0..timelines.len()).filter(|place| lacks_steps(&timelines[*place])).collect();
    if let Some(place) = lacking.first().filter(|_| lacking.len() < timelines.len()) {
        let rank = timelines[*place].rank.unwrap_or(*place);
        let text = format!(
            "Rank {rank} has no steps or no kernels, or is cut off, so nothing is advised."
        );
        unseen.insert(0, text);
    }
    let world = world_size(timelines);
    if timelines.len() < 2 && world > 1 {
        unseen.push(format!(
            "Only one of {world} ranks has a trace, so time in collectives may be waiting for slower ranks: record every rank."
        ));
    }
    unseen
}
