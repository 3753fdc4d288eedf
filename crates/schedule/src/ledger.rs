//! Where the idle time of a measured step comes from.
//!
//! The step is rehearsed several times, each time with one thing more of what was measured: with equal stages, with the
//! stages as they usually are, as long as each action took in this step, with the messages, with their order. What a rank is
//! idle longer each time is what that thing costs. What the last rehearsal does not explain is the rest; if it is small,
//! the parts can be believed.
//!
//! Input: a plan, and when each rank did what. Output: idle time by cause.

use std::collections::HashMap;

use crate::plan::received_for;
use crate::timeline::Times;
use crate::{Action, Kind, Plan, PlanError, Ran, Timeline};

/// Why a rank was idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// It waits for an input, and would with equal stages and no messages: the pipeline is not full yet.
    Fill,
    /// It waits for a gradient, and would with equal stages and no messages: the pipeline runs empty.
    Drain,
    /// Stages do not take equally long.
    Imbalance,
    /// In this step a rank began later, or took longer, than it usually does.
    LatePeer,
    /// A message travels, or was not taken at once.
    Transfer,
    /// A message waits for those before it in its queue.
    HeadOfLine,
    /// All ranks wait for each other: for the loss, or for the norm of all gradients.
    Barrier,
}

impl Cause {
    /// All of them, in the order of the rehearsals.
    pub const ALL: [Self; 7] = [
        Self::Fill,
        Self::Drain,
        Self::Imbalance,
        Self::LatePeer,
        Self::Transfer,
        Self::HeadOfLine,
        Self::Barrier,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Drain => "drain",
            Self::Imbalance => "imbalance",
            Self::LatePeer => "late peer",
            Self::Transfer => "transfer",
            Self::HeadOfLine => "head of line",
            Self::Barrier => "barrier",
        }
    }
}

/// When an action ran. All times of a step are in one unit and on one clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// When the rank had nothing to do before it.
    pub asked: f64,
    /// When it began.
    pub start: f64,
    /// When it was done.
    pub end: f64,
    /// When the message that it needs could be received, and when it had arrived. Nobody reads it if there is none.
    pub message: (f64, f64),
}

/// A step of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStep {
    /// When it asked for the samples of the step.
    pub asked: f64,
    /// When it had them.
    pub begin: f64,
    /// Its arithmetic, in the order of its list.
    pub actions: Vec<Measured>,
    /// How long it waited at the end for all other ranks.
    pub barrier: f64,
    /// When it was done, the optimizer included.
    pub end: f64,
}

/// What things usually take: medians over steps and micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usual {
    /// Each kind of action in each stage.
    pub actions: HashMap<(usize, Kind), f64>,
    /// A message, once it is sent and awaited.
    pub message: f64,
}

impl Usual {
    /// What an action usually takes; zero if there was none like it.
    pub fn of(&self, stage: usize, kind: Kind) -> f64 {
        self.actions.get(&(stage, kind)).copied().unwrap_or(0.0)
    }
}

/// The idle time of a rank in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// The whole step.
    pub step: f64,
    /// What is not idle: arithmetic, the optimizer, and the synchronization of replicas.
    pub busy: f64,
    /// Idle time by cause, in the order of [`Cause::ALL`]. It is below zero where a cause takes away more of the idle time of
    /// others than it adds.
    pub idle: [f64; 7],
    /// Idle time without a cause.
    pub rest: f64,
}

impl Account {
    /// The idle time of a cause.
    pub fn of(&self, cause: Cause) -> f64 {
        self.idle[cause as usize]
    }

    /// The accounts of several steps or ranks, on average.
    pub fn mean<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let (mut mean, mut count) = (Self::default(), 0.0);
        for one in all {
            mean.step += one.step;
            mean.busy += one.busy;
            mean.rest += one.rest;
            mean.idle.iter_mut().zip(one.idle).for_each(|(sum, part)| *sum += part);
            count += 1.0;
        }
        let parts = [&mut mean.step, &mut mean.busy, &mut mean.rest];
        parts.into_iter().chain(&mut mean.idle).for_each(|part| *part /= f64::max(count, 1.0));
        mean
    }
}

/// An idle interval of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gap {
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// What most of it comes from; `None` if that is not known.
    pub cause: Option<Cause>,
}

