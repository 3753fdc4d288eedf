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
//! | here | the order of the causes, and the choice |
//! | `recorded` | the calls and the work of a rank's steps; `collect` reads them, `connect` infers the waits of each |
//! | `replay` | the steps replayed with a changed plan |
//! | `together` | the waits in collectives, and which rank came last |
//! | `names` | the meaning of the names of kernels and calls |
//! | `causes/` | one file for each cause: its signs, and the time that the change takes away |
//! | [`cards`] | the published speeds of cards |
//! | [`products`] | products and collectives judged by the limits of the hardware |
//! | [`against`] | the same job before and after a change |
//! | `own` | the diagnosis of a run of paceline, for such a comparison |

pub mod against;
pub mod cards;
mod causes;
mod collect;
mod connect;
mod names;
mod own;
pub mod products;
mod recorded;
mod replay;
mod together;

#[cfg(test)]
mod planted;
#[cfg(test)]
mod planted_cpu;

use std::collections::{BTreeMap, HashMap};

use paceline_table::stats::median;
use serde::Serialize;

use crate::advice::gain::Gain;
use crate::hta::{Options, check_times};
use crate::ranks::across_ranks;
use crate::read::on_all_cores;
use crate::steps;
use crate::timeline::{NameId, TimeRange, Timeline};
pub use causes::Cause;
use causes::{FINDERS, Found, buckets, pipeline, straggler};
use recorded::Recorded;
use replay::Plan;
use together::Together;

/// No gain below this part of a step is advised.
const NEGLIGIBLE: f64 = 0.02;
/// The same for the low end of a gain that depends on how long ranks wait for each other on a processor. Its cores are not equally
/// fast in the short time of a recording: in runs without a fault, one rank was slower by up to a twentieth in all steps.
const NEGLIGIBLE_WAIT: f64 = 0.05;

/// The evidence for a piece of advice in the traces.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Evidence {
    /// The rank that shows it most.
    pub rank: usize,
    /// The trace of that rank.
    pub file: String,
    /// Times and counts, in a sentence without full stop.
    pub text: String,
    /// The operators or kernels that take most of the time, at most three.
    pub names: Vec<String>,
    /// Where it is longest, on the clock of the trace: the time to look for in a viewer.
    pub start_us: f64,
    /// How long it is there.
    pub dur_us: f64,
    /// The work of the device and the host around that moment.
    #[serde(skip)]
    pub around: Vec<Strip>,
}

/// A row of a time line: its name, and its pieces, in milliseconds from the start of the cut.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Strip {
    /// The row: the host's calls, or a stream.
    pub label: String,
    /// Begin, end and name. The last value says whether the advice is about it.
    pub pieces: Vec<(f64, f64, String, bool)>,
}

/// A change that would make steps shorter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The cause of the lost time.
    pub cause: Cause,
    /// In which form, if the cause has several: the collective, for example.
    pub title: String,
    /// The lines to write in the program.
    pub change: String,
    /// The gain of a step, in milliseconds: the low end if the change does as little as can be expected of it, the high end if it does as
    /// much. Means over the steps.
    pub gain: Gain,
    /// The mean length of a step, in milliseconds.
    pub step_ms: f64,
    /// The evidence in the traces.
    pub evidence: Evidence,
}

impl Advice {
    /// The advice in sentences, for a console.
    pub fn words(&self) -> String {
        let Gain { low_ms, high_ms, .. } = self.gain;
        let pct = |ms: f64| 100.0 * ms / self.step_ms;
        let change = self.change.replace('\n', "; ");
        format!(
            "{}: {}. {change}. Expected: {low_ms:.2} to {high_ms:.2} ms of {:.2} ms per step ({:.0} to {:.0} %)",
            self.title,
            self.evidence.text,
            self.step_ms,
            pct(low_ms),
            pct(high_ms),
        )
    }
}

/// The findings of the doctor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diagnosis {
    /// The advice, the largest gain first.
    pub advice: Vec<Advice>,
    /// Causes that these traces cannot show, and what to record for them, in whole sentences.
    pub unseen: Vec<String>,
    /// The mean length of a step, over steps and ranks, in milliseconds; `None` if nothing could be replayed.
    pub step_ms: Option<f64>,
    /// How many steps were replayed on each rank.
    pub steps: usize,
    /// The length of each replayed step of each rank, in milliseconds.
    pub lengths_ms: Vec<f64>,
}

