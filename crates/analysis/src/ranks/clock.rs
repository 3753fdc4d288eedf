//! Aligns the clocks of all ranks.
//!
//! Input: timelines, each on its own clock. Output: the offset of each clock to the clock of the reference
//! rank. If the ranks measured the offset while they ran, it is taken from the trace (`measure_clock` of
//! `paceline-collectives` measures it by exchanging messages). Otherwise it is estimated from the ends of
//! collectives.

use std::collections::HashMap;

use super::matched::{self, Key};
use crate::stats::median;
use crate::timeline::Timeline;

/// The number of collectives from which a drift can be distinguished from chance.
const MIN_FOR_DRIFT: usize = 12;

/// The limit of the result of [`RankClock::align`]. The time of day, in nanoseconds since 1970, is within it.
const FARTHEST_NS: i64 = 1 << 61;

/// Where the offset of a clock comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockSource {
    /// This is the reference clock. All others are aligned to it.
    #[default]
    Reference,
    /// The ranks exchanged messages at the beginning and the end of the profile, and the trace gives the
    /// result (`clock_offset_begin_ns`, `clock_offset_end_ns`, `clock_offset_error_ns`).
    Measured,
    /// Estimated from collectives, which end on all ranks at about the same time.
    Estimated {
        /// The number of collectives used for the estimate.
        num_collectives: usize,
    },
    /// Times are left as written. No offset was measured, and the collectives give no offset: either the ranks
    /// have no collective in common, or the offset is not larger than its spread.
    AsWritten,
}

/// The correction of a rank's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankClock {
    /// The rank whose clock this is.
    pub rank: usize,
    /// Where the offset comes from.
    pub source: ClockSource,
    /// Add this and [`RankClock::base_ns`] to a time on this rank's clock at [`RankClock::begin_ns`] to get
    /// the time on the reference rank's clock. In nanoseconds.
    pub offset_begin_ns: i64,
    /// The same at [`RankClock::end_ns`]. Between and beyond these two times, the offset follows a straight
    /// line.
    pub offset_end_ns: i64,
    /// A time of this trace, in nanoseconds on its own clock.
    pub begin_ns: i64,
    /// A later time of this trace, in nanoseconds on its own clock.
    pub end_ns: i64,
    /// How wrong the offset may be, in nanoseconds. Measured: an upper bound, half the round trip of a
    /// message. Estimated: the median distance of single collectives from the estimate. As written: the same
    /// spread around the offset that was not larger than it, or `None` without collectives.
    pub error_ns: Option<u64>,
    /// How much later the zero of this trace's clock is than the zero of the reference trace's clock, in
    /// nanoseconds, according to the traces. 0 if the offset was measured: a measured offset holds between
    /// the clocks themselves.
    pub base_ns: i64,
}

impl RankClock {
    /// Converts a time of this trace to the clock of the reference rank's trace, in nanoseconds. The result
    /// is limited to 70 years on both sides of zero, so that differences of two results cannot overflow.
    pub fn align(&self, at_ns: i64) -> i64 {
        let aligned_ns = at_ns.saturating_add(self.base_ns).saturating_add(self.offset_ns(at_ns));
        aligned_ns.clamp(-FARTHEST_NS, FARTHEST_NS)
    }

    /// The offset to add to this rank's clock at a time of this trace, in nanoseconds, without
    /// [`RankClock::base_ns`].
    pub fn offset_ns(&self, at_ns: i64) -> i64 {
        let drift = i128::from(self.offset_end_ns) - i128::from(self.offset_begin_ns);
        let whole = i128::from(self.end_ns) - i128::from(self.begin_ns);
        if drift == 0 || whole <= 0 {
            return self.offset_begin_ns;
        }
        let part = i128::from(at_ns) - i128::from(self.begin_ns);
        let offset =
            i128::from(self.offset_begin_ns).saturating_add(drift.saturating_mul(part) / whole);
        offset.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }
}

/// The corrections of the clocks of all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clocks {
    /// The rank to whose clock all times are aligned: the lowest rank that has a trace.
    pub reference: usize,
    /// One for each timeline, in the order of the timelines.
    pub ranks: Vec<RankClock>,
}

impl Clocks {
    /// The largest error of any clock, in nanoseconds; `None` if the error of one of them is unknown.
    pub fn error_ns(&self) -> Option<u64> {
        self.ranks
            .iter()
            .map(|clock| clock.error_ns)
            .try_fold(0, |max, error| Some(max.max(error?)))
    }
}

