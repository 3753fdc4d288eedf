//! What the traces of all ranks say together: whose clock is how far off, who made whom wait, and which
//! rank held up each step.
//!
//! In go the timelines of the ranks; out comes [`AcrossRanks`]. It knows nothing of files and prints
//! nothing.
//!
//! Collectives join the ranks. A collective can move data once its last rank has come, so the time until
//! then is waiting and the time after it is transfer. From the end of a step backwards, each rank's time
//! depends on its own work until a collective it waited for, and from there on that of the rank which came
//! last.

mod clock;
mod meetings;
pub mod merge;
mod path;
mod steps;
mod stragglers;

#[cfg(test)]
mod sample;

pub use clock::{ClockSource, Clocks, RankClock, align};
pub use meetings::{Arrival, Meeting, Meetings, WaitSource, meet};
pub use path::{CriticalPath, PathSource, RankShare, Segment, StepPath, critical_path};
pub use stragglers::{RankWaits, StepWaits, Stragglers, stragglers};

use crate::timeline::Timeline;

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
/// Traces of one rank, or without collectives, give an answer without waits and with a path that stays on
/// the rank whose step ended last.
pub fn across_ranks(timelines: &[Timeline]) -> AcrossRanks {
    let clocks = align(timelines);
    let meetings = meet(timelines, &clocks);
    let stragglers = stragglers(&meetings, &clocks);
    let path = critical_path(timelines, &meetings, &clocks);
    let mut ranks: Vec<usize> = clocks.ranks.iter().map(|clock| clock.rank).collect();
    ranks.sort_unstable();
    let world = timelines.iter().filter_map(|timeline| timeline.world_size).max().unwrap_or(0);
    // A file may claim any number of ranks; nobody reads a list of a million missing ones.
    let missing = (0..world.min(1 << 16)).filter(|rank| ranks.binary_search(rank).is_err());
    AcrossRanks { missing: missing.collect(), ranks, clocks, stragglers, path }
}

/// The rank of the timeline at a place in the list.
fn rank_of(timelines: &[Timeline], place: usize) -> usize {
    timelines[place].rank.unwrap_or(place)
}
