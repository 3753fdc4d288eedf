//! Steps of a program that leaves no spans, such as inference: groups of launches that repeat.
//!
//! A timeline goes in. A [`Found`] comes out. Layers repeat too, within a step. Two signs tell steps from layers. Each step copies to
//! or from the host, and no layer does, but for weights that come from the host. Or nothing else is in the trace: a pass over layers also has kernels before the first layer or
//! after the last one that no layer has. Neither is sure unless the host pauses between steps.

use std::collections::HashSet;

use foldhash::HashMap;
use paceline_table::stats::median;

use super::Found;
use super::find::{LEAST, NOT_SURE, steps_between};
use crate::hta::launched;
use crate::timeline::{DeviceWork, NameId, Timeline, TrackId};

/// The least number of launches in a step.
const LEAST_LAUNCHES: usize = 5;
/// Groups differ in length by at most this part.
const ALIKE: usize = 50;
/// At most this many numbers of repetitions are tried, and names of each.
const TRIED: usize = 8;
/// Steps are reported from this likeness of groups, and sure from the second.
const LIKE: f64 = 0.9;
const SURE: f64 = 0.98;

const TO_HOST: &str = "Memcpy DtoH";

/// A launch of work.
pub(super) struct Launch {
    pub(super) at_ns: i64,
    /// The host's time since the launch before it.
    pause_ns: i64,
    pub(super) name: NameId,
    work: DeviceWork,
    lane: TrackId,
}

/// The steps of a trace by the launches that repeat; `None` if they do not.
pub(super) fn of(timeline: &Timeline) -> Option<Found> {
    let all = launches(timeline);
    let mut places: HashMap<NameId, Vec<usize>> = HashMap::default();
    for (place, launch) in all.iter().enumerate() {
        places.entry(launch.name).or_default().push(place);
    }
    // The names that occur once in a step are the rarest of those that repeat.
    let mut by_count: Vec<(usize, Vec<usize>)> =
        places.into_values().filter(|of| of.len() >= LEAST).map(|of| (of.len(), of)).collect();
    by_count.sort_unstable();
    let same = by_count.chunk_by(|a, b| a.0 == b.0).take(TRIED);
    let pause_ns = |of: &[usize]| of.iter().map(|at| all[*at].pause_ns).sum::<i64>();
    let group = same.filter_map(|of| {
        let even = of.iter().take(TRIED).map(|of| of.1.as_slice()).filter(|of| is_even(of));
        // A step begins where the host pauses: the program is between two calls of the model.
        let exchanges = |of: &[usize]| copies(timeline, &all, of, &[TO_HOST, "Memcpy HtoD"]);
        even.filter(|of| exchanges(of) || is_all(&all, of)).max_by_key(|of| pause_ns(of))
    });
    let (begins, likeness) =
        group.map(|of| (of, likeness(&all, of))).find(|(_, likeness)| *likeness >= LIKE)?;
    let bounds_ns: Vec<i64> = begins.iter().map(|at| all[*at].at_ns).collect();
    let is_sure = likeness >= SURE
        && pauses(&all, begins)
        && (copies(timeline, &all, begins, &[TO_HOST]) || is_all(&all, begins));
    let words = format!(
        "prof.step() marks no steps. They are taken from launches that repeat: {} groups of about {} launches, which are equal in \
         {:.0} %.{}",
        begins.len() - 1,
        (begins[begins.len() - 1] - begins[0]) / (begins.len() - 1),
        100.0 * likeness,
        if is_sure { "" } else { NOT_SURE }
    );
    let lane = all[begins[0]].lane;
    Some(Found { steps: steps_between(&bounds_ns), lane, is_last_cut: false, words })
}

/// All launches of known work, in order.
pub(super) fn launches(timeline: &Timeline) -> Vec<Launch> {
    let calls = launched(timeline);
    let of_kernel = |kernel: &crate::timeline::Kernel| {
        let call = &timeline.launches[*calls.get(&kernel.correlation?)? as usize];
        let (at_ns, name, lane) = (call.time.start_ns, kernel.name, call.lane);
        let launch = Launch { at_ns, pause_ns: 0, name, work: kernel.work, lane };
        (kernel.work != DeviceWork::Sync).then_some(launch)
    };
    let mut all: Vec<Launch> = timeline.kernels.iter().filter_map(of_kernel).collect();
    all.sort_by_key(|launch| launch.at_ns);
    for at in 1..all.len() {
        all[at].pause_ns = all[at].at_ns.saturating_sub(all[at - 1].at_ns);
    }
    all
}

/// Whether these places are the same number of launches apart, or nearly so.
fn is_even(places: &[usize]) -> bool {
    let apart = || places.windows(2).map(|of| (of[1] - of[0]) as i64);
    let usual = median(apart()).unwrap_or(0);
    usual >= LEAST_LAUNCHES as i64 && apart().all(|of| (of - usual).abs() <= usual / ALIKE as i64)
}

/// Whether each group has a copy whose name begins with one of these.
fn copies(timeline: &Timeline, all: &[Launch], begins: &[usize], names: &[&str]) -> bool {
    let text = |of: &Launch| timeline.names.text(of.name);
    let is_it = |of: &Launch| names.iter().any(|name| text(of).starts_with(name));
    begins.windows(2).all(|of| all[of[0]..of[1]].iter().any(is_it))
}

/// Whether all kernels before the first group and after the last one are of the groups, too.
fn is_all(all: &[Launch], begins: &[usize]) -> bool {
    let (first, last) = (begins[0], begins[begins.len() - 1]);
    let inside: HashSet<NameId> = all[first..last].iter().map(|launch| launch.name).collect();
    let outside = all[..first].iter().chain(&all[last..]);
    outside
        .filter(|launch| launch.work == DeviceWork::Kernel)
        .all(|launch| inside.contains(&launch.name))
}

/// Whether the host pauses before nearly each group, and longer than within it. Layers follow each other without a pause.
fn pauses(all: &[Launch], begins: &[usize]) -> bool {
    // Before the first group, anything may have been.
    let groups = begins.windows(2).skip(1);
    let longest_ns = |of: &[usize]| all[of[0] + 1..of[1]].iter().map(|of| of.pause_ns).max();
    let is_after_pause =
        |of: &&[usize]| longest_ns(of).is_some_and(|ns| all[of[0]].pause_ns > 2 * ns);
    10 * groups.clone().filter(is_after_pause).count() >= 9 * groups.len()
}

/// The part of the launches that are the same as those at their place in the group before.
fn likeness(all: &[Launch], begins: &[usize]) -> f64 {
    let (mut same, mut count) = (0, 0);
    for of in begins.windows(3) {
        let (before, after) = (&all[of[0]..of[1]], &all[of[1]..of[2]]);
        same += before.iter().zip(after).filter(|(a, b)| a.name == b.name).count();
        count += before.len().max(after.len());
    }
    f64::from(same as u32) / f64::from(count.max(1) as u32)
}
