//! What papers and other programs say of the schedules.

use paceline_schedule::{Costs, Plan, SCHEDULES, Schedule, Timeline, drawing, named};

fn even(plan: &Plan, forward: f64, input: f64, weight: f64) -> Timeline {
    let costs = Costs::even(&plan.shape().placement, forward, input, weight);
    Timeline::of(plan, &costs).unwrap()
}

fn plan_of(schedule: &dyn Schedule, ranks: usize, micro_batches: usize) -> Plan {
    let costs = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
    Plan::new(schedule, ranks, micro_batches, costs).unwrap()
}

/// For four ranks and eight micro-batches, if the forward pass and both halves of the backward pass take 1: the time until the
/// last rank is done, the longest time of a rank, and the most micro-batches in flight.
#[test]
fn times_and_memory_are_those_of_the_papers() {
    for (name, makespan, of_rank, in_flight) in [
        ("gpipe", 33.0, 33.0, [8.0; 4]),
        ("1f1b", 33.0, 33.0, [4.0, 3.0, 2.0, 1.0]),
        ("looped_bfs", 28.5, 28.5, [8.0; 4]),
        ("interleaved_1f1b", 28.5, 28.5, [5.5, 4.5, 3.5, 2.5]),
        ("zb_h1", 27.0, 27.0, [4.0; 4]),
        ("zb_h2", 27.0, 24.0, [7.0; 4]),
        ("interleaved_zb", 25.5, 25.5, [4.0; 4]),
        ("zbv", 25.5, 24.0, [4.0; 4]),
        ("dualpipev", 27.0, 27.0, [4.5; 4]),
    ] {
        let plan = plan_of(named(name).unwrap(), 4, 8);
        let costs = Costs {
            side_by_side: Some(1.0),
            ..Costs::even(&plan.shape().placement, 1.0, 1.0, 1.0)
        };
        let timeline = Timeline::of(&plan, &costs).unwrap();
        assert_eq!(timeline.makespan, makespan, "{name}");
        assert_eq!(timeline.longest_rank(), of_rank, "{name}");
        assert_eq!([0, 1, 2, 3].map(|rank| plan.in_flight(rank)), in_flight, "{name}");
        assert!((0..4).all(|rank| timeline.busy(rank) == 24.0), "{name}");
    }
}

#[test]
fn all_but_one_add_up_gradients_like_one_process() {
    for of in SCHEDULES {
        for (ranks, micro_batches) in [(2, 4), (4, 8), (3, 12)] {
            let is_in_order = plan_of(of, ranks, micro_batches).adds_in_order();
            assert_eq!(is_in_order, of.name() != "looped_bfs", "{} on {ranks}", of.name());
        }
    }
}

/// Beyond the time in which a rank computes, as formulas of the ranks p and of the durations F, I and W.
#[test]
fn idle_times_follow_their_formulas() {
    type Formula = fn(f64, f64, f64) -> f64;
    let formulas: [(&str, Formula); 6] = [
        ("gpipe", |f, i, w| f + i + w),
        ("1f1b", |f, i, w| f + i + w),
        ("looped_bfs", |f, i, w| (f + i + w) / 2.0),
        ("interleaved_1f1b", |f, i, w| (f + i + w) / 2.0),
        ("zb_h1", |f, i, w| f + i - w),
        ("interleaved_zb", |f, i, w| (f + i - w) / 2.0),
    ];
    for ranks in [2, 3, 4, 6] {
        for (name, formula) in formulas {
            for (f, i, w) in [(1.0, 1.0, 1.0), (4.0, 5.0, 4.0)] {
                let plan = plan_of(named(name).unwrap(), ranks, 4 * ranks);
                let idle = even(&plan, f, i, w).makespan - 4.0 * ranks as f64 * (f + i + w);
                let expected = (ranks - 1) as f64 * formula(f, i, w);
                assert!(
                    (idle - expected).abs() < 1e-9,
                    "{name} on {ranks}: {idle}, not {expected}"
                );
            }
        }
    }
}

/// A pair that runs one after the other makes neither message wait for the other pass.
#[test]
fn pairs_one_after_the_other_are_idle_for_less_time() {
    let plan = plan_of(named("dualpipev").unwrap(), 4, 8);
    assert_eq!(even(&plan, 1.0, 1.0, 1.0).makespan, 25.5);
}

#[test]
fn every_schedule_comes_to_its_end_for_few_and_many_micro_batches() {
    for schedule in SCHEDULES {
        let mut refused = Vec::new();
        for ranks in [1, 2, 3, 4, 5, 8] {
            for micro_batches in (1..=20).chain([64]) {
                let costs = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
                match Plan::new(schedule, ranks, micro_batches, costs) {
                    Ok(plan) => {
                        let timeline = even(&plan, 2.0, 3.0, 1.0);
                        let busy = 6.0 * micro_batches as f64;
                        assert!((0..ranks).all(|rank| (timeline.busy(rank) - busy).abs() < 1e-6));
                    }
                    Err(error) => refused.push((ranks, micro_batches, error.to_string())),
                }
            }
        }
        for (ranks, micro_batches, error) in &refused {
            let name = schedule.name();
            let is_known = match name {
                "dualpipev" => micro_batches < &(2 * ranks),
                "interleaved_1f1b" | "interleaved_zb" => {
                    micro_batches % (micro_batches / ranks).max(1) > 0
                }
                _ => false,
            };
            assert!(is_known, "{name} with {ranks} ranks, {micro_batches} micro-batches: {error}");
        }
    }
}

/// Rank 1's row of `test/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv` in PyTorch.
#[test]
fn lists_are_written_as_pytorch_writes_them() {
    let csv = plan_of(named("dualpipev").unwrap(), 4, 10).csv();
    let expected = "1F0,1F1,1F2,1F3,1F4,6F0,1F5,6F1,6I0,6W0,6F2,6I1,6W1,6F3,(1F6;6B2)OVERLAP_F_B,(6F4;1B0)OVERLAP_F_B,\
         (1F7;6B3)OVERLAP_F_B,(6F5;1B1)OVERLAP_F_B,(1F8;6B4)OVERLAP_F_B,(6F6;1B2)OVERLAP_F_B,(1F9;6B5)OVERLAP_F_B,\
         (6F7;1B3)OVERLAP_F_B,6B6,(6F8;1B4)OVERLAP_F_B,6B7,(6F9;1B5)OVERLAP_F_B,6B8,1B6,6I9,1I7,6W9,1I8,1W7,1I9,1W8,1W9";
    assert_eq!(csv.lines().nth(1).unwrap(), expected);
}

#[test]
fn a_drawing_shows_each_action_where_it_runs() {
    let draw = |name: &str, ranks, micro_batches, width| {
        let plan = plan_of(named(name).unwrap(), ranks, micro_batches);
        drawing(&plan, &even(&plan, 1.0, 1.0, 1.0), width)
    };
    assert_eq!(
        draw("1f1b", 2, 2, 40),
        "stage 0 F0=F1=......B0====...B1====\n\
         stage 1 ...F0=B0====F1=B1====......\n"
    );
    for schedule in SCHEDULES {
        for width in [20, 80, 200] {
            for line in draw(schedule.name(), 4, 16, width).lines() {
                assert!(line.len() <= width, "{} in {width}: {line}", schedule.name());
            }
        }
    }
}
