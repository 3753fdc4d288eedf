//! Steps of a program that does not mark them: between its optimizer's steps or its loader's batches, or in the spans that the user
//! names.
//!
//! A timeline goes in. A [`Found`] comes out, with how sure it is: steps of one program launch about as much work each.

use std::ops::Range;

use foldhash::HashMap;
use paceline_table::stats::median;

use super::{Found, Step, repeats};
use crate::timeline::{NameId, TimeRange, Timeline, TrackId};

/// The least number of spans that make steps: with fewer, the parts of one step cannot be told from steps.
pub(super) const LEAST: usize = 3;
/// Steps are alike if their work differs from the median by at most this part of it.
const ALIKE: i64 = 20;

/// At most this many spans make a step.
const TOGETHER: usize = 6;

/// The most letters of a name that are shown.
const SHOWN: usize = 80;

/// The spans that PyTorch itself records in a loop of training: steps of the optimizer, and waits for the loader.
const LOOP: [&str; 2] = ["Optimizer.step", "enumerate(DataLoader)"];

/// Whether a name is one of such a span.
pub(super) fn is_of_loop(name: &str) -> bool {
    LOOP.iter().any(|of| name.starts_with(of))
}

/// The spans of a thread with one name, in order of time.
struct Spans {
    name: NameId,
    lane: TrackId,
    times: Vec<TimeRange>,
}

/// The steps of a trace that does not mark them; `None` if nothing in it repeats as steps do.
pub(super) fn unmarked(timeline: &Timeline) -> Option<Found> {
    let [optimizer, loader] = LOOP.map(|of| spans(timeline, |name| name.starts_with(of)));
    // The spans of the one between each two of the other.
    let counts = |of: &Option<Spans>, between: &Option<Spans>| {
        let (of, between) = (of.as_ref()?, between.as_ref()?.times.windows(2));
        Some(between.map(|by| within(&of.times, by[0], by[1])).collect::<Vec<usize>>())
    };
    // Two optimizers, or one that is called twice, in each step of a loader.
    let in_batches = counts(&optimizer, &loader).unwrap_or_default();
    let is_of_loader = in_batches.len() >= 2
        && in_batches[0] > 1
        && in_batches.iter().all(|of| *of == in_batches[0]);
    // Where each step of the optimizer has a batch of its own, it is a step, also beside evaluations at regular distances.
    let batches = counts(&loader, &optimizer).unwrap_or_default();
    let has_batches = !batches.is_empty() && !batches.contains(&0);
    let most = if has_batches { 1 } else { TOGETHER };
    let ends = |of: &Spans| of.times.iter().map(TimeRange::end_ns).collect::<Vec<_>>();
    let starts = |of: &Spans| of.times.iter().map(|time| time.start_ns).collect::<Vec<_>>();
    let by_optimizer = optimizer.filter(|_| !is_of_loader).and_then(|of| {
        between(timeline, &of, &ends(&of), most, "from the end of one to the end of the next")
    });
    let by_loader = || {
        let (of, how) = (loader?, "from the start of one to the start of the next");
        between(timeline, &of, &starts(&of), TOGETHER, how)
    };
    by_optimizer.or_else(by_loader).or_else(|| repeats::of(timeline))
}

/// The steps in the spans that the user names. A number may follow the name, as in `step 12`.
pub(super) fn named(timeline: &Timeline, wanted: &str) -> Option<Found> {
    let is_it = |name: &str| {
        let number = name.strip_prefix(wanted);
        number.is_some_and(|of| !of.contains(char::is_alphabetic))
    };
    let spans = spans(timeline, is_it)?;
    // What lies between two spans is of the first one.
    let starts = spans.times.iter().map(|time| time.start_ns);
    let bounds_ns: Vec<i64> = starts.chain(spans.times.last().map(TimeRange::end_ns)).collect();
    let run = alike(&begun(timeline), &bounds_ns).filter(|of| of.0.len() < spans.times.len());
    let words = format!(
        "Steps are the {} spans \"{}\", from the start of one to the start of the next.{}",
        spans.times.len(),
        wanted.chars().take(SHOWN).collect::<String>(),
        run.as_ref().map_or(String::new(), |of| format!(" Of them, {}", of.2))
    );
    let run = run.map_or(0..spans.times.len(), |of| of.0);
    let is_last_cut = run.end == spans.times.len();
    let steps = steps_between(&bounds_ns[run.start..=run.end]);
    Some(Found { steps, lane: spans.lane, is_last_cut, words })
}

