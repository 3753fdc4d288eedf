//! The critical path of each step across ranks.
//!
//! Input: timelines, their clocks and their matched collectives. Output: the segments of the critical path. The
//! path is followed backward. It starts at the end of the rank whose step ended last, goes through that rank's work
//! to the last collective that it waited for, from there to the rank that arrived last at this collective,
//! and so on to the start of the step.

mod activity;
mod follow;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::clock::Clocks;
use super::matched::MatchedCollectives;
use crate::hta::{Chosen, Step};
use crate::timeline::{TimeRange, Timeline};
use activity::Activity;
use follow::Follower;

/// The events that show when a rank computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathSource {
    /// Kernels, copies and sets of the device.
    #[default]
    Kernels,
    /// Operators of all threads that contain no other operators, because the trace has no kernels.
    Operators,
    /// Annotations that contain no other annotations, because the trace has neither kernels nor operators.
    Annotations,
}

/// A part of the critical path on one rank. Times are nanoseconds of the reference clock.
///
/// The segments of a step follow each other without gaps, so they are together as long as the path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The rank.
    pub rank: usize,
    /// For a collective, its name. Otherwise the annotation in which the segment lies; without one, the
    /// kernel or operator that took most of it; without these, `host`.
    pub what: String,
    /// For a collective, its number in the sequence of its group, if the trace gives it.
    pub seq: Option<u64>,
    /// When it begins.
    pub start_ns: i64,
    /// Its duration.
    pub dur_ns: i64,
    /// The part of it during which the rank computed.
    pub compute_ns: i64,
    /// The part of it during which a collective moved data, with all ranks present.
    pub transfer_ns: i64,
    /// The part of the transfer during which the rank computed as well.
    pub hidden_ns: i64,
    /// For a transfer, whether the message is so small that latency decides how long it takes.
    pub is_small: bool,
}

impl Segment {
    /// The part of it, in nanoseconds, during which the rank neither computed nor moved data: its host
    /// prepared work, loaded data or slept.
    pub fn host_ns(&self) -> i64 {
        self.dur_ns - self.compute_ns - self.transfer_ns
    }
}

/// The critical path of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPath {
    /// The step's number, as in `ProfilerStep#N`; `None` for a trace without steps, which counts as one step.
    pub step: Option<u64>,
    /// From the start of the step, on the rank where the path begins, to its end.
    pub segments: Vec<Segment>,
    /// For each rank, the gain of the step if this rank arrived at the collectives on the path, and at
    /// the end of the step, together with the rank before it. In nanoseconds.
    pub gain_ns: BTreeMap<usize, i64>,
}

impl StepPath {
    /// The length of the path, in nanoseconds.
    pub fn len_ns(&self) -> i64 {
        add_up(self.segments.iter().map(|segment| segment.dur_ns))
    }
}

/// A rank's part of the critical paths of all steps. Times are nanoseconds, added up over steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankShare {
    /// The rank.
    pub rank: usize,
    /// Its computation on the path.
    pub compute_ns: i64,
    /// Its time on the path that was spent neither computing nor in collectives.
    pub host_ns: i64,
    /// Transfers on this rank through which the path goes. All ranks of the collective take part in a
    /// transfer.
    pub transfer_ns: i64,
    /// Its computation and host time as a fraction of the paths of all steps, 0 to 1.
    pub share: f64,
    /// The gain of the steps if, wherever the path depends on this rank, it were no later than the next rank. This is an upper
    /// bound, because something else may then take as long.
    pub gain_ns: i64,
    /// Its computation and host time by [`Segment::what`], longest first.
    pub parts: Vec<(String, i64)>,
}

/// The critical path across ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CriticalPath {
    /// The events that show when ranks computed.
    pub source: PathSource,
    /// The steps, in order of their numbers.
    pub steps: Vec<StepPath>,
    /// All ranks, the largest share first.
    pub ranks: Vec<RankShare>,
    /// The transfers by name, longest first. All ranks of a collective take part in its transfer.
    pub transfers: Vec<Transfer>,
}

/// The transfers of one name on the critical paths of all steps. Times are nanoseconds, added up over steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// The name of the collective, marked if the messages are small.
    pub what: String,
    /// Whether the messages are so small that latency decides how long they take.
    pub is_small: bool,
    /// How many times the path goes through such a transfer.
    pub count: u64,
    /// How long data moved.
    pub time_ns: i64,
    /// The part of it in which the rank of the path computed as well.
    pub hidden_ns: i64,
}

