//! The traces of all ranks together: how far the clocks are apart, which rank made the others wait, and which
//! rank held up each step.
//!
//! Input: the timelines of the ranks. Output: [`AcrossRanks`]. This module reads no files and prints nothing.
//!
//! Collectives connect the ranks. A collective can move data once its last rank has arrived. The time until
//! then is waiting, the time after it is transfer. The critical path is followed backward from the end of a
//! step: through a rank's own work to a collective that it waited for, and from there through the work of the
//! rank that arrived last.

mod clock;
mod matched;
pub mod merge;
mod path;
mod pipeline;
mod stragglers;

pub use clock::{ClockSource, Clocks, RankClock, align};
pub use matched::{Arrival, MatchedCollective, MatchedCollectives, match_collectives};
pub use path::{CriticalPath, PathSource, RankShare, Segment, StepPath, Transfer};
pub use pipeline::{Messages, PipelineLedger, StepCourse};
pub use stragglers::{RankWaits, Stragglers, stragglers};

use crate::hta::{Chosen, Options};
use crate::timeline::Timeline;
use clock::rank_of;
use matched::match_chosen;
use path::critical_path;
use pipeline::pipeline;

/// The analysis of all ranks together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcrossRanks {
    /// The ranks that have a trace, ascending.
    pub ranks: Vec<usize>,
    /// The ranks of the run without a trace. They may have held up the others without being seen.
    pub missing: Vec<usize>,
    /// How the clocks of the ranks were aligned.
    pub clocks: Clocks,
    /// The ranks that came last to collectives and made the others wait.
    pub stragglers: Stragglers,
    /// The critical path of the steps.
    pub path: CriticalPath,
    /// The idle time of a pipeline of PyTorch.
    pub pipeline: Option<PipelineLedger>,
}

/// Analyzes the traces of all ranks together, in any order. A timeline that does not name its rank gets its
/// index in the list as rank.
///
/// The analysis covers the same steps and collectives as the analysis of each rank with the same options.
///
/// Traces of a single rank, or without collectives, give a result without waits. Its path stays on the rank
/// whose step ended last.
pub fn across_ranks(timelines: &[Timeline], options: &Options) -> AcrossRanks {
    let chosen: Vec<Chosen> =
        timelines.iter().map(|timeline| Chosen::of(timeline, options)).collect();
    let clocks = align(timelines);
    let collectives = match_chosen(timelines, &clocks, &chosen);
    let stragglers = stragglers(&collectives, &clocks);
    let path = critical_path(timelines, &chosen, &collectives, &clocks);
    let pipeline = pipeline(timelines, &clocks, &chosen, &collectives);
    let mut ranks: Vec<usize> = clocks.ranks.iter().map(|clock| clock.rank).collect();
    ranks.sort_unstable();
    let world = timelines.iter().filter_map(|timeline| timeline.world_size).max().unwrap_or(0);
    // A file may claim any number of ranks, and nobody reads a list of a million missing ones.
    let missing = (0..world.min(1 << 16)).filter(|rank| ranks.binary_search(rank).is_err());
    AcrossRanks { missing: missing.collect(), ranks, clocks, stragglers, path, pipeline }
}

/// The ranks whose trace ended before the newest trace began, or began after it ended. They are probably from
/// another run. Only traces that give the time of day can be compared in this way.
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
