//! Merges the traces of all ranks into one file on one time line.
//!
//! Input: trace files, one per rank. Output: the contents of a file that Perfetto opens without an import error. Each rank
//! gets processes of its own, which are named after it. Its times are converted to the clock of the lowest
//! rank. Numbers that link events are made distinct between ranks. Arrows (flow events) lead through the
//! ranks of each collective, in the order in which they arrived.
//!
//! Each file is read three times and never kept in memory: once for the collectives and the clocks, once for
//! how the events of each row nest, and once to write. Only a few bytes per event stay in memory.
//!
//! The events have to obey Perfetto's rules (its `slice_tracker.cc`, `flow_tracker.cc` and the importer of
//! JSON). Complete events of one thread nest or do not overlap. No time and no duration is negative. An arrow
//! begins and ends within an event of its thread, and each arrow id begins once.

mod event;
mod layout;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use super::clock::{Clocks, RankClock, align};
use super::matched::match_collectives;
use crate::TraceError;
use crate::hta::check_times;
use crate::kineto::compress::compressed;
use crate::read::{self, TraceFile};
use crate::steps;
use crate::timeline::{LaneInfo, TimeRange, Timeline, TrackId};
use layout::{Layout, Point};
use paceline_files::Printable;
use write::{Arrow, Writer};

/// The result of a merge.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// Number of events written, without those that only name rows.
    pub num_events: u64,
    /// Number of collectives through which an arrow leads.
    pub num_joined: usize,
    /// Events that could not be placed.
    pub left_out: LeftOut,
    /// Oddities of the traces, worded as in the analysis: each kind with its count.
    pub oddities: BTreeMap<String, u64>,
    /// The ranks that are probably from another run, see [`apart`](super::apart).
    pub apart: Vec<usize>,
    /// Number of rows that were added, because events of one row overlapped without nesting.
    pub num_split: usize,
    /// How the clocks were aligned.
    pub clocks: Clocks,
}

/// Number of events that are not in the merged file, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Events without a readable and plausible time.
    pub without_time: u64,
    /// Events without a phase, and counters without values.
    pub without_meaning: u64,
    /// Ends of arrows that lead from or to no event.
    pub loose_arrows: u64,
    /// Events that overlap with more events of their row than there may be rows.
    pub crowded: u64,
}

/// Merges the traces of some ranks, and writes the merged trace to `out`, compressed or not. Nothing is written before
/// all traces have been read once.
pub fn merge(
    files: &[TraceFile],
    is_compressed: bool,
    out: &mut (dyn Write + Send),
) -> Result<Merged, TraceError> {
    let mut skeletons = Vec::with_capacity(files.len());
    let mut oddities = BTreeMap::new();
    for file in files {
        let mut timeline = read::open(&file.path)?;
        timeline.rank = Some(file.rank);
        check_times(&timeline)?;
        for (what, count) in std::mem::take(&mut timeline.oddities) {
            *oddities.entry(what).or_default() += count;
        }
        skeletons.push(skeleton(timeline));
    }
    let clocks = align(&skeletons);
    let layouts: Vec<Layout> = files
        .iter()
        .zip(&skeletons)
        .map(|(file, skeleton)| Layout::read(&file.path, &points(skeleton)))
        .collect::<Result<_, _>>()?;
    if let Some((file, _)) = files.iter().zip(&layouts).find(|(_, of)| of.first_ns.is_none()) {
        let file = file.path.printable();
        return Err(TraceError::Unfit(format!("{file}: no events: there is nothing to merge")));
    }
    // The merged time line begins at zero, so that no time is negative and numbers are small enough to be
    // exact.
    let first = |(layout, clock): (&Layout, &RankClock)| Some(clock.align(layout.first_ns?));
    let zero_ns = layouts.iter().zip(&clocks.ranks).filter_map(first).min().unwrap_or(0);
    let arrows = arrows(&skeletons, &layouts, &clocks);
    let base_ns = base_ns(&skeletons, &clocks).map(|base_ns| base_ns.saturating_add(zero_ns));
    let num_joined = arrows.iter().flatten().filter(|arrow| arrow.phase == b's').count();
    let num_split = layouts.iter().map(Layout::num_split).sum();
    let all = |sink: &mut dyn Write| -> Result<(u64, LeftOut), TraceError> {
        let mut writer = Writer::begin(sink, &clocks, base_ns, zero_ns)?;
        for (place, file) in files.iter().enumerate() {
            writer.rank(&file.path, place, &layouts[place], &arrows[place])?;
        }
        Ok(writer.end()?)
    };
    let (num_events, left_out) = if is_compressed { compressed(out, all)? } else { all(out)? };
    let apart = super::apart(&skeletons);
    Ok(Merged { num_events, num_joined, left_out, oddities, apart, num_split, clocks })
}

