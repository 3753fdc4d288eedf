//! Follows the critical path of a step from its end to its start.
//!
//! Input: the activity of each rank, and the collectives. Output: a [`StepPath`].

use std::collections::{BTreeMap, HashSet};

use super::activity::Activity;
use super::{Segment, StepPath};
use crate::ranks::clock::Clocks;
use crate::ranks::matched::{Arrival, MatchedCollective, MatchedCollectives};

/// A collective that begins this soon after the previous one ended is assumed to have waited for it in the
/// queue, unless the trace says that it was not queued. Kernels that wait for each other begin within a few
/// microseconds.
const BACK_TO_BACK_NS: i64 = 5_000;

/// A rank waited for a collective if it did not compute during this time before the collective ended. Kernels
/// that follow each other leave shorter gaps.
const IDLE_NS: i64 = 10_000;

/// Ranks that arrive within this time of each other arrive together. The path then stays on the same rank.
const TOGETHER_NS: i64 = 1_000;

/// A message of so few elements, 16 KiB of `f32`, takes as long as the latency on most networks.
const SMALL_ELEMS: u64 = 4096;

/// A collective as one rank saw it: the index of the collective, and of this rank's arrival in it.
#[derive(Clone, Copy)]
struct Visit {
    end_ns: i64,
    collective: usize,
    arrival: usize,
}

pub(super) struct Follower<'a> {
    activities: &'a [Activity<'a>],
    collectives: &'a MatchedCollectives,
    clocks: &'a Clocks,
    /// The collectives of each timeline, in order of their ends.
    visits: Vec<Vec<Visit>>,
}

