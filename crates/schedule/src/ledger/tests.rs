//! Steps with planted faults.

use super::*;
use crate::{OneFOneB, SCHEDULES};

/// A step as it would be measured if the parts took so long, and the steps before it were as `cost` says.
struct Planted<'a> {
    cost: &'a dyn Fn(&Action) -> f64,
    message: f64,
    late: Option<(Action, f64)>,
    barrier: f64,
}

impl Planted<'_> {
    fn ledger(&self, plan: &Plan) -> IdleLedger {
        let quiet = measured(plan, self.cost, self.message, self.barrier, None);
        let late = |action: &Action| {
            let extra = self.late.filter(|(of, _)| of == action).map_or(0.0, |(_, extra)| extra);
            (self.cost)(action) + extra
        };
        let begin = quiet.iter().map(|own| own.begin).collect();
        let step = measured(plan, &late, self.message, self.barrier, Some(begin));
        let usual = usual(plan, [&quiet[..], &quiet[..], &step[..]]);
        IdleLedger::of(plan, &step, &usual).unwrap()
    }
}

/// The measurements of ranks.
fn measured(
    plan: &Plan,
    cost: &dyn Fn(&Action) -> f64,
    message: f64,
    barrier: f64,
    begin: Option<Vec<f64>>,
) -> Vec<MeasuredStep> {
    let ranks = plan.shape().placement.ranks();
    let travel = |_: &Action| message;
    let times = |begin| RehearsalTimes {
        cost,
        before: &|_| 0.0,
        message: &travel,
        begin,
        in_order: true,
        side_by_side: None,
    };
    // Without a barrier each rank goes on when it is done.
    let begin = begin.unwrap_or_else(|| {
        if barrier > 0.0 {
            vec![0.0; ranks]
        } else {
            idle(plan, times(vec![0.0; ranks])).unwrap().1
        }
    });
    let timeline = Timeline::with(plan, times(begin.clone())).unwrap();
    let ran: HashMap<Action, Ran> =
        timeline.ranks.iter().flatten().map(|ran| (ran.action, *ran)).collect();
    let mut steps = Vec::new();
    for (rank, at) in begin.into_iter().enumerate() {
        let mut own = MeasuredStep { asked: at, begin: at, ..MeasuredStep::default() };
        let mut ends = vec![at, at];
        for action in arithmetic(plan, rank) {
            let Ran { start, end, .. } = ran[&action];
            let (asked, posted) = (ends[ends.len() - 1], ends[ends.len() - 2]);
            let made = |stage, kind| ran.get(&Action { stage, kind, ..action }).map(|of| of.end);
            let sent = match action.kind {
                Kind::Forward => action.stage.checked_sub(1).and_then(|at| made(at, Kind::Forward)),
                _ => made(action.stage + 1, Kind::Backward)
                    .or_else(|| made(action.stage + 1, Kind::BackwardInput)),
            };
            let arrived = posted.max(sent.unwrap_or(posted)) + message;
            own.actions.push(Measured { asked, start, end, message: (posted, arrived), held: 0.0 });
            ends.push(end);
        }
        own.end = ends[ends.len() - 1] + barrier;
        own.barrier = barrier;
        steps.push(own);
    }
    steps
}

fn plan(schedule: &dyn crate::Schedule) -> Plan {
    Plan::new(schedule, 4, 8, |of| crate::Costs::even(of, 1.0, 1.0, 1.0)).unwrap()
}

fn total(ledger: &IdleLedger, cause: IdleCause) -> f64 {
    ledger.ranks.iter().map(|account| account.of(cause)).sum()
}

fn even(action: &Action) -> f64 {
    if action.kind == Kind::Backward { 2.0 } else { 1.0 }
}

#[test]
fn idle_time_closes_to_the_step_under_each_schedule() {
    for schedule in SCHEDULES {
        let plan = plan(schedule);
        let uneven = |action: &Action| even(action) * (1.0 + 0.25 * action.stage as f64);
        let late = Some((Action::new(1, Kind::Forward, 2), 3.0));
        let planted = Planted { cost: &uneven, message: 0.0, late, barrier: 0.5 };
        let ledger = planted.ledger(&plan);
        for account in &ledger.ranks {
            let sum = account.busy + account.idle.iter().sum::<f64>() + account.rest;
            assert!((sum - account.step).abs() < 1e-9, "{}: {account:?}", schedule.name());
            assert!(account.rest.abs() < 1e-9, "{}: {account:?}", schedule.name());
            assert_eq!(account.of(IdleCause::Barrier), 0.5);
        }
    }
}