/// Reduces a trace to what clocks and collectives need: collectives, steps, and the first and the last event.
fn skeleton(mut timeline: Timeline) -> Timeline {
    let (first_ns, last_ns) = timeline.extent().unzip();
    let is_edge =
        |time: TimeRange| Some(time.start_ns) == first_ns || Some(time.end_ns()) == last_ns;
    timeline.kernels.retain(|kernel| kernel.collective.is_some() || is_edge(kernel.time));
    let is_step: Vec<bool> = steps::numbers(&timeline).iter().map(Option::is_some).collect();
    timeline.operators.retain(|operator| {
        let is_collective = operator.collective.is_some();
        is_collective || is_step[operator.name.0 as usize] || is_edge(operator.time)
    });
    timeline.annotations.retain(|a| is_step[a.name.0 as usize] || is_edge(a.time));
    timeline.launches = Vec::new();
    timeline.memory = Vec::new();
    timeline.kernels.shrink_to_fit();
    timeline.operators.shrink_to_fit();
    timeline.annotations.shrink_to_fit();
    timeline
}

/// The rows and times of a trace's collectives.
fn points(skeleton: &Timeline) -> Vec<Point> {
    let point = |lane: TrackId, time: TimeRange| {
        let LaneInfo { pid, tid, .. } = &skeleton.lanes[lane.0 as usize];
        ([pid.as_bytes(), tid.as_bytes()].join(&0), time)
    };
    let kernels = skeleton.kernels.iter().filter(|kernel| kernel.collective.is_some());
    let operators = skeleton.operators.iter().filter(|operator| operator.collective.is_some());
    kernels
        .map(|kernel| point(kernel.lane, kernel.time))
        .chain(operators.map(|operator| point(operator.lane, operator.time)))
        .collect()
}

/// The arrows through the collectives, per rank. On each rank, the arrow passes just after the collective's
/// start, and at least one nanosecond later than on the rank before it, so that viewers show the ranks in the
/// order in which they arrived.
fn arrows(skeletons: &[Timeline], layouts: &[Layout], clocks: &Clocks) -> Vec<Vec<Arrow>> {
    let mut arrows: Vec<Vec<Arrow>> = layouts.iter().map(|_| Vec::new()).collect();
    let aligned = |(layout, clock): (&Layout, &RankClock)| {
        let times = layout.tracks_of_points.iter();
        times
            .map(|(of, track)| ((clock.align(of.start_ns), clock.align(of.end_ns())), *track))
            .collect()
    };
    let tracks: Vec<HashMap<(i64, i64), u32>> =
        layouts.iter().zip(&clocks.ranks).map(aligned).collect();
    for (id, collective) in match_collectives(skeletons, clocks).all.iter().enumerate() {
        let mut came: Vec<_> = collective.arrivals.iter().collect();
        came.sort_by_key(|arrival| (arrival.start_ns, arrival.rank));
        let mut at_ns = i64::MIN;
        let ends = came.iter().filter_map(|arrival| {
            let time = (arrival.start_ns, arrival.end_ns);
            let track = *tracks[arrival.place].get(&time)?;
            let inside_ns = (arrival.start_ns + 1).max(at_ns.saturating_add(1));
            if inside_ns > arrival.end_ns {
                return None;
            }
            at_ns = inside_ns;
            Some((arrival.place, track, inside_ns))
        });
        let ends: Vec<_> = ends.collect();
        if ends.len() < 2 {
            continue;
        }
        for (i, &(place, track, at_ns)) in ends.iter().enumerate() {
            let phase = match i {
                0 => b's',
                i if i + 1 == ends.len() => b'f',
                _ => b't',
            };
            arrows[place].push(Arrow { id: id as u64, track, at_ns, phase });
        }
    }
    arrows
}

/// The time of day at the zero of the reference clock, if the trace of that rank gives it.
fn base_ns(skeletons: &[Timeline], clocks: &Clocks) -> Option<i64> {
    let place = clocks.ranks.iter().position(|clock| clock.rank == clocks.reference)?;
    skeletons[place].base_ns
}