/// A diagnosis, and a comparison with the limits of the hardware.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Examination {
    /// The advice.
    pub diagnosis: Diagnosis,
    /// The products that lose most time.
    pub products: Vec<products::Product>,
    /// The collectives that lose most time.
    pub collectives: Vec<products::Collective>,
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
        products: products::products(timelines),
        collectives: products::collectives(timelines, &together, link),
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

/// The findings of one rank about a cause.
struct Said {
    low_ms: f64,
    high_ms: f64,
    found: Found,
    place: usize,
}

/// Diagnoses the traces of a run.
fn diagnose(timelines: &[Timeline], together: &Together, options: &Options) -> Diagnosis {
    let mut unseen = unseen(timelines);
    if timelines.iter().any(|of| steps::of(of).is_empty()) {
        return Diagnosis { unseen, ..Diagnosis::default() };
    }
    let rank = |(place, of): (usize, &Timeline)| (place, of.rank.unwrap_or(place));
    let ranks: Vec<(usize, usize)> = timelines.iter().enumerate().map(rank).collect();
    let recorded = on_all_cores("doctor", &ranks, |_, (place, rank)| {
        Recorded::of(&timelines[*place], *rank, options)
    });
    let recorded: Vec<Recorded> = recorded.into_iter().flatten().collect();
    if recorded.len() < timelines.len() {
        unseen.push(
            "The steps of a rank have no operators, or nothing says which call launched which kernel, so they cannot be \
             replayed: record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
                .to_owned(),
        );
    }
    let lengths: Vec<f64> =
        recorded.iter().flat_map(|of| of.lengths_ms(&of.as_recorded())).collect();
    if lengths.is_empty() {
        return Diagnosis { unseen, ..Diagnosis::default() };
    }
    let step_ms = lengths.iter().sum::<f64>() / lengths.len() as f64;
    let steps = recorded.iter().map(|of| of.steps.len()).min().unwrap_or(0);
    let mut advice = Vec::new();
    // Plans are large: with many ranks, only these are kept.
    let mut bases: Vec<Plan> = recorded.iter().map(|of| without_waits(of, together)).collect();
    let least_ms = NEGLIGIBLE * step_ms;
    let sizes = buckets::sizes(timelines);
    let on_cpu = recorded.iter().all(|of| !of.on_device);
    let is_worth = |of: &Advice| is_worth(of, on_cpu);
    let other_buckets = sizes.as_ref().and_then(|sizes| buckets::advise(sizes, &recorded, step_ms));
    let other_buckets = other_buckets.filter(is_worth);
    for (cause, find) in FINDERS {
        if let (Some(sizes), Some(Advice { cause: advised, .. })) = (&sizes, &other_buckets)
            && *advised == cause
        {
            let left = buckets::left(sizes);
            recorded.iter().zip(&mut bases).for_each(|of| buckets::leave(left, of));
            continue;
        }
        if sizes.is_some() && cause == Cause::FirstBucket {
            // The replay of all ranks would have found it.
            continue;
        }
        let found = on_all_cores("doctor", &recorded, |place, rank| {
            let plain = without_waits(rank, together);
            let mut found = find(rank, &plain)?;
            let beyond = find(rank, &bases[place])?.most;
            // The change must gain something on top of those that come before it.
            let gain = |now, changed| per_step(cause, rank, &rank.gains_ms(now, changed));
            if gain(&bases[place], &beyond) < least_ms {
                return None;
            }
            let low_ms = gain(&plain, &found.least).max(0.0);
            let high_ms = match cause {
                // Ranks that do not meet, or meet for a shorter time, wait less for each other, too.
                Cause::NoSync | Cause::Exposed => {
                    let with_waits = rank.as_recorded();
                    gain(&with_waits, &find(rank, &with_waits)?.most)
                }
                _ => gain(&plain, &found.most),
            };
            let high_ms = high_ms.max(low_ms);
            (found.least, found.most) = (Plan::default(), Plan::default());
            Some((Said { low_ms, high_ms, found, place }, beyond))
        });
        let (said, changed): (Vec<Said>, Vec<Plan>) = found.into_iter().flatten().unzip();
        let places: Vec<usize> = said.iter().map(|of| of.place).collect();
        // A cause of few ranks only makes these ranks slow: they are stragglers, which has advice of its own.
        let are_few = recorded.len() > 1 && 2 * said.len() <= recorded.len();
        if said.is_empty() || are_few {
            continue;
        }
        if let Some(of) = combined(cause, said, &recorded, step_ms).filter(is_worth) {
            advice.push(of);
            for (place, plan) in places.into_iter().zip(changed) {
                bases[place] = plan;
            }
        }
    }
    advice.extend(other_buckets);
    advice.extend(straggler::advise(together, &recorded, step_ms, least_ms).filter(is_worth));
    advice.extend(pipeline::advise(&recorded, step_ms).filter(is_worth));
    for Advice { gain, .. } in &mut advice {
        gain.high_ms = gain.high_ms.min(step_ms);
    }
    advice.sort_by(|a, b| b.gain.ms.total_cmp(&a.gain.ms));
    if on_cpu && advice.iter().any(|of| of.cause == Cause::Loader) {
        unseen.push(
            "Traces of a CPU do not say how many cores are free. Workers of a loader gain less than is promised where all cores \
             compute already and the loader computes too, instead of waiting."
                .to_owned(),
        );
    }
    Diagnosis { advice, unseen, step_ms: Some(step_ms), steps, lengths_ms: lengths }
}