impl<'a> Follower<'a> {
    pub(super) fn new(
        activities: &'a [Activity<'a>],
        collectives: &'a MatchedCollectives,
        clocks: &'a Clocks,
    ) -> Self {
        let mut visits: Vec<Vec<Visit>> = activities.iter().map(|_| Vec::new()).collect();
        for (number, collective) in collectives.all.iter().enumerate() {
            for (i, arrival) in collective.arrivals.iter().enumerate() {
                let visit = Visit { end_ns: arrival.end_ns, collective: number, arrival: i };
                visits[arrival.place].push(visit);
            }
        }
        visits.iter_mut().for_each(|visits| visits.sort_by_key(|visit| visit.end_ns));
        Self { activities, collectives, clocks, visits }
    }

    /// The path of a step, given its start and end on each timeline.
    pub(super) fn step(&self, step: Option<u64>, windows: &[Option<(i64, i64)>]) -> StepPath {
        let mut path = StepPath { step, ..StepPath::default() };
        let mut ends: Vec<(i64, usize)> = windows
            .iter()
            .enumerate()
            .filter_map(|(place, window)| Some(((*window)?.1, place)))
            .collect();
        ends.sort_unstable();
        let Some(&(end_ns, mut place)) = ends.last() else { return path };
        let first_ns = windows.iter().flatten().map(|window| window.0).min().unwrap_or(end_ns);
        if let [.., (before_ns, _), (end_ns, last)] = ends[..] {
            gain(&mut path.gain_ns, self.rank(last), end_ns - before_ns);
        }
        let mut at_ns = end_ns;
        // The arrival at which the path goes on; `None` at the end of the step.
        let mut from: Option<&Arrival> = None;
        let mut seen = HashSet::new();
        loop {
            let begin_ns = windows[place].map_or(first_ns, |window| window.0).min(at_ns);
            let Some(visit) = self.waited_for(place, begin_ns, at_ns, from, &seen) else {
                self.work(&mut path.segments, place, begin_ns, at_ns);
                break;
            };
            seen.insert(visit.collective);
            self.work(&mut path.segments, place, visit.end_ns, at_ns);
            let collective = &self.collectives.all[visit.collective];
            let (own, last) = (&collective.arrivals[visit.arrival], collective.last());
            gain(&mut path.gain_ns, last.rank, collective.lead_ns());
            let is_last = own.wait_ns - last.wait_ns <= TOGETHER_NS;
            // The wait of the last rank itself is the time that it needs to see that all ranks have arrived.
            let (last, wait_ns) = if is_last { (own, 0) } else { (last, own.wait_ns) };
            let came_ns = (own.start_ns + wait_ns).clamp(begin_ns, visit.end_ns);
            self.transfer(&mut path.segments, place, collective, came_ns, visit.end_ns);
            (place, at_ns, from) = (last.place, came_ns, Some(last));
        }
        path.segments.reverse();
        self.limit_gains(&mut path);
        path
    }

    fn rank(&self, place: usize) -> usize {
        self.clocks.ranks[place].rank
    }

    /// The last collective before `at_ns` in this step that the rank waited for.
    fn waited_for(
        &self,
        place: usize,
        begin_ns: i64,
        at_ns: i64,
        from: Option<&Arrival>,
        seen: &HashSet<usize>,
    ) -> Option<Visit> {
        let visits = &self.visits[place];
        let before = &visits[..visits.partition_point(|visit| visit.end_ns <= at_ns)];
        let within = before.iter().rev().take_while(|visit| visit.end_ns > begin_ns);
        let waited = |visit: &&Visit| {
            if seen.contains(&visit.collective) {
                return false;
            }
            let own = &self.collectives.all[visit.collective].arrivals[visit.arrival];
            let was_queued = from.is_some_and(|from| {
                from.queue_ns != Some(0) && at_ns - visit.end_ns <= BACK_TO_BACK_NS
            });
            let idle_ns = IDLE_NS.min((own.end_ns - own.start_ns) / 2).max(1);
            let activity = &self.activities[place];
            was_queued || activity.compute_ns(visit.end_ns - idle_ns, visit.end_ns) == 0
        };
        within.copied().find(|visit| waited(&visit))
    }

    /// Adds the work of a rank between two times, the last piece first.
    fn work(&self, segments: &mut Vec<Segment>, place: usize, start_ns: i64, end_ns: i64) {
        for piece in self.activities[place].pieces(start_ns, end_ns).into_iter().rev() {
            segments.push(Segment {
                rank: self.rank(place),
                what: piece.what.to_owned(),
                start_ns: piece.start_ns,
                dur_ns: piece.end_ns - piece.start_ns,
                compute_ns: piece.compute_ns,
                ..Segment::default()
            });
        }
    }

    fn transfer(
        &self,
        segments: &mut Vec<Segment>,
        place: usize,
        collective: &MatchedCollective,
        start_ns: i64,
        end_ns: i64,
    ) {
        if end_ns > start_ns {
            segments.push(Segment {
                rank: self.rank(place),
                what: collective.name.clone(),
                seq: collective.seq,
                start_ns,
                dur_ns: end_ns - start_ns,
                transfer_ns: end_ns - start_ns,
                hidden_ns: self.activities[place].compute_ns(start_ns, end_ns),
                is_small: collective.num_elems.is_some_and(|elems| elems <= SMALL_ELEMS),
                ..Segment::default()
            });
        }
    }

    /// A rank cannot save more than its own work on the path.
    fn limit_gains(&self, path: &mut StepPath) {
        let mut own: BTreeMap<usize, i64> = BTreeMap::new();
        for segment in &path.segments {
            *own.entry(segment.rank).or_default() += segment.dur_ns - segment.transfer_ns;
        }
        for (rank, gain_ns) in &mut path.gain_ns {
            *gain_ns = (*gain_ns).min(own.get(rank).copied().unwrap_or(0));
        }
        path.gain_ns.retain(|_, gain_ns| *gain_ns > 0);
    }
}

fn gain(gains: &mut BTreeMap<usize, i64>, rank: usize, ns: i64) {
    *gains.entry(rank).or_default() += ns.max(0);
}
