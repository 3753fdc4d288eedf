//! A cause of lost time, and the advice that follows from it.
//!
//! Input: the steps of the ranks, and the function that finds a cause in them. Output: a [`Finding`], if the gain is worth the
//! change. This file knows no cause.

use std::collections::BTreeMap;
use std::fmt;

use paceline_table::stats::median;

use super::names;
use super::recorded::Recorded;
use super::remedies;
use super::replay::Plan;
use super::tally::{Found, Tally};
use super::together::Together;
use crate::advice::gain::Gain;
use crate::advice::sizes::Sizes;
use crate::read::on_all_cores;
use crate::timeline::{NameId, TimeRange};

/// No gain below this part of a step is advised.
pub(super) const NEGLIGIBLE: f64 = 0.02;
/// The same for the low end of a gain that depends on how long ranks wait for each other on a processor. Its cores are not equally
/// fast in the short time of a recording: in runs without a fault, one rank was slower by up to a twentieth in all steps.
const NEGLIGIBLE_WAIT: f64 = 0.05;

/// A cause of lost time.
pub struct Cause {
    /// Its name in files.
    pub key: &'static str,
    /// A few words for people.
    pub title: &'static str,
    pub(super) gain: Known,
    pub(super) find: Find,
}

/// How well a trace determines the gain of taking a cause away.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// All that changes is in the trace.
    Exactly,
    /// It depends on how long ranks wait for each other.
    ByWaits,
    /// Other code would run, whose time is not in the trace.
    Roughly,
}

/// How a cause is found. A finder does not judge whether the gain is worth a change.
pub(super) enum Find {
    /// In the steps of each rank by itself, on top of a plan.
    Rank(Finder),
    /// The same. Without the cause, ranks also wait less for each other.
    Meeting(Finder),
    /// In the steps of all ranks together.
    All(fn(&Ranks, &'static Cause) -> Option<Finding>),
}

/// Finds a cause in the steps of a rank; `None` if the trace does not show it.
pub(super) type Finder = fn(&Recorded, &Plan) -> Option<Found>;

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key)
    }
}

/// The evidence for a piece of advice in the traces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// The rank that shows it most.
    pub rank: usize,
    /// The trace of that rank.
    pub file: String,
    /// Times and counts, in a sentence without full stop.
    pub text: String,
    /// The operators or kernels that take most of the time, at most three.
    pub names: Vec<String>,
    /// The line of the user's own Python that takes most of the time, if the trace has stacks.
    pub line: Option<String>,
    /// Where it is longest, on the clock of the trace: the time to look for in a viewer.
    pub start_us: f64,
    /// The same after the first event of the trace, as most viewers show it.
    pub after_ms: f64,
    /// How long it is there.
    pub dur_us: f64,
    /// The work of the device and the host around that moment.
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
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The cause of the lost time.
    pub cause: &'static Cause,
    /// In which form, if the cause has several: the collective, for example.
    pub title: String,
    /// The lines to write in the program.
    pub change: String,
    /// The gain of a step, in milliseconds: the low end if the change does as little as can be expected of it, the high end if it does as
    /// much. Means over the steps.
    pub gain: Gain,
    /// The length of a step, in milliseconds: the mean, or the median of the steps before the recording if those are known.
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
        let line = self.evidence.line.as_ref();
        let line = line.map_or(String::new(), |line| format!("; most of it at {line}"));
        format!(
            "{}: {}{line}. {change}. Expected: {low_ms:.2} to {high_ms:.2} ms of {:.2} ms per step ({:.0} to {:.0} %)",
            self.title,
            self.evidence.text,
            self.step_ms,
            pct(low_ms),
            pct(high_ms),
        )
    }
}

/// Advice, and the plans of the ranks without its cause, by place.
pub(super) struct Finding {
    pub(super) advice: Advice,
    pub(super) left: Vec<(usize, Plan)>,
    /// The part of the gain's high end in which ranks wait for each other.
    pub(super) waits_ms: f64,
    /// The part of it in which the device computes nothing.
    pub(super) idle_ms: f64,
}