#[test]
fn equal_stages_only_fill_and_drain() {
    let planted = Planted { cost: &even, message: 0.0, late: None, barrier: 0.0 };
    let ledger = planted.ledger(&plan(&OneFOneB));
    for (rank, account) in ledger.ranks.iter().enumerate() {
        // It is done with the step before by two units for each rank in front of it earlier than the first rank.
        let (fill, drain) = (3.0 * rank as f64, 3.0 * (3 - rank) as f64);
        assert_eq!((account.of(IdleCause::Fill), account.of(IdleCause::Drain)), (fill, drain));
    }
    let others = &IdleCause::ALL[2..6];
    assert!(others.iter().all(|cause| total(&ledger, *cause) == 0.0), "{ledger:?}");
}

#[test]
fn a_slow_stage_is_imbalance_and_a_slow_moment_is_a_late_peer() {
    let plan = plan(&OneFOneB);
    // Stage 2 takes twice as long: the others wait for it.
    let slow = |action: &Action| even(action) * if action.stage == 2 { 2.0 } else { 1.0 };
    let ledger = Planted { cost: &slow, message: 0.0, late: None, barrier: 0.0 }.ledger(&plan);
    assert!(total(&ledger, IdleCause::Imbalance) > 40.0, "{ledger:?}");
    assert_eq!(total(&ledger, IdleCause::LatePeer), 0.0);
    // One pass takes 6 longer, once. The step is 6 longer, and the three other ranks wait.
    let late = Some((Action::new(3, Kind::Backward, 4), 6.0));
    let ledger = Planted { cost: &even, message: 0.0, late, barrier: 0.0 }.ledger(&plan);
    assert_eq!(total(&ledger, IdleCause::Imbalance), 0.0);
    let waited: Vec<f64> = ledger.ranks.iter().map(|of| of.of(IdleCause::LatePeer)).collect();
    assert_eq!(waited, [6.0, 6.0, 6.0, 0.0]);
    let named = ledger.gaps[0].iter().filter(|gap| gap.cause == Some(IdleCause::LatePeer)).count();
    assert!(named >= 1, "{ledger:?}");
}

#[test]
fn messages_that_take_time_are_transfers() {
    let plan = plan(&OneFOneB);
    let ledger = Planted { cost: &even, message: 0.25, late: None, barrier: 0.0 }.ledger(&plan);
    // Rank 3 waits for the first input of three messages, and for each further one after its own gradient.
    let none = Planted { cost: &even, message: 0.0, late: None, barrier: 0.0 }.ledger(&plan);
    let longer = ledger.ranks[0].step - none.ranks[0].step;
    assert!(longer > 0.0);
    let idle: f64 = total(&ledger, IdleCause::Transfer) + total(&ledger, IdleCause::HeadOfLine);
    let all: f64 = ledger.ranks.iter().zip(&none.ranks).map(|(a, b)| a.step - b.step).sum();
    assert!((idle - all).abs() < 1e-9, "{idle} {all}: {ledger:?}");
    assert_eq!(total(&ledger, IdleCause::Imbalance) + total(&ledger, IdleCause::LatePeer), 0.0);
}

#[test]
fn clocks_that_are_apart_are_put_together() {
    let plan = plan(&OneFOneB);
    let step = measured(&plan, &even, 0.5, 0.0, None);
    let mut apart = step.clone();
    for of in &mut apart[2].actions {
        for at in [&mut of.asked, &mut of.start, &mut of.end, &mut of.message.0, &mut of.message.1]
        {
            *at += 1e6;
        }
    }
    on_one_clock(&plan, &mut apart, 1.0);
    let error = |at: usize| (apart[2].actions[at].start - step[2].actions[at].start).abs();
    assert!((0..16).all(|at| error(at) < 1.0), "{apart:?}");
    assert_eq!(apart[3].actions[0].start, step[3].actions[0].start);
}

#[test]
fn a_step_of_another_plan_is_refused() {
    let plan = plan(&OneFOneB);
    let mut step = measured(&plan, &even, 0.0, 0.0, None);
    step[1].actions.pop();
    assert!(IdleLedger::of(&plan, &step, &Usual::default()).is_err());
}
