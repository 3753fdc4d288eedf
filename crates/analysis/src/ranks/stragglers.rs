//! Which rank arrived last at collectives, and how long the others waited for it.
//!
//! Input: matched collectives. Output: totals per rank.

use std::collections::BTreeMap;

use super::clock::Clocks;
use super::matched::{MatchedCollective, MatchedCollectives};

/// How many of the worst collectives are kept.
const NUM_WORST: usize = 20;

/// The waits of a rank in collectives. All times are nanoseconds, added up over collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankWaits {
    /// Which rank.
    pub rank: usize,
    /// The collectives that the rank and at least one other rank have a trace of.
    pub num_collectives: usize,
    /// The number of these collectives at which the rank arrived last.
    pub times_last: usize,
    /// How long the rank waited for the last rank.
    pub waited_ns: i64,
    /// How long the rank made the others wait where it arrived last: the sum of their waits, each minus its
    /// own.
    pub made_wait_ns: i64,
    /// How much later the rank arrived than the rank before it, where it arrived last. An upper bound of what
    /// the run would gain if this rank were no slower than the second slowest.
    pub lead_ns: i64,
    /// How long data moved, without the wait.
    pub transfer_ns: i64,
}

/// Which ranks made the others wait.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stragglers {
    /// Whether the transport has measured all waits.
    pub is_measured: bool,
    /// The number of collectives that two ranks or more have a trace of.
    pub num_collectives: usize,
    /// How many of these lack a rank of their group. The missing rank may have been the last.
    pub num_incomplete: usize,
    /// See [`MatchedCollectives::num_unmatched`].
    pub num_unmatched: usize,
    /// All ranks, starting with the one that made the others wait longest.
    pub ranks: Vec<RankWaits>,
    /// The collectives whose last rank made the others wait longest, at most 20.
    pub worst: Vec<MatchedCollective>,
}

