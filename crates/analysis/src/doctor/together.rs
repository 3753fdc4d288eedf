//! The waits of the ranks in their collectives: how long each rank waited in each, and which rank came last.
//!
//! Input: the timelines of all ranks. Output: a [`Together`]; empty for a single trace.

use std::collections::{BTreeMap, HashMap};

use crate::hta::Summary;
use crate::ranks::{Arrival, MatchedCollective, align, match_collectives};
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
            // Older versions describe no collective, so all work is looked at.
            let kernels = timeline.kernels.iter().map(|of| of.time.start_ns);
            let starts = kernels.chain(timeline.operators.iter().map(|of| of.time.start_ns));
            for start_ns in starts {
                if let Some(wait_ns) = aligned.get(&(place, clock.align(start_ns))) {
                    waits.insert((rank, start_ns), *wait_ns);
                }
            }
        }
        Self { waits, all }
    }

    /// How long a collective of a rank waited for the last rank.
    pub(super) fn wait_ns(&self, rank: usize, start_ns: i64) -> i64 {
        self.waits.get(&(rank, start_ns)).copied().unwrap_or(0)
    }

    /// The group of ranks, of those that `group_of` makes, whose ranks came last most often. `steps` is the number of steps.
    ///
    /// A rank that is late is late at every collective of a step, and the step is longer by the longest of these only. Hosts run
    /// ahead of their devices, so the step of a collective follows from its number.
    pub(super) fn last<G: Ord + Copy>(
        &self,
        steps: usize,
        group_of: impl Fn(usize) -> G,
    ) -> Option<Late<G>> {
        let of_step = self.all.len().div_ceil(steps.max(1));
        // Ranks do not begin to record at the same moment, so the first step shows who began last.
        let met = if self.all.len() > of_step { of_step } else { 1 };
        let all = self.all.get(met..).unwrap_or_default();
        let mut times: BTreeMap<G, usize> = BTreeMap::new();
        for of in all {
            *times.entry(group_of(of.last().rank)).or_default() += 1;
        }
        let (group, times_last) = times.into_iter().max_by_key(|(_, count)| *count)?;
        let lead_ms = |of: &MatchedCollective| {
            let is_last = group_of(of.last().rank) == group;
            let of_group = |it: &&Arrival| group_of(it.rank) == group;
            // The rank that waited least came last. Without others there is nothing to gain.
            let wait = |is_it: bool| {
                let arrivals = of.arrivals.iter().filter(|it| of_group(it) == is_it);
                arrivals.map(|it| it.wait_ns).min()
            };
            let (Some(own), Some(others)) = (wait(true), wait(false)) else { return 0.0 };
            let ms = (others - own) as f64 / 1e6;
            if is_last { ms.max(0.0) } else { ms.min(0.0) }
        };
        let steps_ms = all.chunks(of_step).map(|step| {
            let leads = step.iter().map(lead_ms);
            leads.fold(0.0f64, |most, of| if of.abs() > most.abs() { of } else { most })
        });
        Some(Late { group, times_last, all: all.len(), steps_ms: steps_ms.collect() })
    }
}

/// Ranks that came last more often than others.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Late<G> {
    /// The group of these ranks.
    pub(super) group: G,
    /// At how many collectives one of them came last, of how many.
    pub(super) times_last: usize,
    pub(super) all: usize,
    /// In each step, by how many milliseconds they came later than the others at the collective where that is most; negative if
    /// the others came later.
    pub(super) steps_ms: Vec<f64>,
}

impl<G> Late<G> {
    /// By how much they are late in the mean step, and the standard error of that; `None` if a single step is known.
    pub(super) fn mean_ms(&self) -> (f64, Option<f64>) {
        let of = Summary::of(self.steps_ms.clone()).unwrap_or_default();
        (of.mean, (of.count > 1).then(|| of.error()))
    }
}