/// The findings of one rank about a cause.
struct Said {
    low_ms: f64,
    high_ms: f64,
    /// The part of the high end in which the rank waits for others.
    waits_ms: f64,
    /// The part of it in which the device computes nothing.
    idle_ms: f64,
    found: Found,
    place: usize,
}

/// The steps of all ranks.
pub(super) struct Ranks<'a> {
    pub(super) recorded: Vec<Recorded<'a>>,
    pub(super) together: &'a Together,
    /// The effect of buckets of other sizes; `None` if the traces do not show it.
    pub(super) sizes: Option<Sizes>,
    /// The plans of the ranks without the causes found so far.
    pub(super) bases: Vec<Plan>,
    /// The sum of the gains that are promised for these plans.
    pub(super) promised_ms: f64,
    /// The mean length of a step.
    pub(super) step_ms: f64,
    pub(super) left: Unpromised,
}

/// The time of a step that no advice has promised yet.
pub(super) struct Unpromised {
    pub(super) step_ms: f64,
    /// The part of it in which ranks wait for each other.
    pub(super) waits_ms: f64,
    /// The part of it in which the device computes nothing.
    pub(super) idle_ms: f64,
}

impl Ranks<'_> {
    /// The least gain of a step that is advised.
    pub(super) fn least_ms(&self) -> f64 {
        NEGLIGIBLE * self.step_ms
    }

    /// How many steps were replayed on each rank.
    pub(super) fn num_steps(&self) -> usize {
        self.recorded.iter().map(|of| of.steps.len()).min().unwrap_or(0)
    }

    pub(super) fn on_cpu(&self) -> bool {
        self.recorded.iter().all(|of| !of.on_device())
    }

    /// Finds a cause in the steps of these ranks. Returns also how many milliseconds of a step show it, whether or not that is worth a change.
    pub(super) fn find(&self, cause: &'static Cause) -> (f64, Option<Finding>) {
        let of_all = match cause.find {
            Find::Rank(find) | Find::Meeting(find) => return self.each(cause, find),
            Find::All(find) => find(self, cause),
        };
        (of_all.as_ref().map_or(0.0, |found| found.advice.gain.high_ms), of_all)
    }

    /// Finds a cause in the steps of each rank by itself.
    pub(super) fn each(&self, cause: &'static Cause, find: Finder) -> (f64, Option<Finding>) {
        let found = on_all_cores(&self.recorded, |(place, rank)| {
            let plain = without_waits(rank, self.together);
            let alone = Self::found(find, rank, &plain);
            let seen_ms = alone.as_ref().map_or(0.0, |of| of.tally.per_step(rank).1);
            (seen_ms, alone.and_then(|alone| self.said(cause, find, place, &plain, alone)))
        });
        let (seen_ms, found): (Vec<f64>, Vec<_>) = found.into_iter().unzip();
        (median(seen_ms).unwrap_or_default(), self.of_ranks(cause, found))
    }

    /// A cause on a rank, unless its card cannot run what is advised.
    fn found(find: Finder, rank: &Recorded, plan: &Plan) -> Option<Found> {
        let compiles = |found: &Found| found.change.contains("torch.compile");
        find(rank, plan).filter(|of| rank.can_compile() || !compiles(of))
    }

    /// The finding of a rank that shows a cause, and its plan without it.
    fn said(
        &self,
        cause: &Cause,
        find: Finder,
        place: usize,
        plain: &Plan,
        mut alone: Found,
    ) -> Option<(Said, (usize, Plan))> {
        let (rank, base) = (&self.recorded[place], &self.bases[place]);
        let mut beyond = Self::found(find, rank, base)?;
        for plan in [&mut alone.least, &mut alone.most] {
            rank.keep_first(plan, plain);
        }
        // The causes that come later do not see this one in any step.
        let left = beyond.most.clone();
        rank.keep_first(&mut beyond.least, base);
        rank.keep_first(&mut beyond.most, base);
        let gain = |now, changed| per_step(cause, rank, &rank.gains_ms(now, changed));
        // Causes may gain more together than the sum of what each is promised, which is no more than it gains alone.
        let mut joint = base.clone();
        rank.keep_first(&mut joint, plain);
        let together_ms = (gain(plain, &joint) - self.promised_ms).max(0.0);
        // Alone, and on top of the causes before it: neither is promised more than it gains, and no time twice.
        let both = |alone_ms: f64, on_top_ms: f64| alone_ms.min(on_top_ms + together_ms);
        let whole_ms = both(gain(plain, &alone.most), gain(base, &beyond.most));
        let most_ms = whole_ms.min(alone.room_ms.unwrap_or(f64::INFINITY));
        if most_ms < self.least_ms() {
            return None;
        }
        let low_ms = both(gain(plain, &alone.least), gain(base, &beyond.least)).max(0.0);
        let low_ms = low_ms * most_ms / whole_ms;
        let idle_ms = (most_ms - rank.removed_ms(plain, &alone.most)).max(0.0);
        let waits_ms = match cause.find {
            Find::Meeting(_) => self.waits_ms(cause, find, place)?,
            _ => 0.0,
        };
        let high_ms = most_ms.max(low_ms) + waits_ms;
        // Plans are large: only those without the cause are kept. The words are about the rest that the causes before it leave.
        let found = Found { least: Plan::default(), most: Plan::default(), ..beyond };
        Some((Said { low_ms, high_ms, waits_ms, idle_ms, found, place }, (place, left)))
    }

    /// The finding of all ranks, from what each says.
    fn of_ranks(
        &self,
        cause: &'static Cause,
        found: Vec<Option<(Said, (usize, Plan))>>,
    ) -> Option<Finding> {
        let (mut said, left): (Vec<Said>, Vec<_>) = found.into_iter().flatten().unzip();
        // A cause of few ranks only makes these ranks slow: they are stragglers, which has advice of its own.
        if self.recorded.len() > 1 && 2 * said.len() <= self.recorded.len() {
            return None;
        }
        // Medians over the ranks, and the evidence of the rank that shows it most.
        let low_ms = median(said.iter().map(|of| of.low_ms))?;
        let high_ms = median(said.iter().map(|of| of.high_ms))?;
        let waits_ms = median(said.iter().map(|of| of.waits_ms))?;
        let idle_ms = median(said.iter().map(|of| of.idle_ms))?;
        let most = (0..said.len()).max_by(|a, b| said[*a].high_ms.total_cmp(&said[*b].high_ms))?;
        let Said { found, place, .. } = said.swap_remove(most);
        let evidence = evidence(&self.recorded[place], found.text, &found.tally);
        let title = found.title.unwrap_or_else(|| cause.title.to_owned());
        let gain = Gain::between(low_ms, high_ms.max(low_ms), self.num_steps());
        let waits_ms = waits_ms.min(gain.high_ms - gain.low_ms);
        let idle_ms = idle_ms.min(gain.high_ms - waits_ms);
        let finding = self.finding(cause, title, found.change, gain, evidence, left)?;
        Some(Finding { waits_ms, idle_ms, ..finding })
    }

    /// By how much more a cause gains if the waits for slower ranks go with its collectives.
    fn waits_ms(&self, cause: &Cause, find: Finder, place: usize) -> Option<f64> {
        let rank = &self.recorded[place];
        let gain = |plan: &Plan| {
            let most = find(rank, plan)?.most;
            Some(per_step(cause, rank, &rank.gains_ms(plan, &most)))
        };
        Some((gain(&rank.as_recorded())? - gain(&without_waits(rank, self.together))?).max(0.0))
    }

    /// The advice of a finding, of the time that the advice before it has left; `None` if that is not worth the change.
    pub(super) fn take(&mut self, finding: Finding) -> Option<Advice> {
        let Finding { mut advice, left, waits_ms, idle_ms } = finding;
        let Gain { low_ms, high_ms, steps, .. } = advice.gain;
        let waits = waits_ms.min(self.left.waits_ms).min(self.left.idle_ms);
        let idle = idle_ms.min(self.left.idle_ms - waits);
        let high_ms = high_ms - (waits_ms - waits) - (idle_ms - idle);
        let high_ms = high_ms.min(self.left.step_ms);
        advice.gain = Gain::between(low_ms.min(high_ms), high_ms, steps);
        if !self.is_worth(advice.cause, advice.gain) {
            return None;
        }
        self.left.waits_ms -= waits;
        // A device that waits for other ranks computes nothing.
        self.left.idle_ms -= idle + waits;
        self.left.step_ms -= high_ms;
        self.promised_ms += if left.is_empty() { 0.0 } else { high_ms - waits };
        for (place, plan) in left {
            self.bases[place] = plan;
        }
        Some(advice)
    }

    /// Whether a gain is worth a change. On a processor the low end has to be worth it, where the trace determines one.
    fn is_worth(&self, cause: &Cause, gain: Gain) -> bool {
        let (gain_ms, least) = match cause.gain {
            Known::ByWaits if self.on_cpu() => (gain.low_ms, NEGLIGIBLE_WAIT),
            Known::Exactly if self.on_cpu() => (gain.low_ms, NEGLIGIBLE),
            _ => (gain.ms, NEGLIGIBLE),
        };
        gain_ms >= least * self.step_ms
    }

    /// The finding, if its gain is worth the change.
    pub(super) fn finding(
        &self,
        cause: &'static Cause,
        title: String,
        change: String,
        gain: Gain,
        evidence: Evidence,
        left: Vec<(usize, Plan)>,
    ) -> Option<Finding> {
        let change = format!("{change}{}", remedies::needs(&change));
        let advice = Advice { cause, title, change, gain, step_ms: self.step_ms, evidence };
        self.is_worth(cause, gain).then_some(Finding { advice, left, waits_ms: 0.0, idle_ms: 0.0 })
    }
}

