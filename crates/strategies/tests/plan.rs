//! What is drawn is what runs: each rank carries out its list, action by action.

mod common;

use paceline_collectives::Mesh;
use paceline_schedule::{Costs, Kind, Plan, SCHEDULES};
use paceline_strategies::{Single, Stages, train_step};

use common::{Net, Trainer, on_ranks};

#[test]
fn what_is_executed_is_the_plan() {
    for of in SCHEDULES {
        for (ranks, micro_batches) in
            [2, 3, 4].into_iter().flat_map(|p| [1, 2, 3, 4, 8, 12].map(|m| (p, m)))
        {
            let even = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
            let plan = match Plan::new(of, ranks, micro_batches, even) {
                Ok(plan) => plan,
                Err(error) => {
                    let least = (1..).find(|m| Plan::new(of, ranks, *m, even).is_ok()).unwrap();
                    let says = error.to_string();
                    let is_less = micro_batches < least && says.contains(&least.to_string());
                    assert!(is_less || micro_batches % ranks != 0, "{}: {says}", of.name());
                    continue;
                }
            };
            let text = |rank: usize| {
                let actions = plan.actions(rank).iter().map(ToString::to_string);
                actions.collect::<Vec<_>>().join(",")
            };
            let executed = on_ranks(ranks, |group| {
                let mesh = Mesh::new(group, &format!("pp={ranks}").parse().unwrap()).unwrap();
                let stages = Stages::even(of);
                let mut trainer =
                    Trainer::in_stages(Net::DeepMlp, mesh, Box::new(Single), &stages).unwrap();
                let shares = trainer.shares(&vec![2; micro_batches]);
                let Trainer { strategy, replica, track, .. } = &mut trainer;
                train_step(strategy.as_mut(), replica, &shares, track).unwrap();
                let acted = replica.acted();
                // Those that have begun and not ended, in stages of this rank.
                let (mut now, mut most) = (0i64, 0i64);
                for one in acted {
                    now += match one.action.kind {
                        Kind::Forward => 1,
                        Kind::Backward | Kind::BackwardWeight => -1,
                        _ => 0,
                    };
                    most = most.max(now);
                }
                assert!(acted.windows(2).all(|two| two[0].span.end_ns <= two[1].span.end_ns));
                let text: Vec<String> = acted.iter().map(|one| one.action.to_string()).collect();
                (text.join(","), most as f64)
            });
            for (rank, (executed, most)) in executed.into_iter().enumerate() {
                let what = format!("{}, {ranks} ranks, {micro_batches} micro-batches", of.name());
                assert_eq!(executed, text(rank), "{what}, rank {rank}");
                let chunks = plan.shape().placement.chunks() as f64;
                assert_eq!(most / chunks, plan.in_flight(rank), "{what}, rank {rank}");
            }
        }
    }
}