impl CriticalPath {
    /// The length of the paths of all steps, in nanoseconds.
    pub fn len_ns(&self) -> i64 {
        add_up(self.steps.iter().map(StepPath::len_ns))
    }

    /// The part of it that is transfer, in nanoseconds.
    pub fn transfer_ns(&self) -> i64 {
        add_up(self.ranks.iter().map(|rank| rank.transfer_ns))
    }

    /// The part of the transfer in which the rank of the path did not compute, in nanoseconds.
    pub fn exposed_ns(&self) -> i64 {
        add_up(self.transfers.iter().map(|of| of.time_ns - of.hidden_ns))
    }
}

/// A sum that saturates instead of overflowing, because a file can contain any times.
fn add_up(times: impl IntoIterator<Item = i64>) -> i64 {
    times.into_iter().fold(0, i64::saturating_add)
}

/// Follows the critical path of each chosen step, or of the whole trace if it names no steps.
pub(super) fn critical_path(
    timelines: &[Timeline],
    chosen: &[Chosen],
    collectives: &MatchedCollectives,
    clocks: &Clocks,
) -> CriticalPath {
    let source = source(timelines);
    let activities: Vec<Activity> = timelines
        .iter()
        .zip(&clocks.ranks)
        .map(|(timeline, clock)| Activity::of(timeline, clock, source))
        .collect();
    let follower = Follower::new(&activities, collectives, clocks);
    let steps: Vec<StepPath> = windows(chosen, &activities, clocks)
        .into_iter()
        .map(|(step, windows)| follower.step(step, &windows))
        .filter(|step| !step.segments.is_empty())
        .collect();
    let (ranks, transfers) = (shares(&steps, clocks), transfers(&steps));
    CriticalPath { source, steps, ranks, transfers }
}

/// The transfers of all steps by name. Small messages, such as the sums of a synchronized batch norm, count by
/// themselves, since other changes make them shorter.
fn transfers(steps: &[StepPath]) -> Vec<Transfer> {
    let mut transfers: BTreeMap<(&str, bool), Transfer> = BTreeMap::new();
    let segments = steps.iter().flat_map(|step| &step.segments);
    for segment in segments.filter(|segment| segment.transfer_ns > 0) {
        let of = transfers.entry((&segment.what, segment.is_small)).or_default();
        of.count += 1;
        of.time_ns = add_up([of.time_ns, segment.transfer_ns]);
        of.hidden_ns = add_up([of.hidden_ns, segment.hidden_ns]);
    }
    let named = |((what, is_small), of): ((&str, bool), Transfer)| {
        let small = if is_small { " of small messages" } else { "" };
        Transfer { what: format!("{what}{small}"), is_small, ..of }
    };
    let mut transfers: Vec<Transfer> = transfers.into_iter().map(named).collect();
    transfers.sort_by_key(|of| Reverse(of.time_ns));
    transfers
}

fn source(timelines: &[Timeline]) -> PathSource {
    if timelines.iter().any(|timeline| !timeline.kernels.is_empty()) {
        PathSource::Kernels
    } else if timelines.iter().any(|timeline| !timeline.operators.is_empty()) {
        PathSource::Operators
    } else {
        PathSource::Annotations
    }
}

/// For each timeline, when the step began and ended, on the reference clock.
type Windows = Vec<Option<(i64, i64)>>;