/// Whether a gain is worth the change. On a processor the low end has to be worth it, where the trace determines one.
fn is_worth(of: &Advice, on_cpu: bool) -> bool {
    let Gain { ms, low_ms, .. } = of.gain;
    let (gain_ms, least) = match of.cause {
        Cause::Straggler | Cause::Exposed if on_cpu => (low_ms, NEGLIGIBLE_WAIT),
        cause if on_cpu && cause.is_determined() => (low_ms, NEGLIGIBLE),
        _ => (ms, NEGLIGIBLE),
    };
    gain_ms >= least * of.step_ms
}

/// The gain per step. It is the mean, because steps share a queue of work, so the gain of one of them may show in the next one only. On a
/// processor nothing is queued, and a thread that gets no core for a moment makes one all-reduce as long as a step: there it is the
/// median, if the cause is in every step.
fn per_step(cause: Cause, of: &Recorded, gains: &[f64]) -> f64 {
    match cause {
        Cause::NoSync | Cause::Exposed if !of.on_device => {
            median(gains.iter().copied()).unwrap_or_default()
        }
        _ => gains.iter().sum::<f64>() / gains.len().max(1) as f64,
    }
}

/// The advice from the findings of the ranks: medians over them, and the evidence of the rank that shows it most.
fn combined(
    cause: Cause,
    mut said: Vec<Said>,
    recorded: &[Recorded],
    step_ms: f64,
) -> Option<Advice> {
    let low_ms = median(said.iter().map(|of| of.low_ms))?;
    let high_ms = median(said.iter().map(|of| of.high_ms))?.max(low_ms);
    let gain = Gain {
        ms: (low_ms + high_ms) / 2.0,
        low_ms,
        high_ms,
        steps: recorded.iter().map(|of| of.steps.len()).min().unwrap_or(0),
    };
    let most = (0..said.len()).max_by(|a, b| said[*a].high_ms.total_cmp(&said[*b].high_ms))?;
    let Said { found, place, .. } = said.swap_remove(most);
    let evidence = evidence(&recorded[place], found.text, &found.what, found.at);
    let (title, change) = (found.title.unwrap_or_else(|| cause.title().to_owned()), found.change);
    Some(Advice { cause, title, change, gain, step_ms, evidence })
}

/// The most names that a piece of advice lists.
const NAMES: usize = 3;
/// The most pieces of a row in the cut of the time line.
const PIECES: usize = 200;