/// Adds up the waits of all collectives.
pub fn stragglers(collectives: &MatchedCollectives, clocks: &Clocks) -> Stragglers {
    let empty = |rank| (rank, RankWaits { rank, ..RankWaits::default() });
    let mut totals: BTreeMap<usize, RankWaits> =
        clocks.ranks.iter().map(|clock| empty(clock.rank)).collect();
    for collective in &collectives.all {
        for arrival in &collective.arrivals {
            let total = totals.entry(arrival.rank).or_default();
            total.num_collectives += 1;
            total.waited_ns = total.waited_ns.saturating_add(arrival.wait_ns);
            total.transfer_ns = total.transfer_ns.saturating_add(arrival.transfer_ns());
        }
        let total = totals.entry(collective.last().rank).or_default();
        total.times_last += 1;
        total.made_wait_ns = total.made_wait_ns.saturating_add(collective.made_wait_ns());
        total.lead_ns = total.lead_ns.saturating_add(collective.lead_ns());
    }
    let mut totals: Vec<RankWaits> = totals.into_values().collect();
    totals.sort_by_key(|total| (std::cmp::Reverse(total.made_wait_ns), total.rank));
    let mut worst: Vec<&MatchedCollective> =
        collectives.all.iter().filter(|of| of.made_wait_ns() > 0).collect();
    worst.sort_by_key(|collective| std::cmp::Reverse(collective.made_wait_ns()));
    let are_measured = collectives.all.iter().all(|collective| collective.is_measured);
    Stragglers {
        is_measured: are_measured && !collectives.all.is_empty(),
        num_collectives: collectives.all.len(),
        num_incomplete: collectives.all.iter().filter(|collective| !collective.is_complete).count(),
        num_unmatched: collectives.num_unmatched,
        ranks: totals,
        worst: worst.into_iter().take(NUM_WORST).cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, timeline};
    use crate::ranks::{align, match_collectives};
    use crate::timeline::{Collective, Timeline};

    fn found(timelines: &[Timeline]) -> Stragglers {
        let clocks = align(timelines);
        stragglers(&match_collectives(timelines, &clocks), &clocks)
    }

    fn waits(found: &[RankWaits], rank: usize) -> RankWaits {
        *found.iter().find(|waits| waits.rank == rank).unwrap()
    }

    /// Three ranks and two steps. In the first step rank 2 is late by 30 us, in the second step rank 0 by 5
    /// us.
    fn three() -> [Timeline; 3] {
        [(0, 10, 115), (1, 20, 110), (2, 40, 110)].map(|(rank, first, second)| {
            let timeline = timeline(rank).step(4, 0, 100).step(5, 100, 200);
            // In the file, the sequence is not in order of time.
            timeline.all_reduce(8, second, 150).all_reduce(7, first, 50)
        })
    }

    #[test]
    fn the_rank_that_comes_late_makes_the_others_wait() {
        let found = found(&three());
        assert_eq!((found.is_measured, found.num_collectives), (false, 2));
        let order: Vec<usize> = found.ranks.iter().map(|waits| waits.rank).collect();
        assert_eq!(order, [2, 0, 1]);
        let late = RankWaits {
            rank: 2,
            num_collectives: 2,
            times_last: 1,
            waited_ns: 5_000,
            made_wait_ns: 50_000,
            lead_ns: 20_000,
            transfer_ns: 10_000 + 35_000,
        };
        assert_eq!(found.ranks[0], late);
        assert_eq!(waits(&found.ranks, 0).waited_ns, 30_000);
        assert_eq!(waits(&found.ranks, 0).made_wait_ns, 10_000);
        assert_eq!(waits(&found.ranks, 1).times_last, 0);
        assert_eq!(found.worst.iter().map(|m| m.seq).collect::<Vec<_>>(), [Some(7), Some(8)]);
    }

    #[test]
    fn clocks_apart_change_nothing() {
        let [a, b, c] = three();
        let apart = [a, b.by_clock(90_000, 0), c.by_clock(-1_000_000, 0)];
        assert_eq!(found(&apart), found(&three()));
    }

    #[test]
    fn what_the_transport_measured_goes_before_clocks() {
        // By the clocks, rank 1 arrived first; by the measured waits, it arrived last.
        let said = |wait_us: i64| Collective {
            seq: Some(0),
            wait_ns: Some(wait_us * 1000),
            ..Collective::default()
        };
        let timelines = [timeline(0).said(10, 100, said(60)), timeline(1).said(0, 90, said(1))];
        let found = found(&timelines);
        assert!(found.is_measured);
        assert_eq!((found.ranks[0].rank, found.ranks[0].made_wait_ns), (1, 59_000));
        assert_eq!(waits(&found.ranks, 0).transfer_ns, 30_000);
    }

    #[test]
    fn a_missing_rank_is_said() {
        let said =
            |seq| Collective { seq: Some(seq), group_size: Some(3), ..Collective::default() };
        let rank = |rank| timeline(rank).said(0, 10, said(0)).said(20 + rank as i64, 30, said(1));
        let found = found(&[rank(0), rank(2)]);
        assert_eq!((found.num_collectives, found.num_incomplete, found.num_unmatched), (2, 2, 0));
        let run = Timeline { world_size: Some(3), ..rank(0) };
        assert_eq!(crate::common::across(&[run, rank(2)]).missing, [1]);
    }

    #[test]
    fn a_collective_of_one_rank_is_counted_and_left_out() {
        let lonely = timeline(1).all_reduce(0, 0, 10).all_reduce(1, 20, 30);
        let found = found(&[timeline(0).all_reduce(0, 4, 10), lonely]);
        assert_eq!((found.num_collectives, found.num_unmatched), (1, 1));
        assert_eq!(waits(&found.ranks, 1).waited_ns, 4_000);
    }

    #[test]
    fn without_numbers_the_order_within_steps_decides() {
        let rank = |rank: usize, late: i64| {
            let timeline = timeline(rank).step(1, 0, 100).step(2, 100, 200);
            timeline
                .said(10 + late, 50, Collective::default())
                .said(60, 70, Collective::default())
                .said(110, 150, Collective::default())
        };
        // Rank 1 has one more call in the second step, so the calls there cannot be matched.
        let found = found(&[rank(0, 0), rank(1, 9).said(160, 170, Collective::default())]);
        assert_eq!((found.num_collectives, found.num_unmatched), (2, 3));
        assert_eq!(waits(&found.ranks, 0).waited_ns, 9_000);
        assert_eq!(found.worst[0].step, Some(1));
    }

    #[test]
    fn back_ends_of_traces_without_kernels_show_their_collectives() {
        let rank = |rank: usize, start_us| {
            timeline(rank)
                .step(1, 0, 100)
                .operator("c10d::allreduce_", start_us, start_us + 1)
                .span("gloo:all_reduce", start_us + 2, 60)
        };
        let found = found(&[rank(0, 10), rank(1, 30)]);
        assert_eq!((found.num_collectives, found.num_unmatched), (1, 0));
        assert_eq!(waits(&found.ranks, 1).made_wait_ns, 20_000);
        assert_eq!(found.worst[0].name, "gloo:all_reduce");
    }

    #[test]
    fn messages_between_two_ranks_are_no_collectives() {
        let said =
            |name: &str| Collective { name: name.into(), seq: Some(0), ..Collective::default() };
        let mut timelines = [timeline(0).said(0, 9, said("")), timeline(1).said(5, 9, said(""))];
        timelines.iter_mut().for_each(|t| t.collectives[0].name = "send".into());
        assert_eq!((found(&timelines).num_collectives, found(&timelines).num_unmatched), (0, 0));
    }
}