fn windows(
    chosen: &[Chosen],
    activities: &[Activity],
    clocks: &Clocks,
) -> Vec<(Option<u64>, Windows)> {
    // If two steps have the same number, the first one counts. A step ends when the next one begins, at the latest: the paths of
    // a damaged trace, each of whose steps lasts until its end, would be as long as it has pairs of steps.
    let times = |chosen: &Chosen| -> HashMap<u64, TimeRange> {
        let (mut start_ns, mut until_ns) = (i64::MAX, i64::MAX);
        let steps = chosen.steps.iter().rev().map(|Step { number, time }| {
            if time.start_ns < start_ns {
                (start_ns, until_ns) = (time.start_ns, start_ns);
            }
            let dur_ns = time.dur_ns.min(until_ns.saturating_sub(start_ns));
            (*number, TimeRange { dur_ns, ..*time })
        });
        steps.collect()
    };
    let steps: Vec<HashMap<u64, TimeRange>> = chosen.iter().map(times).collect();
    let mut numbers: Vec<u64> = steps.iter().flat_map(HashMap::keys).copied().collect();
    numbers.sort_unstable();
    numbers.dedup();
    if numbers.is_empty() {
        return vec![(None, activities.iter().map(Activity::extent).collect())];
    }
    let window = |number: u64, place: usize| {
        let (time, clock) = (steps[place].get(&number)?, &clocks.ranks[place]);
        let begin_ns = clock.align(time.start_ns);
        Some((begin_ns, clock.align(time.end_ns()).max(begin_ns)))
    };
    let of_step = |number| (0..chosen.len()).map(|place| window(number, place)).collect();
    numbers.into_iter().map(|number| (Some(number), of_step(number))).collect()
}

