//! One clock for all ranks.
//!
//! Timelines go in, each on its own clock. The offset of each clock to the reference rank's comes out. It is taken
//! from the trace where the ranks measured it while they ran (`measure_clock` of `paceline-collectives` exchanges
//! messages for that), and otherwise estimated from the ends of collectives.

use std::collections::HashMap;

use super::meetings::{self, Key};
use crate::stats::median;
use crate::timeline::Timeline;

/// How many collectives it takes to tell a drift from chance.
const MIN_FOR_DRIFT: usize = 12;

/// See [`RankClock::align`]. The time of day, counted since 1970, lies within.
const FARTHEST_NS: i64 = 1 << 61;

/// Where the offset of a clock comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockSource {
    /// It is the reference: all others are brought to it.
    #[default]
    Reference,
    /// The ranks exchanged messages at the beginning and the end of the profile, and the trace says what
    /// they found (`clock_offset_begin_ns`, `clock_offset_end_ns`, `clock_offset_error_ns`).
    Measured,
    /// From collectives, which end on all ranks at about the same time.
    Estimated {
        /// How many collectives the estimate rests on.
        num_collectives: usize,
    },
    /// The trace's own times: no offset was measured, and none can be told from collectives, because there
    /// are none in common or because the difference is smaller than its spread.
    AsWritten,
}

/// What to add to a rank's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankClock {
    /// Whose clock.
    pub rank: usize,
    /// Where the offset comes from.
    pub source: ClockSource,
    /// What to add to this rank's clock at [`RankClock::begin_ns`] to read the reference rank's, in
    /// nanoseconds, on top of [`RankClock::base_ns`].
    pub offset_begin_ns: i64,
    /// The same at [`RankClock::end_ns`]; on a straight line in between and beyond.
    pub offset_end_ns: i64,
    /// A moment of this trace, in its own nanoseconds.
    pub begin_ns: i64,
    /// A later moment of this trace, in its own nanoseconds.
    pub end_ns: i64,
    /// By how much the offset may be wrong, in nanoseconds. Measured: the bound that half the round trip of
    /// a message gives. Estimated: the median distance of single collectives from the estimate. As written:
    /// the larger of offset and spread that collectives show, or nothing without collectives.
    pub error_ns: Option<u64>,
    /// How much later the zero of this trace's clock is than that of the reference trace, as the traces say,
    /// in nanoseconds; 0 where an offset was measured, which lies between the clocks themselves.
    pub base_ns: i64,
}

impl RankClock {
    /// A moment of this trace on the clock of the reference rank's trace, in nanoseconds.
    /// The result is limited to 70 years on both sides of zero, so that no difference of two moments overflows.
    pub fn align(&self, at_ns: i64) -> i64 {
        let aligned_ns = at_ns.saturating_add(self.base_ns).saturating_add(self.offset_ns(at_ns));
        aligned_ns.clamp(-FARTHEST_NS, FARTHEST_NS)
    }

    /// What to add to this rank's clock at a moment of this trace, in nanoseconds.
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

/// How the clocks of all ranks were brought together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clocks {
    /// The rank whose clock all moments are on: the lowest there is a trace of.
    pub reference: usize,
    /// One for each timeline, in the order of the timelines.
    pub ranks: Vec<RankClock>,
}

impl Clocks {
    /// The largest error of any clock, in nanoseconds; `None` if nothing is known of one of them.
    pub fn error_ns(&self) -> Option<u64> {
        self.ranks
            .iter()
            .map(|clock| clock.error_ns)
            .try_fold(0, |max, error| Some(max.max(error?)))
    }
}

/// Brings the clocks of all timelines to that of the lowest rank.
///
/// Offsets that were measured are taken. They are to rank 0, whether or not there is a trace of it. For the
/// others the offset is the median, over the collectives that a rank and the reference have in common, of
/// the difference between the ends on both; with 12 collectives or more, a straight line through the
/// medians of their first and their last third. An offset that is not larger than the median distance from
/// it tells nothing, and the times stay as they were written.
pub fn align(timelines: &[Timeline]) -> Clocks {
    let Some(first) = (0..timelines.len()).min_by_key(|&place| rank_of(timelines, place)) else {
        return Clocks::default();
    };
    let reference = &timelines[first];
    // Zeros of clocks are comparable only where all give one.
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
            return RankClock {
                source: ClockSource::Measured,
                offset_begin_ns: own.begin_ns.saturating_sub(to.begin_ns),
                offset_end_ns: own.end_ns.saturating_sub(to.end_ns),
                error_ns: Some(own.error_ns.saturating_add(to.error_ns)),
                // It was measured between the clocks that the times are on, whatever their zeros.
                base_ns: 0,
                ..clock
            };
        }
        let ends = ends.get_or_insert_with(|| meetings::ends(timelines));
        estimate(&ends[place], &ends[first], clock)
    });
    Clocks { reference: rank_of(timelines, first), ranks: ranks.collect() }
}

/// The clock offsets that a trace of paceline contains.
struct Measured {
    begin_ns: i64,
    end_ns: i64,
    error_ns: u64,
}

fn measured(timeline: &Timeline) -> Option<Measured> {
    let said = |key: &str| timeline.run_facts.get(key)?.parse::<i64>().ok();
    Some(Measured {
        begin_ns: said("clock_offset_begin_ns")?,
        end_ns: said("clock_offset_end_ns")?,
        error_ns: said("clock_offset_error_ns")?.unsigned_abs(),
    })
}

/// The rank of the timeline at a place in the list.
pub(super) fn rank_of(timelines: &[Timeline], place: usize) -> usize {
    timelines[place].rank.unwrap_or(place)
}

/// The offset that makes collectives end at the same time.
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
    use crate::ranks::sample::timeline;
    use crate::timeline::Collective;

    /// Twenty all-reduces, one per millisecond, that end everywhere at the same time.
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

    /// How far the ends of all-reduces lie apart at most, once aligned.
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
        // The ends say that the second zero is 50 us too early, so it is taken back.
        assert_eq!((clocks.reference, clocks.ranks[0].align(1000)), (0, 1000));
        let measured = timelines.map(|timeline| says(timeline, 0, 0, 9));
        // What was measured lies between the clocks themselves, so their zeros do not matter.
        assert_eq!(align(&measured).ranks[0].align(1000), 1000);
    }
}