/// The idle time of all ranks in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Ledger {
    /// By rank.
    pub ranks: Vec<Account>,
    /// The idle intervals before the actions of each rank, and the one at the end.
    pub gaps: Vec<Vec<Gap>>,
}

impl Ledger {
    /// The ledger of a step. `usual` has what actions usually take on the same ranks ([`usual`]).
    ///
    /// # Errors
    ///
    /// If the step has other actions than the plan.
    pub fn of(plan: &Plan, step: &[RankStep], usual: &Usual) -> Result<Self, PlanError> {
        let ranks = plan.shape().placement.ranks();
        let fits = step.len() == ranks
            && (0..ranks).all(|rank| step[rank].actions.len() == arithmetic(plan, rank).count());
        if !fits {
            return Err(PlanError::Setting("the step is not one of this plan".to_owned()));
        }
        let layers = layers(plan, step, usual)?;
        let mut ledger = Self { ranks: Vec::new(), gaps: Vec::new() };
        for (rank, own) in step.iter().enumerate() {
            let mut account = Account { step: own.end - own.begin, ..Account::default() };
            let mut gaps = Vec::new();
            for (at, action) in arithmetic(plan, rank).enumerate() {
                let own = own.actions[at];
                let mut parts = [0.0; 7];
                let first = match action.kind {
                    Kind::Forward => Cause::Fill,
                    _ => Cause::Drain,
                };
                let causes =
                    [first, Cause::Imbalance, Cause::LatePeer, Cause::Transfer, Cause::HeadOfLine];
                let mut before = 0.0;
                for (cause, layer) in causes.into_iter().zip(&layers) {
                    parts[cause as usize] += layer[rank][at] - before;
                    before = layer[rank][at];
                }
                let idle = own.start - own.asked;
                account.rest += idle - before;
                account.idle.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
                let most = Cause::ALL
                    .into_iter()
                    .max_by(|a, b| parts[*a as usize].total_cmp(&parts[*b as usize]));
                let cause = most.filter(|cause| parts[*cause as usize] > 0.0);
                gaps.push(Gap { start: own.asked, end: own.start, cause });
            }
            account.idle[Cause::Barrier as usize] = own.barrier;
            gaps.push(Gap {
                start: own.end - own.barrier,
                end: own.end,
                cause: Some(Cause::Barrier),
            });
            let idle: f64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
            account.busy = account.step - idle;
            gaps.retain(|gap| gap.end > gap.start);
            ledger.ranks.push(account);
            ledger.gaps.push(gaps);
        }
        Ok(ledger)
    }
}

/// What actions and messages usually take in these steps.
pub fn usual<'a>(plan: &Plan, steps: impl IntoIterator<Item = &'a [RankStep]>) -> Usual {
    let mut actions: HashMap<(usize, Kind), Vec<f64>> = HashMap::new();
    let mut messages = Vec::new();
    for step in steps {
        for (rank, own) in step.iter().enumerate() {
            for (action, (took, before)) in arithmetic(plan, rank).zip(durations(own)) {
                actions.entry((action.stage, action.kind)).or_default().push(took + before);
            }
        }
        messages.extend(travels(plan, step, &ends(plan, step)).into_values());
    }
    let actions = actions.into_iter().map(|(key, of)| (key, median(of))).collect();
    Usual { actions, message: median(messages) }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(0.0)
}

/// Puts the times of all ranks on the clock of the first one. Between two clocks a message one way seems to take as much longer
/// as one the other way seems to take less. Clocks that are closer than `tolerance` count as one.
pub fn on_one_clock(plan: &Plan, step: &mut [RankStep], tolerance: f64) {
    let ends = ends(plan, step);
    let mut least: HashMap<(usize, usize), f64> = HashMap::new();
    for message in messages(plan, step, &ends) {
        let took = least.entry((message.from, message.to)).or_insert(f64::INFINITY);
        *took = took.min(message.arrived - message.sent);
    }
    let mut ahead = 0.0;
    for rank in 1..step.len() {
        let way = |from, to| least.get(&(from, to)).copied();
        if let (Some(there), Some(back)) = (way(rank - 1, rank), way(rank, rank - 1)) {
            let apart = (there - back) / 2.0;
            ahead += if apart.abs() < tolerance { 0.0 } else { apart };
        }
        let own = &mut step[rank];
        let moments = own.actions.iter_mut().flat_map(|of| {
            [&mut of.asked, &mut of.start, &mut of.end, &mut of.message.0, &mut of.message.1]
        });
        let whole = [&mut own.asked, &mut own.begin, &mut own.end];
        moments.chain(whole).for_each(|at| *at -= ahead);
    }
}