fn shares(steps: &[StepPath], clocks: &Clocks) -> Vec<RankShare> {
    let empty = |rank| (rank, RankShare { rank, ..RankShare::default() });
    let mut shares: BTreeMap<usize, RankShare> =
        clocks.ranks.iter().map(|clock| empty(clock.rank)).collect();
    let mut parts: BTreeMap<(usize, &str), i64> = BTreeMap::new();
    let mut len_ns = 0;
    for step in steps {
        len_ns = add_up([len_ns, step.len_ns()]);
        for segment in &step.segments {
            let share = shares.entry(segment.rank).or_default();
            share.compute_ns = add_up([share.compute_ns, segment.compute_ns]);
            share.host_ns = add_up([share.host_ns, segment.host_ns()]);
            share.transfer_ns = add_up([share.transfer_ns, segment.transfer_ns]);
            let part = parts.entry((segment.rank, &segment.what)).or_default();
            *part = add_up([*part, segment.dur_ns - segment.transfer_ns]);
        }
        for (rank, gain_ns) in &step.gain_ns {
            let share = shares.entry(*rank).or_default();
            share.gain_ns = add_up([share.gain_ns, *gain_ns]);
        }
    }
    for ((rank, what), ns) in parts.into_iter().filter(|&(_, ns)| ns > 0) {
        shares.entry(rank).or_default().parts.push((what.to_owned(), ns));
    }
    let mut shares: Vec<RankShare> = shares.into_values().collect();
    for share in &mut shares {
        share.share = add_up([share.compute_ns, share.host_ns]) as f64 / len_ns.max(1) as f64;
        share.parts.sort_by_key(|&(_, ns)| Reverse(ns));
    }
    shares.sort_by_key(|share| (Reverse(add_up([share.compute_ns, share.host_ns])), share.rank));
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, across, timeline};

    /// The fields of the segments of a step, with times in microseconds: rank, what, start, duration,
    /// computation, transfer.
    fn parts(step: &StepPath) -> Vec<(usize, &str, i64, i64, i64, i64)> {
        let us = |ns: i64| ns / 1000;
        let parts = step.segments.iter().map(|s| {
            let (start, dur) = (us(s.start_ns), us(s.dur_ns));
            (s.rank, s.what.as_str(), start, dur, us(s.compute_ns), us(s.transfer_ns))
        });
        parts.collect()
    }

    /// A rank that computes until `ready_us`, waits for an all-reduce that ends at 80, and runs the optimizer
    /// until `end_us`.
    fn blocking(rank: usize, ready_us: i64, end_us: i64) -> Timeline {
        timeline(rank)
            .step(3, 0, end_us)
            .span("backward", 2, ready_us)
            .span("optimizer", 80, end_us)
            .compute("conv", 5, ready_us)
            .all_reduce(0, ready_us, 80)
            .compute("adam", 82, end_us)
    }

    #[test]
    fn the_path_goes_to_the_rank_that_came_last_and_back() {
        let path = across(&[blocking(0, 40, 100), blocking(1, 70, 95)]).path;
        assert_eq!(path.source, PathSource::Kernels);
        let expected = [
            (1, "host", 0, 2, 0, 0),
            (1, "backward", 2, 68, 65, 0),
            (0, "all_reduce", 70, 10, 0, 10),
            (0, "optimizer", 80, 20, 18, 0),
        ];
        assert_eq!(parts(&path.steps[0]), expected);
        assert_eq!((path.len_ns(), path.transfer_ns()), (100_000, 10_000));
        // Rank 0 was 5 us later at the end of the step, rank 1 was 30 us later at the all-reduce.
        assert_eq!(path.steps[0].gain_ns, BTreeMap::from([(0, 5_000), (1, 30_000)]));
        let [first, second] = &path.ranks[..] else { panic!() };
        assert_eq!((first.rank, first.share, first.gain_ns), (1, 0.7, 30_000));
        assert_eq!((second.rank, second.share, second.transfer_ns), (0, 0.2, 10_000));
        assert_eq!(first.parts, [("backward".to_owned(), 68_000), ("host".to_owned(), 2_000)]);
        let headline = path.headline().unwrap();
        let expected = "Rank 1 holds 70 % of the critical path, 97 % of it in backward; were it no later \
                        than the next rank, the steps would take up to 30.0 % less (0.03 ms per step).";
        assert_eq!(headline, expected);
    }

    #[test]
    fn advice_names_the_rank_that_costs_most_not_the_one_with_the_largest_share() {
        // Rank 1 comes 25 us late to the only collective, and rank 0 works longer after it.
        let rank = |rank: usize, ready_us: i64, end_us: i64| {
            timeline(rank)
                .step(3, 0, end_us)
                .compute("conv", 0, ready_us)
                .all_reduce(0, ready_us, 46)
                .compute("adam", 46, end_us)
        };
        let path = across(&[rank(0, 20, 100), rank(1, 45, 99)]).path;
        assert_eq!((path.ranks[0].rank, path.ranks[0].gain_ns), (0, 1_000));
        assert_eq!((path.ranks[1].rank, path.ranks[1].gain_ns), (1, 25_000));
        let headline = path.headline().unwrap();
        assert!(headline.starts_with("Rank 1 holds 45 % of the critical path"), "{headline}");
        assert!(headline.ends_with("up to 25.0 % less (0.03 ms per step)."), "{headline}");
        let path = across(&[rank(0, 45, 99), rank(1, 45, 99)]).path;
        assert!(path.headline().unwrap().starts_with("No rank holds up the others"));
    }

    #[test]
    fn a_step_ends_when_the_next_one_begins() {
        let rank = |rank: usize| {
            let steps = timeline(rank).step(1, 0, 100).step(2, 40, 100).step(3, 100, 120);
            steps.compute("conv", 0, 100).compute("conv", 100, 120)
        };
        let path = across(&[rank(0), rank(1)]).path;
        let lengths: Vec<i64> = path.steps.iter().map(StepPath::len_ns).collect();
        assert_eq!(lengths, [40_000, 60_000]);
    }

    #[test]
    fn clocks_apart_do_not_change_the_path() {
        let apart = [blocking(0, 40, 100), blocking(1, 70, 95).by_clock(7_000, 0)];
        let path = across(&apart).path;
        assert_eq!(path, across(&[blocking(0, 40, 100), blocking(1, 70, 95)]).path);
    }

    #[test]
    fn a_collective_behind_computation_is_not_on_the_path() {
        let rank = |rank: usize, late_us: i64| {
            let end_us = 90 + late_us;
            timeline(rank).step(0, 0, end_us).compute("conv", 0, end_us).all_reduce(0, 20, 40)
        };
        let path = across(&[rank(0, 0), rank(1, 10)]).path;
        assert_eq!(parts(&path.steps[0]), [(1, "conv", 0, 100, 100, 0)]);
        assert_eq!(path.headline().unwrap().split(" holds").next(), Some("Rank 1"));
    }

    #[test]
    fn a_collective_that_was_queued_leads_to_the_one_before_it() {
        // Two buckets. The second is ready early and waits in the queue for the first, which rank 1 delayed.
        let rank = |rank: usize, first_us: i64| {
            let timeline = timeline(rank).step(0, 0, 200).compute("conv", 0, 60);
            timeline.all_reduce(0, first_us, 100).all_reduce(1, 101, 180).compute("adam", 181, 200)
        };
        let path = across(&[rank(0, 20), rank(1, 50)]).path;
        let expected = [
            (1, "conv", 0, 50, 50, 0),
            (1, "all_reduce", 50, 50, 0, 50),
            (1, "host", 100, 1, 0, 0),
            (1, "all_reduce", 101, 79, 0, 79),
            (1, "adam", 180, 20, 19, 0),
        ];
        assert_eq!(parts(&path.steps[0]), expected);
        assert_eq!(path.steps[0].gain_ns, BTreeMap::from([(1, 30_000)]));
    }

    #[test]
    fn traces_without_kernels_are_followed_by_operators() {
        let rank = |rank: usize, ready_us: i64| {
            timeline(rank)
                .step(0, 0, 100)
                .operator("DistributedDataParallel.forward", 0, ready_us)
                .operator("aten::addmm", 10, ready_us)
                .operator("c10d::allreduce_", ready_us, ready_us + 2)
                .span("gloo:all_reduce", ready_us + 2, 90)
                .operator("aten::add_", 92, 100)
        };
        let path = across(&[rank(0, 30), rank(1, 60)]).path;
        assert_eq!(path.source, PathSource::Operators);
        // The operator that calls the collective is not computation. The operator around others is, while no other one runs.
        let expected = [
            (1, "aten::addmm", 0, 62, 60, 0),
            (1, "gloo:all_reduce", 62, 28, 0, 28),
            (1, "aten::add_", 90, 10, 8, 0),
        ];
        assert_eq!(parts(&path.steps[0]), expected);
    }

    #[test]
    fn one_rank_has_a_path_and_no_headline() {
        let path = across(&[blocking(0, 40, 100)]).path;
        assert_eq!(path.len_ns(), 100_000);
        assert_eq!(path.headline(), None);
        assert_eq!(across(&[]).path.headline(), None);
        assert_eq!(across(&[timeline(0), timeline(1)]).path, {
            let ranks = [0, 1].map(|rank| RankShare { rank, ..RankShare::default() }).to_vec();
            CriticalPath { source: PathSource::Annotations, ranks, ..CriticalPath::default() }
        });
    }

    #[test]
    fn wild_times_end_in_numbers() {
        let wild = [i64::MIN, -1, 0, 1, 1 << 61, i64::MAX];
        let rank = |rank: usize, says: i64| {
            let mut timeline = blocking(rank, 40, 100);
            let times = wild.iter().flat_map(|&start_ns| {
                [0, 7, i64::MAX].map(|dur_ns| TimeRange { start_ns, dur_ns })
            });
            for (seq, time) in times.enumerate() {
                timeline = timeline.compute("conv", 0, 1).all_reduce(seq as u64 + 1, 0, 1);
                timeline = timeline.step(seq as u64 + 10, 0, 1).span("forward", 0, 1);
                let last = timeline.kernels.len() - 2;
                timeline.kernels[last..].iter_mut().for_each(|kernel| kernel.time = time);
                let last = timeline.annotations.len() - 2;
                timeline.annotations[last..].iter_mut().for_each(|a| a.time = time);
            }
            for (key, value) in [("begin", says), ("end", says.wrapping_neg()), ("error", says)] {
                timeline.run_facts.insert(format!("clock_offset_{key}_ns"), value.to_string());
            }
            timeline
        };
        for says in wild {
            for base_ns in [None, Some(i64::MIN), Some(i64::MAX)] {
                let mut timelines = [rank(0, 0), rank(1, says)];
                timelines[1].base_ns = base_ns;
                timelines[0].base_ns = base_ns.map(|_| 5);
                assert!(across(&timelines).path.len_ns() >= 0);
                timelines[0].run_facts.clear();
                assert!(across(&timelines).path.len_ns() >= 0);
            }
        }
    }

    #[test]
    fn a_trace_without_steps_is_one_step() {
        let rank = |rank: usize, ready_us: i64| {
            timeline(rank)
                .compute("conv", 0, ready_us)
                .all_reduce(0, ready_us, 80)
                .compute("x", 80, 90)
        };
        let path = across(&[rank(0, 10), rank(1, 20)]).path;
        assert_eq!((path.steps.len(), path.steps[0].step), (1, None));
        assert_eq!(path.len_ns(), 90_000);
        assert_eq!((path.ranks[0].rank, path.ranks[0].gain_ns), (1, 10_000));
    }
}