/// The gain per step. It is the mean, because steps share a queue of work, so the gain of one of them may show in the next one only. On a processor nothing is
/// queued, and a thread that gets no core for a moment makes one all-reduce as long as a step: there it is the median, if the cause is in
/// every step.
fn per_step(cause: &Cause, of: &Recorded, gains: &[f64]) -> f64 {
    let gains = &gains[of.first_steps().min(gains.len().saturating_sub(1))..];
    match cause.find {
        Find::Meeting(_) if !of.on_device() => median(gains.iter().copied()).unwrap_or_default(),
        _ => gains.iter().sum::<f64>() / gains.len().max(1) as f64,
    }
}

/// The most names that a piece of advice lists.
const NAMES: usize = 3;
/// The most pieces of a row in the cut of the time line.
const PIECES: usize = 200;

/// Evidence on a rank, with the names that take most of the time.
pub(super) fn evidence(of: &Recorded, text: String, tally: &Tally) -> Evidence {
    let mut names: Vec<(&String, &i64)> = tally.what.iter().collect();
    names.sort_by(|a, b| b.1.cmp(a.1).then_with(|| a.0.cmp(b.0)));
    let names = names.into_iter().take(NAMES).map(|(name, _)| name.clone()).collect();
    let at = tally.longest.or_else(|| of.steps.first().copied()).unwrap_or_default();
    Evidence {
        rank: of.rank,
        file: of.timeline.source.clone(),
        text,
        names,
        line: tally.line().map(|line| of.text(line).to_owned()),
        start_us: at.start_ns as f64 / 1e3,
        after_ms: (at.start_ns - of.timeline.begun_ns.unwrap_or_default()) as f64 / 1e6,
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
    let kind = if of.on_device() { "stream" } else { "thread" };
    strips.extend(
        streams.map(|(stream, pieces)| Strip { label: format!("{kind} {stream}"), pieces }),
    );
    strips
}

/// The plan of the recording, in which no collective waits for a slower rank. Only the transfer remains.
pub(super) fn without_waits(of: &Recorded, together: &Together) -> Plan {
    let mut plan = of.as_recorded();
    for (at, work) in of.works.iter().enumerate() {
        if work.class == names::Class::Communication {
            let wait_ns = together.wait_ns(of.rank, work.time.start_ns);
            plan.work_ns[at] = (plan.work_ns[at] - wait_ns).max(0);
        }
    }
    plan
}
