//! What the ranks' collectives tell together: how long each rank waited in each, and which rank came last.
//!
//! Input: the timelines of all ranks. Output: a [`Together`]; empty for a single trace.

use std::collections::{BTreeMap, HashMap};

use crate::ranks::{MatchedCollective, align, match_collectives};
use crate::timeline::Timeline;

/// The collectives of all ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Together {
    /// Waits in nanoseconds, by rank and by the start of the collective on the clock of its trace.
    waits: HashMap<(usize, i64), i64>,
    /// All collectives that two ranks have a trace of, in the order in which their last rank came.
    all: Vec<MatchedCollective>,
}

impl Together {
    pub(super) fn of(timelines: &[Timeline]) -> Self {
        if timelines.len() < 2 {
            return Self::default();
        }
        let clocks = align(timelines);
        let all = match_collectives(timelines, &clocks).all;
        let arrivals = all.iter().flat_map(|of| &of.arrivals);
        let aligned: HashMap<(usize, i64), i64> =
            arrivals.map(|of| ((of.place, of.start_ns), of.wait_ns)).collect();
        let mut waits = HashMap::new();
        for (place, (timeline, clock)) in timelines.iter().zip(&clocks.ranks).enumerate() {
            let rank = timeline.rank.unwrap_or(place);
            let kernels = timeline.kernels.iter().map(|of| (of.time, of.collective));
            let operators = timeline.operators.iter().map(|of| (of.time, of.collective));
            for (time, _) in kernels.chain(operators).filter(|(_, of)| of.is_some()) {
                if let Some(wait_ns) = aligned.get(&(place, clock.align(time.start_ns))) {
                    waits.insert((rank, time.start_ns), *wait_ns);
                }
            }
        }
        Self { waits, all }
    }

    /// How long a collective of a rank waited for the last rank.
    pub(super) fn wait_ns(&self, rank: usize, start_ns: i64) -> i64 {
        self.waits.get(&(rank, start_ns)).copied().unwrap_or(0)
    }

    /// The rank that came last most often, at how many of all collectives, and what steps would gain if it came no later than the
    /// next rank, in milliseconds per step.
    ///
    /// A rank that is late is late at every collective of a step, and the step is longer by the longest of these only. Hosts run
    /// ahead of their devices, so the steps of the collectives are told by their number.
    pub(super) fn last(&self, steps: usize) -> Option<(usize, usize, usize, f64)> {
        let mut times: BTreeMap<usize, usize> = BTreeMap::new();
        self.all.iter().for_each(|of| *times.entry(of.last().rank).or_default() += 1);
        let (rank, count) = times.into_iter().max_by_key(|(_, count)| *count)?;
        let of_step = self.all.len().div_ceil(steps.max(1));
        let lead = |of: &MatchedCollective| if of.last().rank == rank { of.lead_ns() } else { 0 };
        let leads = self.all.chunks(of_step).map(|step| step.iter().map(lead).max().unwrap_or(0));
        let gain_ms = leads.sum::<i64>() as f64 / 1e6 / steps.max(1) as f64;
        Some((rank, count, self.all.len(), gain_ms))
    }
}
