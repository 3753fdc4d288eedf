//! The analysis across ranks covers the same steps and collectives as the figures of each rank.

use crate::common::{Build, NCCL, timeline, value};
use paceline_analysis::hta::{Options, Rules, analyze};
use paceline_analysis::ranks::across_ranks;
use paceline_analysis::timeline::Timeline;

/// Three steps of 100 us with an all-reduce each, and one more all-reduce before the first step. Rank 1 comes
/// late to the last one. The all-reduce of the second step runs when the third step has begun.
fn ranks() -> Vec<Timeline> {
    let reduce = |build: Timeline, call: f64, start: f64, end: f64, wait: i64| {
        build.launched(NCCL, 20, call, call + 1.0, start, end).told("all_reduce", Some(wait))
    };
    [(0, [2, 10, 5, 60]), (1, [1, 0, 7, 0])]
        .map(|(number, waits): (usize, [i64; 4])| {
            let mut build = timeline(number).kernel("gemm", 7, 5.0, 290.0);
            for (step, from) in [(3, 0.0), (4, 100.0), (5, 200.0)] {
                build = build.step(step, from, from + 100.0);
            }
            build = reduce(build, -20.0, -15.0, -5.0, waits[0]);
            build = reduce(build, 20.0, 30.0, 70.0, waits[1]);
            build = reduce(build, 190.0, 205.0, 215.0, waits[2]);
            reduce(build, 220.0, 225.0, 290.0, waits[3])
        })
        .into()
}

#[test]
fn waits_and_transfers_add_up_to_the_communication_of_the_row() {
    // Only HTA counts the all-reduce before the first step.
    for (rules, include_last_step, collectives, steps) in [
        (Rules::Steps, false, 2, 2),
        (Rules::Steps, true, 3, 3),
        (Rules::Hta, false, 3, 2),
        (Rules::Hta, true, 4, 3),
    ] {
        let options = Options { rules, include_last_step, ..Options::default() };
        let (timelines, us) = (ranks(), |ns: i64| ns as f64 / 1e3);
        let analysis = analyze(&timelines, &options).expect("two ranks");
        let across = across_ranks(&timelines, &options);
        assert_eq!(across.stragglers.num_collectives, collectives);
        assert_eq!((across.stragglers.num_unmatched, across.path.steps.len()), (0, steps));
        assert_eq!(across.path.len_ns(), steps as i64 * 100_000);
        for waits in &across.stragglers.ranks {
            let rank = &analysis.ranks[waits.rank];
            assert_eq!(us(waits.waited_ns + waits.transfer_ns), value(rank, "comm_time_us"));
            assert_eq!(waits.num_collectives as f64, value(rank, "collective_calls"));
        }
        // The worst of all is in the last step. The all-reduce that the second step launched belongs to that
        // step.
        let worst = across.stragglers.worst[0].step;
        assert_eq!(worst, if include_last_step { Some(5) } else { Some(3) });
        assert!(across.stragglers.worst.iter().any(|collective| collective.step == Some(4)));
    }
}

/// Older versions of PyTorch describe no kernel: the name of an all-to-all is in the span around its launch.
#[test]
fn all_to_alls_that_only_send_and_receive_are_matched() {
    let rank = |number: usize, start: f64| {
        let kernel = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)";
        let trace = timeline(number).step(0, 0, 10_000).span("nccl:all_to_all", 90, 130);
        let trace = trace.launched(kernel, 84, 100.0, 110.0, start, 7_810.0);
        // A message between two ranks stays out.
        trace.launched(kernel, 84, 8_000.0, 8_010.0, 8_050.0, 8_100.0)
    };
    let options = Options { include_last_step: true, ..Options::default() };
    let across = across_ranks(&[rank(1, 200.0), rank(7, 7_800.0)], &options);
    assert_eq!(across.stragglers.num_collectives, 1);
    let late = across.stragglers.ranks.iter().find(|of| of.rank == 7).expect("rank 7");
    let waits = across.stragglers.ranks.iter().find(|of| of.rank == 1).expect("rank 1");
    assert_eq!((waits.waited_ns, late.waited_ns), (7_600_000, 0));
}