/// Aligns the clocks of all timelines to the clock of the lowest rank.
///
/// Measured offsets are used if all traces have them. They are relative to rank 0, whether or not there is a
/// trace of it. Otherwise, the offset is the median difference between the ends of the collectives that a
/// rank and the reference have in common. With 12 collectives or more, it is a straight line through the
/// medians of their first and their last third. An offset that is not larger than the median distance of
/// collectives from it is ignored, and the times stay as they were written.
pub fn align(timelines: &[Timeline]) -> Clocks {
    let Some(first) = (0..timelines.len()).min_by_key(|&place| rank_of(timelines, place)) else {
        return Clocks::default();
    };
    let reference = &timelines[first];
    // The zeros of the clocks can be compared only if all traces give theirs.
    let has_bases = timelines.iter().all(|timeline| timeline.base_ns.is_some());
    let base_of = |timeline: &Timeline| timeline.base_ns.filter(|_| has_bases).unwrap_or(0);
    let all_measured = timelines.iter().all(|timeline| measured(timeline).is_some());
    let mut ends = None;
    let ranks = timelines.iter().enumerate().map(|(place, timeline)| {
        let (begin_ns, end_ns) = timeline.extent().unwrap_or_default();
        let rank = rank_of(timelines, place);
        let base_ns = base_of(timeline).saturating_sub(base_of(reference));
        let clock = RankClock { rank, begin_ns, end_ns, base_ns, ..RankClock::default() };
        if place == first {
            return RankClock { error_ns: Some(0), ..clock };
        }
        if all_measured && let (Some(own), Some(to)) = (measured(timeline), measured(reference)) {
            let [begin_ns, end_ns] = [0, 1].map(|at| own[at].saturating_sub(to[at]));
            let [own_error, to_error] = [own, to].map(|[.., error_ns]| error_ns.unsigned_abs());
            return RankClock {
                source: ClockSource::Measured,
                offset_begin_ns: begin_ns,
                offset_end_ns: end_ns,
                error_ns: Some(own_error.saturating_add(to_error)),
                // Measured between the clocks themselves, independent of their zeros.
                base_ns: 0,
                ..clock
            };
        }
        let ends = ends.get_or_insert_with(|| matched::ends(timelines));
        estimate(&ends[place], &ends[first], clock)
    });
    Clocks { reference: rank_of(timelines, first), ranks: ranks.collect() }
}

/// The clock offsets in a trace of paceline at its begin and at its end, and their error.
fn measured(timeline: &Timeline) -> Option<[i64; 3]> {
    let said = |key: &str| timeline.run_facts.get(&format!("clock_offset_{key}_ns"))?.parse().ok();
    Some([said("begin")?, said("end")?, said("error")?])
}

/// The rank of the timeline at an index of the list.
pub(super) fn rank_of(timelines: &[Timeline], place: usize) -> usize {
    timelines[place].rank.unwrap_or(place)
}