/// Evidence on a rank: `what` are names with the time that each takes.
fn evidence(
    of: &Recorded,
    text: String,
    what: &HashMap<String, i64>,
    at: Option<TimeRange>,
) -> Evidence {
    let mut names: Vec<(&String, &i64)> = what.iter().collect();
    names.sort_by(|a, b| b.1.cmp(a.1).then_with(|| a.0.cmp(b.0)));
    let names = names.into_iter().take(NAMES).map(|(name, _)| name.clone()).collect();
    let at = at.or_else(|| of.steps.first().copied()).unwrap_or_default();
    Evidence {
        rank: of.rank,
        file: of.timeline.source.clone(),
        text,
        names,
        start_us: at.start_ns as f64 / 1e3,
        dur_us: at.dur_ns as f64 / 1e3,
        around: around(of, at),
    }
}

/// The work around a range of time: as long before it and after it as it is itself, within its limits.
fn around(of: &Recorded, at: TimeRange) -> Vec<Strip> {
    let margin_ns = at.dur_ns.clamp(50_000, 20_000_000);
    let (begin_ns, end_ns) = (at.start_ns - margin_ns, at.end_ns() + margin_ns);
    let ms = |ns: i64| (ns - begin_ns) as f64 / 1e6;
    let piece = |time: TimeRange, name: NameId, shortened: fn(&str) -> String| {
        let is_it = time.start_ns < at.end_ns() && time.end_ns() > at.start_ns;
        let (from, to) = (time.start_ns.max(begin_ns), time.end_ns().min(end_ns));
        (from < to).then(|| (ms(from), ms(to), shortened(of.text(name)), is_it))
    };
    let calls = of.calls.iter().filter(|call| call.time.dur_ns > 0);
    let calls = calls
        .filter_map(|call| piece(call.time, call.name, |name| name.chars().take(48).collect()));
    let mut strips = vec![Strip { label: "host".to_owned(), pieces: calls.take(PIECES).collect() }];
    let mut streams: BTreeMap<i64, Vec<_>> = BTreeMap::new();
    for work in &of.works {
        let pieces = streams.entry(work.stream).or_default();
        if pieces.len() < PIECES {
            pieces.extend(piece(work.time, work.name, names::brief));
        }
    }
    let streams = streams.into_iter().filter(|(_, pieces)| !pieces.is_empty()).take(8);
    let kind = if of.on_device { "stream" } else { "thread" };
    strips.extend(
        streams.map(|(stream, pieces)| Strip { label: format!("{kind} {stream}"), pieces }),
    );
    strips
}

/// The plan of the recording, in which no collective waits for a slower rank. Only the transfer remains.
fn without_waits(of: &Recorded, together: &Together) -> Plan {
    let mut plan = of.as_recorded();
    for (at, work) in of.works.iter().enumerate() {
        if work.class == names::Class::Communication {
            let wait_ns = together.wait_ns(of.rank, work.time.start_ns);
            plan.work_ns[at] = (plan.work_ns[at] - wait_ns).max(0);
        }
    }
    plan
}

/// Causes that these traces do not show, and what to record for them.
fn unseen(timelines: &[Timeline]) -> Vec<String> {
    let mut unseen = Vec::new();
    let none = |has: fn(&Timeline) -> bool| !timelines.iter().any(has);
    if none(|of| !steps::of(of).is_empty()) {
        unseen.push(
            "No step is named, so work of the loop cannot be told from work that is done once, and nothing is advised: call \
             prof.step() after each step."
                .to_owned(),
        );
    }
    if none(|of| !of.products.is_empty()) {
        unseen.push(
            "No product has shapes, so its speed cannot be judged: record with record_shapes=True."
                .to_owned(),
        );
    }
    if none(|of| !of.memory.is_empty()) {
        unseen.push(
            "No allocation is recorded, so memory cannot be judged: record with profile_memory=True.".to_owned(),
        );
    }
    let world = timelines.iter().filter_map(|of| of.world_size).max().unwrap_or(1);
    if timelines.len() < 2 && world > 1 {
        unseen.push(format!(
            "Only one of {world} ranks has a trace, so time in collectives may be waiting for slower ranks: record every rank."
        ));
    }
    unseen
}