/// The timeline of a step as it was measured.
pub fn as_run(plan: &Plan, step: &[RankStep]) -> Timeline {
    let first = step.iter().map(|own| own.begin).fold(f64::INFINITY, f64::min);
    let ranks = step.iter().enumerate().map(|(rank, own)| {
        let ran = |(action, of): (Action, &Measured)| Ran {
            action,
            start: of.start - first,
            end: of.end - first,
        };
        arithmetic(plan, rank).zip(&own.actions).map(ran).collect()
    });
    let ranks: Vec<Vec<Ran>> = ranks.collect();
    let last = step.iter().map(|own| own.end).fold(f64::NEG_INFINITY, f64::max);
    Timeline { ranks, makespan: last - first }
}

/// The arithmetic of a rank, in order.
fn arithmetic(plan: &Plan, rank: usize) -> impl Iterator<Item = Action> {
    plan.list(rank).iter().flat_map(|entry| entry.actions())
}

/// What the actions of a rank took, and what it did before each, such as handing over a message.
fn durations(own: &RankStep) -> impl Iterator<Item = (f64, f64)> {
    let before = std::iter::once(own.begin).chain(own.actions.iter().map(|of| of.end));
    own.actions.iter().zip(before).map(|(of, before)| (of.end - of.start, of.asked - before))
}

/// For each rehearsal, each rank and each of its actions: how long the rank is idle before it.
fn layers(plan: &Plan, step: &[RankStep], usual: &Usual) -> Result<Vec<Vec<Vec<f64>>>, PlanError> {
    let placement = plan.shape().placement;
    let ranks = 0..placement.ranks();
    let took: HashMap<Action, (f64, f64)> =
        ranks.clone().flat_map(|rank| arithmetic(plan, rank).zip(durations(&step[rank]))).collect();
    let ends = ends(plan, step);
    let travels = travels(plan, step, &ends);
    let even = |action: &Action| {
        let stages =
            (0..placement.stages()).filter_map(|stage| usual.actions.get(&(stage, action.kind)));
        let stages: Vec<f64> = stages.copied().collect();
        stages.iter().sum::<f64>() / stages.len().max(1) as f64
    };
    let even: HashMap<Kind, f64> =
        Kind::ALL.map(|kind| (kind, even(&Action::new(0, kind, 0)))).into_iter().collect();
    let none = |_: &Action| 0.0;
    let alike = |action: &Action| even[&action.kind];
    let often = |action: &Action| usual.of(action.stage, action.kind);
    let now = |action: &Action| took[action].0;
    let handing = |action: &Action| took[action].1;
    let message = |action: &Action| travels.get(action).copied().unwrap_or(0.0);
    let wanted: Vec<f64> = step.iter().map(|own| own.asked).collect();
    let begun: Vec<f64> = step.iter().map(|own| own.begin).collect();
    type Cost<'a> = &'a dyn Fn(&Action) -> f64;
    let all: [(Cost, Cost, Cost, &Vec<f64>, bool); 5] = [
        (&alike, &none, &none, &wanted, true),
        (&often, &none, &none, &wanted, true),
        (&now, &handing, &none, &begun, true),
        (&now, &handing, &message, &begun, false),
        (&now, &handing, &message, &begun, true),
    ];
    let idle = |(cost, before, message, begin, in_order): (Cost, Cost, Cost, &Vec<f64>, bool)| {
        let begin = begin.clone();
        let times =
            Times { cost, before, message, begin: begin.clone(), in_order, side_by_side: None };
        let timeline = Timeline::with(plan, times)?;
        let of_rank = |(own, begin): (&Vec<Ran>, &f64)| {
            let ends = std::iter::once(*begin).chain(own.iter().map(|ran| ran.end));
            let idle = |(ran, end): (&Ran, f64)| ran.start - end - before(&ran.action);
            own.iter().zip(ends).map(idle).collect()
        };
        Ok(timeline.ranks.iter().zip(&begin).map(of_rank).collect())
    };
    all.into_iter().map(idle).collect()
}

