//! What the traces of all ranks say together: whose clock is how far off, who made whom wait, and which
//! rank held up each step.
//!
//! The timelines of the ranks go in. [`AcrossRanks`] comes out. This module reads no files and prints nothing.
//!
//! Collectives join the ranks. A collective can move data once its last rank has come, so the time until
//! then is waiting and the time after it is transfer. From the end of a step backwards, each rank's time
//! depends on its own work until a collective it waited for, and from there on that of the rank which came
//! last.

mod clock;
mod meetings;
pub mod merge;
mod path;
mod stragglers;

#[cfg(test)]
mod sample;

pub use clock::{ClockSource, Clocks, RankClock, align};
pub use meetings::{Arrival, Meeting, Meetings, WaitSource, meet};
pub use path::{CriticalPath, PathSource, RankShare, Segment, StepPath};
pub use stragglers::{RankWaits, StepWaits, Stragglers, stragglers};

use crate::hta::{Chosen, Options};
use crate::timeline::Timeline;
use clock::rank_of;
use meetings::meet_chosen;
use path::critical_path;

/// What the traces of all ranks say together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcrossRanks {
    /// The ranks there are traces of, ascending.
    pub ranks: Vec<usize>,
    /// Ranks of the run without a trace. They may have held up the others unseen.
    pub missing: Vec<usize>,
    /// How the clocks of the ranks were brought together.
    pub clocks: Clocks,
    /// Who came last to collectives, and made the others wait.
    pub stragglers: Stragglers,
    /// What the steps depended on.
    pub path: CriticalPath,
}

/// Analyses the traces of all ranks together, in any order. A timeline without a rank takes its place in
/// the list as its number.
///
/// It looks at the steps and collectives that the analysis of each rank looks at with the same options.
///
/// Traces of one rank, or without collectives, give an answer without waits and with a path that stays on
/// the rank whose step ended last.
pub fn across_ranks(timelines: &[Timeline], options: &Options) -> AcrossRanks {
    let chosen: Vec<Chosen> =
        timelines.iter().map(|timeline| Chosen::of(timeline, options)).collect();
    let clocks = align(timelines);
    let meetings = meet_chosen(timelines, &clocks, &chosen);
    let stragglers = stragglers(&meetings, &clocks);
    let path = critical_path(timelines, &chosen, &meetings, &clocks);
    let mut ranks: Vec<usize> = clocks.ranks.iter().map(|clock| clock.rank).collect();
    ranks.sort_unstable();
    let world = timelines.iter().filter_map(|timeline| timeline.world_size).max().unwrap_or(0);
    // A file may claim any number of ranks; nobody reads a list of a million missing ones.
    let missing = (0..world.min(1 << 16)).filter(|rank| ranks.binary_search(rank).is_err());
    AcrossRanks { missing: missing.collect(), ranks, clocks, stragglers, path }
}

/// Ranks whose trace was over before the newest one began, or begins after it: probably of another run. Only
/// traces that give the time of day can tell.
pub fn apart(timelines: &[Timeline]) -> Vec<usize> {
    let extent = |timeline: &Timeline| -> Option<(i64, i64)> {
        let ((begin_ns, end_ns), base_ns) = (timeline.extent()?, timeline.base_ns?);
        Some((base_ns.saturating_add(begin_ns), base_ns.saturating_add(end_ns)))
    };
    let extents: Vec<_> = timelines.iter().map(extent).collect();
    let Some((begin_ns, end_ns)) = extents.iter().flatten().copied().max_by_key(|&(_, end)| end)
    else {
        return Vec::new();
    };
    let is_apart = |&(begin, end): &(i64, i64)| end < begin_ns || begin > end_ns;
    let places =
        (0..timelines.len()).filter(|&place| extents[place].as_ref().is_some_and(is_apart));
    places.map(|place| rank_of(timelines, place)).collect()
}