fn within(times: &[TimeRange], from: TimeRange, to: TimeRange) -> usize {
    let at = |ns: i64| times.partition_point(|time| time.start_ns < ns);
    at(to.start_ns) - at(from.start_ns)
}

/// The spans of the host for whose names `is_it` holds, of the thread that has most of them. Of several names, the most frequent, but
/// names that differ by a number are one. PyTorch 1.x wrote spans as operators.
fn spans(timeline: &Timeline, is_it: impl Fn(&str) -> bool) -> Option<Spans> {
    let wanted: Vec<bool> = timeline.names.iter().map(is_it).collect();
    let annotations = timeline.annotations.iter().filter(|span| !span.is_device);
    let annotations = annotations.map(|of| (of.lane, of.name, of.time));
    let operators = timeline.operators.iter().map(|of| (of.lane, of.name, of.time));
    let is_wanted = |of: &(TrackId, NameId, TimeRange)| wanted[of.1.0 as usize];
    let mut all: Vec<_> = annotations.filter(is_wanted).collect();
    if all.is_empty() {
        all = operators.filter(is_wanted).collect();
    }
    let stem = |name: NameId| {
        timeline.names.text(name).trim_end_matches(|c: char| !c.is_ascii_alphabetic())
    };
    all.sort_by_key(|&(lane, name, time)| (lane, stem(name), time.start_ns));
    let groups = all.chunk_by(|a, b| (a.0, stem(a.1)) == (b.0, stem(b.1)));
    let most = groups.max_by_key(|group| group.len())?;
    let (lane, name, _) = most[0];
    let mut times: Vec<TimeRange> = Vec::new();
    for (_, _, time) in most {
        // Spans within a span of the same name are no steps of their own.
        if times.last().is_none_or(|last| last.end_ns() <= time.start_ns) {
            times.push(*time);
        }
    }
    Some(Spans { name, lane, times })
}

/// The steps between these moments, if most of them have about as much work.
fn between(
    timeline: &Timeline,
    of: &Spans,
    bounds_ns: &[i64],
    most: usize,
    how: &str,
) -> Option<Found> {
    if bounds_ns.len() < LEAST {
        return None;
    }
    let begun = begun(timeline);
    let at = |ns: i64| begun.0.partition_point(|begun| begun.0 < ns);
    let works: Vec<_> = bounds_ns.windows(2).map(|of| &begun.0[at(of[0])..at(of[1])]).collect();
    let together = together(&works, most);
    let bounds_ns: Vec<i64> = bounds_ns.iter().copied().step_by(together).collect();
    let (run, is_sure, alike) = alike(&begun, &bounds_ns)?;
    let is_sure = together == 1 && is_sure;
    let name: String = timeline.names.text(of.name).chars().take(SHOWN).collect();
    let words = format!(
        "prof.step() marks no steps. They are taken from the spans \"{name}\", {how}{}: {alike}{}",
        if together > 1 { format!(", {together} to a step") } else { String::new() },
        if is_sure { "" } else { NOT_SURE }
    );
    let steps = steps_between(&bounds_ns[run.start..=run.end]);
    Some(Found { steps, lane: of.lane, is_last_cut: false, words })
}