/// When each action was done.
fn ends(plan: &Plan, step: &[RankStep]) -> HashMap<Action, f64> {
    let of_rank = |(rank, own): (usize, &RankStep)| {
        let ends = own.actions.iter().map(|of| of.end).collect::<Vec<_>>();
        arithmetic(plan, rank).zip(ends).collect::<Vec<_>>()
    };
    step.iter().enumerate().flat_map(of_rank).collect()
}

/// A message as it was measured.
struct Travelled {
    /// How it is received.
    receive: Action,
    from: usize,
    to: usize,
    /// When it was there to be sent, when it could be received, and when the rank that waited for it had it.
    sent: f64,
    posted: f64,
    arrived: f64,
}

/// All messages, those to a rank in the order in which it receives them.
fn messages(plan: &Plan, step: &[RankStep], ends: &HashMap<Action, f64>) -> Vec<Travelled> {
    let placement = plan.shape().placement;
    let mut messages = Vec::new();
    for (to, own) in step.iter().enumerate() {
        for (action, of) in arithmetic(plan, to).zip(&own.actions) {
            let Some(receive) = received_for(&placement, &action) else { continue };
            let made = |stage, kind| ends.get(&Action { stage, kind, ..action }).copied();
            let (stage, sent) = match receive.kind {
                Kind::ReceiveForward => (action.stage - 1, made(action.stage - 1, Kind::Forward)),
                _ => {
                    let stage = action.stage + 1;
                    let whole = made(stage, Kind::Backward);
                    (stage, whole.or_else(|| made(stage, Kind::BackwardInput)))
                }
            };
            let (posted, arrived) = of.message;
            messages.push(Travelled {
                receive,
                from: placement.rank(stage),
                to,
                sent: sent.unwrap_or(posted),
                posted,
                // A rank that waited has the message only when it runs again.
                arrived: if arrived > of.asked { of.start } else { arrived },
            });
        }
    }
    messages
}

/// How long each message travelled, by how it is received: from the moment at which it was sent, could be received, and the
/// one before it had arrived.
fn travels(plan: &Plan, step: &[RankStep], ends: &HashMap<Action, f64>) -> HashMap<Action, f64> {
    let mut last: HashMap<(usize, usize, Kind), f64> = HashMap::new();
    let travelled = messages(plan, step, ends).into_iter().map(|of| {
        let queue = (of.from, of.to, of.receive.kind);
        let before = last.insert(queue, of.arrived).unwrap_or(f64::MIN);
        (of.receive, (of.arrived - of.posted.max(of.sent).max(before)).max(0.0))
    });
    travelled.collect()
}