/// Estimates the offset with which collectives end at the same time.
fn estimate(own: &HashMap<Key, i64>, to: &HashMap<Key, i64>, clock: RankClock) -> RankClock {
    let differences = own.iter().filter_map(|(key, &end_ns)| {
        let there_ns = to.get(key)?;
        let aligned_ns = end_ns.saturating_add(clock.base_ns);
        Some((end_ns, there_ns.saturating_sub(aligned_ns).clamp(-FARTHEST_NS, FARTHEST_NS)))
    });
    let mut differences: Vec<(i64, i64)> = differences.collect();
    differences.sort_unstable();
    let num_collectives = differences.len();
    let unchanged = RankClock { source: ClockSource::AsWritten, ..clock };
    let point = |part: &[(i64, i64)]| {
        Some((median(part.iter().map(|d| d.0))?, median(part.iter().map(|d| d.1))?))
    };
    let part = if num_collectives < MIN_FOR_DRIFT { num_collectives } else { num_collectives / 3 };
    let (first, last) = (&differences[..part], &differences[num_collectives - part..]);
    let (Some(begin), Some(end)) = (point(first), point(last)) else { return unchanged };
    let found = RankClock {
        source: ClockSource::Estimated { num_collectives },
        offset_begin_ns: begin.1,
        offset_end_ns: end.1,
        begin_ns: begin.0,
        end_ns: end.0,
        ..clock
    };
    let distance =
        |&(at_ns, ns): &(i64, i64)| ns.abs_diff(found.offset_ns(at_ns)).min(i64::MAX as u64) as i64;
    let spread_ns = median(differences.iter().map(distance)).unwrap_or_default().unsigned_abs();
    let offset_ns = begin.1.unsigned_abs().max(end.1.unsigned_abs());
    if offset_ns <= spread_ns {
        return RankClock { error_ns: Some(spread_ns), ..unchanged };
    }
    RankClock { error_ns: Some(spread_ns), ..found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, timeline};
    use crate::timeline::Collective;

    /// Twenty all-reduces, one per millisecond, that end on all ranks at the same time.
    fn run(rank: usize) -> Timeline {
        let start_us = |seq: i64| 1000 * seq + 37 * rank as i64;
        (0..20).fold(timeline(rank), |timeline, seq| {
            timeline.all_reduce(seq as u64, start_us(seq), 1000 * seq + 500)
        })
    }

    fn says(mut timeline: Timeline, begin_ns: i64, end_ns: i64, error_ns: u64) -> Timeline {
        let run_facts = &mut timeline.run_facts;
        run_facts.insert("clock_offset_begin_ns".into(), begin_ns.to_string());
        run_facts.insert("clock_offset_end_ns".into(), end_ns.to_string());
        run_facts.insert("clock_offset_error_ns".into(), error_ns.to_string());
        timeline
    }

    /// The largest difference between the ends of all-reduces after alignment.
    fn apart_ns(timelines: &[Timeline], clocks: &Clocks) -> i64 {
        let ends = |place: usize| {
            let clock = &clocks.ranks[place];
            timelines[place].kernels.iter().map(|kernel| clock.align(kernel.time.end_ns()))
        };
        ends(0).zip(ends(1)).map(|(a, b)| (a - b).abs()).max().unwrap()
    }

    #[test]
    fn a_measured_offset_and_its_drift_are_taken_back() {
        // 3 s ahead and 100 ppm too fast; the trace begins at 37 us and ends at 19.5 ms.
        let ahead = run(1).by_clock(3_000_000, 100);
        let ahead = says(ahead, -3_000_000_003, -3_000_001_950, 4_000);
        let timelines = [says(run(0), 0, 0, 0), ahead];
        let clocks = align(&timelines);
        assert_eq!(clocks.ranks[0].source, ClockSource::Reference);
        assert_eq!(clocks.ranks[1].source, ClockSource::Measured);
        assert_eq!(clocks.error_ns(), Some(4_000));
        assert!(apart_ns(&timelines, &clocks) <= 2, "{}", apart_ns(&timelines, &clocks));
    }

    #[test]
    fn an_offset_that_nobody_measured_is_estimated_from_ends() {
        let timelines = [run(0), run(1).by_clock(-70_000, 200)];
        let clocks = align(&timelines);
        let ClockSource::Estimated { num_collectives: 20 } = clocks.ranks[1].source else {
            panic!("{:?}", clocks.ranks[1]);
        };
        assert!(apart_ns(&timelines, &clocks) <= 2, "{}", apart_ns(&timelines, &clocks));
        assert!(clocks.error_ns().unwrap() <= 2);
    }

    #[test]
    fn a_few_collectives_give_an_offset_without_drift() {
        let few = |timeline: Timeline| timeline.all_reduce(7, 10, 20).all_reduce(3, 0, 9);
        let timelines = [few(timeline(0)), few(timeline(1)).by_clock(50, 0)];
        let clocks = align(&timelines);
        assert_eq!(clocks.ranks[1].source, ClockSource::Estimated { num_collectives: 2 });
        assert_eq!(apart_ns(&timelines, &clocks), 0);
    }

    #[test]
    fn one_end_that_is_far_off_does_not_move_the_estimate() {
        let late = run(1).all_reduce(20, 20_000, 29_000).by_clock(-70_000, 0);
        let timelines = [run(0).all_reduce(20, 20_000, 20_500), late];
        assert_eq!(align(&timelines).ranks[1].offset_ns(0), 70_000_000);
    }

    #[test]
    fn an_offset_within_its_spread_is_none() {
        let rank = |rank: i64| {
            (0..11).fold(timeline(rank as usize), |timeline, seq| {
                timeline.all_reduce(
                    seq as u64,
                    1000 * seq,
                    1000 * seq + 500 + rank * (seq - 5) * 10,
                )
            })
        };
        let clocks = align(&[rank(0), rank(1)]);
        assert_eq!(clocks.ranks[1].source, ClockSource::AsWritten);
        assert_eq!((clocks.ranks[1].align(777), clocks.error_ns()), (777, Some(30_000)));
    }

    #[test]
    fn without_anything_in_common_times_stay_and_the_error_is_unknown() {
        let other = Collective { seq: Some(99), ..Collective::default() };
        let clocks = align(&[run(0), timeline(1).said(5, 6, other)]);
        assert_eq!(clocks.ranks[1].source, ClockSource::AsWritten);
        assert_eq!((clocks.ranks[1].align(777), clocks.error_ns()), (777, None));
        assert_eq!(align(&[]), Clocks::default());
    }

    #[test]
    fn zeros_of_clocks_count() {
        let based = |rank: usize, base_ns| Timeline { base_ns: Some(base_ns), ..run(rank) };
        let timelines = [based(1, 1_700_000_000_000_050_000), based(0, 1_700_000_000_000_000_000)];
        let clocks = align(&[timelines[0].clone(), timelines[1].clone()]);
        // The ends show that the second zero is 50 us too early, so the difference of the zeros is canceled.
        assert_eq!((clocks.reference, clocks.ranks[0].align(1000)), (0, 1000));
        let measured = timelines.map(|timeline| says(timeline, 0, 0, 9));
        // Measured offsets hold between the clocks themselves, so their zeros do not matter.
        assert_eq!(align(&measured).ranks[0].align(1000), 1000);
    }
}