/// When each piece of work was launched, and its name. Without a device, when each operator began. And the word for these.
type Begun = (Vec<(i64, NameId)>, &'static str);

/// The longest run of steps with about as much work, whether steps are surely alike, and both in words. `None` if most are not alike.
fn alike((begun, what): &Begun, bounds_ns: &[i64]) -> Option<(Range<usize>, bool, String)> {
    let at = |ns: i64| begun.partition_point(|begun| begun.0 < ns);
    let counts: Vec<i64> = bounds_ns.windows(2).map(|of| (at(of[1]) - at(of[0])) as i64).collect();
    let usual = median(counts.iter().copied()).filter(|count| *count > 0)?;
    let is_alike = |count: &i64| (count - usual).abs() <= usual / ALIKE;
    let (alike, all) = (counts.iter().filter(|of| is_alike(of)).count(), counts.len());
    // Steps follow each other without a gap, so those before or after an evaluation are left out with it.
    let runs = counts.chunk_by(|a, b| is_alike(a) && is_alike(b)).scan(0, |next, run| {
        let begin = std::mem::replace(next, *next + run.len());
        Some(begin..*next)
    });
    let runs: Vec<Range<usize>> = runs.collect();
    let longest = runs.iter().map(Range::len).max()?;
    if 2 * alike < all || longest + 1 < LEAST {
        return None;
    }
    // The forward pass separates layers that have an optimizer each, in runs of one length.
    let mut runs = runs.into_iter().filter(|run| run.len() == longest);
    let (run, is_only) = (runs.next()?, runs.next().is_none());
    let mut words =
        format!("{alike} of {all} steps have about the same number of {what} ({usual}).");
    if longest < all {
        words += &format!(" The longest run of such steps is looked at: {longest} steps.");
    }
    Some((run, 10 * alike >= 9 * all && is_only, words))
}

fn begun(timeline: &Timeline) -> Begun {
    let launches = repeats::launches(timeline);
    let mut begun: Vec<_> = launches.iter().map(|of| (of.at_ns, of.name)).collect();
    let what = if begun.is_empty() { "operators" } else { "launches" };
    if begun.is_empty() {
        begun = timeline.operators.iter().map(|of| (of.time.start_ns, of.name)).collect();
    }
    begun.sort_unstable();
    (begun, what)
}

/// How many spans make a step: 2 if the work in them alternates, as with the two optimizers of a GAN.
fn together(works: &[&[(i64, NameId)]], most: usize) -> usize {
    let sums = |work: &&[(i64, NameId)]| {
        let mut sums: HashMap<NameId, i64> = HashMap::default();
        work.iter().for_each(|(_, name)| *sums.entry(*name).or_default() += 1);
        sums
    };
    let sums: Vec<HashMap<NameId, i64>> = works.iter().map(sums).collect();
    let is_unlike = |a: &HashMap<NameId, i64>, b: &HashMap<NameId, i64>| {
        let differ = |name: &NameId| {
            let [a, b] = [a, b].map(|of| of.get(name).copied().unwrap_or(0));
            (a - b).abs()
        };
        let only_b = b.keys().filter(|name| !a.contains_key(name));
        let sum: i64 = a.keys().chain(only_b).map(differ).sum();
        sum > a.values().sum::<i64>() / ALIKE
    };
    let unlike = |apart: usize| {
        let pairs = sums.iter().zip(sums.iter().skip(apart));
        pairs.filter(|(a, b)| is_unlike(a, b)).count()
    };
    let once = unlike(1);
    // A single evaluation differs from what comes before and after it at any distance.
    let mut several = (2..=most).filter(|apart| 3 * apart <= works.len() + 1);
    several.find(|apart| 3 * unlike(*apart) < once).unwrap_or(1)
}

/// The advice where steps are not sure.
pub(super) const NOT_SURE: &str = " That is not sure: pass a schedule to the profiler and call prof.step() after each step, or name a span with --step.";

/// The steps from each moment to the next.
pub(super) fn steps_between(bounds_ns: &[i64]) -> Vec<Step> {
    let times = bounds_ns.windows(2).map(|of| TimeRange::between(of[0], of[1]));
    times.zip(0..).map(|(time, number)| Step { number, time }).collect()
}