#[cfg(test)]
mod tests {
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
        fn ledger(&self, plan: &Plan) -> Ledger {
            let quiet = measured(plan, self.cost, self.message, self.barrier);
            let late = |action: &Action| {
                let extra =
                    self.late.filter(|(of, _)| of == action).map_or(0.0, |(_, extra)| extra);
                (self.cost)(action) + extra
            };
            let step = measured(plan, &late, self.message, self.barrier);
            let usual = usual(plan, [&quiet[..], &quiet[..], &step[..]]);
            Ledger::of(plan, &step, &usual).unwrap()
        }
    }

    /// What ranks would measure.
    fn measured(
        plan: &Plan,
        cost: &dyn Fn(&Action) -> f64,
        message: f64,
        barrier: f64,
    ) -> Vec<RankStep> {
        let ranks = plan.shape().placement.ranks();
        let travel = |_: &Action| message;
        let times = Times {
            cost,
            before: &|_| 0.0,
            message: &travel,
            begin: vec![0.0; ranks],
            in_order: true,
            side_by_side: None,
        };
        let timeline = Timeline::with(plan, times).unwrap();
        let ran: HashMap<Action, Ran> =
            timeline.ranks.iter().flatten().map(|ran| (ran.action, *ran)).collect();
        let mut steps = Vec::new();
        for rank in 0..ranks {
            let mut own = RankStep::default();
            let mut ends = vec![0.0, 0.0];
            for action in arithmetic(plan, rank) {
                let Ran { start, end, .. } = ran[&action];
                let (asked, posted) = (ends[ends.len() - 1], ends[ends.len() - 2]);
                // As long as a message is not late, it does not matter when it has arrived.
                let arrived = if start > asked { start } else { asked };
                own.actions.push(Measured { asked, start, end, message: (posted, arrived) });
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

    fn total(ledger: &Ledger, cause: Cause) -> f64 {
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
                assert_eq!(account.of(Cause::Barrier), 0.5);
            }
        }
    }

    #[test]
    fn equal_stages_only_fill_and_drain() {
        let planted = Planted { cost: &even, message: 0.0, late: None, barrier: 0.0 };
        let ledger = planted.ledger(&plan(&OneFOneB));
        for (rank, account) in ledger.ranks.iter().enumerate() {
            let (fill, drain) = (rank as f64, 2.0 * (3 - rank) as f64 + (3 - rank) as f64);
            assert_eq!((account.of(Cause::Fill), account.of(Cause::Drain)), (fill, drain));
        }
        let others = [Cause::Imbalance, Cause::LatePeer, Cause::Transfer, Cause::HeadOfLine];
        assert!(others.iter().all(|cause| total(&ledger, *cause) == 0.0), "{ledger:?}");
    }

    #[test]
    fn a_slow_stage_is_imbalance_and_a_slow_moment_is_a_late_peer() {
        let plan = plan(&OneFOneB);
        // Stage 2 takes twice as long: the others wait for it.
        let slow = |action: &Action| even(action) * if action.stage == 2 { 2.0 } else { 1.0 };
        let ledger = Planted { cost: &slow, message: 0.0, late: None, barrier: 0.0 }.ledger(&plan);
        assert!(total(&ledger, Cause::Imbalance) > 40.0, "{ledger:?}");
        assert_eq!(total(&ledger, Cause::LatePeer), 0.0);
        // One pass takes 6 longer, once. The step is 6 longer, and the three other ranks wait.
        let late = Some((Action::new(3, Kind::Backward, 4), 6.0));
        let ledger = Planted { cost: &even, message: 0.0, late, barrier: 0.0 }.ledger(&plan);
        assert_eq!(total(&ledger, Cause::Imbalance), 0.0);
        let waited: Vec<f64> = ledger.ranks.iter().map(|of| of.of(Cause::LatePeer)).collect();
        assert_eq!(waited, [6.0, 6.0, 6.0, 0.0]);
        let named = ledger.gaps[0].iter().filter(|gap| gap.cause == Some(Cause::LatePeer)).count();
        assert!(named >= 1, "{ledger:?}");
    }

    #[test]
    fn messages_that_take_time_are_transfers() {
        let plan = plan(&OneFOneB);
        let ledger = Planted { cost: &even, message: 0.25, late: None, barrier: 0.0 }.ledger(&plan);
        // Rank 3 waits for the first input of three messages, and for each further one behind its own gradient.
        let none = Planted { cost: &even, message: 0.0, late: None, barrier: 0.0 }.ledger(&plan);
        let longer = ledger.ranks[0].step - none.ranks[0].step;
        assert!(longer > 0.0);
        let idle: f64 = total(&ledger, Cause::Transfer) + total(&ledger, Cause::HeadOfLine);
        let all: f64 = ledger.ranks.iter().zip(&none.ranks).map(|(a, b)| a.step - b.step).sum();
        assert!((idle - all).abs() < 1e-9, "{idle} {all}: {ledger:?}");
        assert_eq!(total(&ledger, Cause::Imbalance) + total(&ledger, Cause::LatePeer), 0.0);
    }

    #[test]
    fn clocks_that_are_apart_are_put_together() {
        let plan = plan(&OneFOneB);
        let step = measured(&plan, &even, 0.5, 0.0);
        let mut apart = step.clone();
        for of in &mut apart[2].actions {
            for at in
                [&mut of.asked, &mut of.start, &mut of.end, &mut of.message.0, &mut of.message.1]
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
        let mut step = measured(&plan, &even, 0.0, 0.0);
        step[1].actions.pop();
        assert!(Ledger::of(&plan, &step, &Usual::default()).is_err());
    }
}
