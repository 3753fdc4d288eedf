//! Where the idle time of a measured step comes from.
//!
//! The step is rehearsed several times, each time with one more of the things that were measured: with equal stages, with
//! stages as they usually are, with the messages, with their order, and with what each action took in this step. The
//! idle time that each adds is what it costs. What the last rehearsal does not explain is the rest; if it is small,
//! the parts can be believed.
//!
//! Input: a plan, and when each rank did what. Output: idle time by cause.

use std::collections::HashMap;

use crate::plan::received_for;
use crate::timeline::RehearsalTimes;
use crate::{Action, Costs, Kind, Plan, PlanError, Ran, Timeline};

/// Why a rank was idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IdleCause {
    /// It waits for an input, and would with equal stages and no messages: the pipeline is not full yet.
    Fill,
    /// It waits for a gradient, and would with equal stages and no messages: the pipeline runs empty.
    Drain,
    /// Stages do not take equally long.
    Imbalance,
    /// A message travels, or was not taken at once.
    Transfer,
    /// A message waits for those before it in its queue.
    HeadOfLine,
    /// A rank began later, or took longer, than it usually does.
    LatePeer,
    /// All ranks wait for each other: for the loss, or for the norm of all gradients.
    Barrier,
}

impl IdleCause {
    /// All of them, in the order of the rehearsals.
    pub const ALL: [Self; 7] = [
        Self::Fill,
        Self::Drain,
        Self::Imbalance,
        Self::Transfer,
        Self::HeadOfLine,
        Self::LatePeer,
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
    /// When the message that it needs, if any, could be received, and when it had arrived: if the rank waited for it, when it ran again.
    pub message: (f64, f64),
    /// How long the rank waited before it until its own messages had left.
    pub held: f64,
}

/// A step of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredStep {
    /// When it asked for the samples of the step.
    pub asked: f64,
    /// When it had them.
    pub begin: f64,
    /// Its arithmetic, in the order of its list.
    pub actions: Vec<Measured>,
    /// Its wait at the end for all other ranks.
    pub barrier: f64,
    /// When it was done, the optimizer included.
    pub end: f64,
}

/// Usual durations: medians over steps and micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usual {
    /// Each kind of action in each stage.
    pub actions: HashMap<(usize, Kind), f64>,
    /// A message, once it is sent and awaited.
    pub message: f64,
}

impl Usual {
    /// The usual duration of an action; zero if there was none.
    pub fn of(&self, stage: usize, kind: Kind) -> f64 {
        self.actions.get(&(stage, kind)).copied().unwrap_or(0.0)
    }

    /// The costs of the stages of a plan, if messages take no time.
    pub fn costs(&self, plan: &Plan) -> Costs {
        let stages = 0..plan.shape().placement.stages();
        let each = |part: &dyn Fn(usize) -> f64| stages.clone().map(part).collect::<Vec<f64>>();
        // A stage whose micro-batches are all run in whole backward passes only ever adds the halves up.
        let half = |stage, kind| match self.of(stage, kind) {
            0.0 => self.of(stage, Kind::Backward) / 2.0,
            own => own,
        };
        Costs {
            forward: each(&|stage| self.of(stage, Kind::Forward)),
            backward_input: each(&|stage| half(stage, Kind::BackwardInput)),
            backward_weight: each(&|stage| half(stage, Kind::BackwardWeight)),
            message: 0.0,
            side_by_side: None,
        }
    }
}

/// The idle time of a rank in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankAccount {
    /// The whole step.
    pub step: f64,
    /// Arithmetic, the optimizer, the hand-over of messages, and the synchronization of replicas with its waits.
    pub busy: f64,
    /// Idle time by cause, in the order of [`IdleCause::ALL`]. It is below zero where a cause takes away more idle time than it adds.
    pub idle: [f64; 7],
    /// Idle time without a cause.
    pub rest: f64,
}

impl RankAccount {
    /// The idle time of a cause.
    pub fn of(&self, cause: IdleCause) -> f64 {
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
    /// The largest cause; `None` if it is not known.
    pub cause: Option<IdleCause>,
}

/// The idle time of all ranks in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct IdleLedger {
    /// By rank.
    pub ranks: Vec<RankAccount>,
    /// The idle intervals before the actions of each rank, and the one at the end.
    pub gaps: Vec<Vec<Gap>>,
}

impl IdleLedger {
    /// The ledger of a step. `usual` has what actions usually take on the same ranks ([`usual`]).
    ///
    /// # Errors
    ///
    /// If the step has other actions than the plan.
    pub fn of(plan: &Plan, step: &[MeasuredStep], usual: &Usual) -> Result<Self, PlanError> {
        let ranks = plan.shape().placement.ranks();
        let fits = step.len() == ranks
            && (0..ranks).all(|rank| step[rank].actions.len() == arithmetic(plan, rank).count());
        if !fits {
            return Err(PlanError::Setting("the step is not one of this plan".to_owned()));
        }
        let layers = layers(plan, step, usual)?;
        let mut ledger = Self { ranks: Vec::new(), gaps: Vec::new() };
        for (rank, own) in step.iter().enumerate() {
            let mut account = RankAccount { step: own.end - own.begin, ..RankAccount::default() };
            let mut gaps = Vec::new();
            for (at, action) in arithmetic(plan, rank).enumerate() {
                let own = own.actions[at];
                let mut parts = [0.0; 7];
                let first = match action.kind {
                    Kind::Forward => IdleCause::Fill,
                    _ => IdleCause::Drain,
                };
                let causes = [first].into_iter().chain(IdleCause::ALL.into_iter().skip(2));
                let mut before = 0.0;
                for (cause, layer) in causes.zip(&layers) {
                    parts[cause as usize] += layer[rank][at] - before;
                    before = layer[rank][at];
                }
                let idle = own.start - own.asked;
                account.rest += idle - before;
                account.idle.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
                let most = IdleCause::ALL
                    .into_iter()
                    .max_by(|a, b| parts[*a as usize].total_cmp(&parts[*b as usize]));
                let cause = most.filter(|cause| parts[*cause as usize] > 0.0);
                gaps.push(Gap { start: own.asked, end: own.start, cause });
            }
            account.idle[IdleCause::Barrier as usize] = own.barrier;
            gaps.push(Gap {
                start: own.end - own.barrier,
                end: own.end,
                cause: Some(IdleCause::Barrier),
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

/// The usual durations of actions and messages in these steps.
pub fn usual<'a>(plan: &Plan, steps: impl IntoIterator<Item = &'a [MeasuredStep]>) -> Usual {
    let mut actions: HashMap<(usize, Kind), Vec<f64>> = HashMap::new();
    let mut messages = Vec::new();
    for step in steps {
        for (rank, own) in step.iter().enumerate() {
            for (action, (took, before)) in arithmetic(plan, rank).zip(durations(own)) {
                actions.entry((action.stage, action.kind)).or_default().push(took + before);
            }
        }
        messages.extend(travels(plan, step).into_values());
    }
    let actions = actions.into_iter().map(|(key, of)| (key, median(of))).collect();
    Usual { actions, message: median(messages) }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(0.0)
}

/// Puts the times of all ranks on the clock of the first one: between two clocks, messages seem to take longer one way by
/// what they take less the other way. Clocks that are closer than `tolerance` count as one.
pub fn on_one_clock(plan: &Plan, step: &mut [MeasuredStep], tolerance: f64) {
    let mut least: HashMap<(usize, usize), f64> = HashMap::new();
    for message in messages(plan, step) {
        let took = least.entry((message.from, message.to)).or_insert(f64::INFINITY);
        *took = took.min(message.arrived - message.sent);
    }
    let mut ahead = 0.0;
    for (rank, own) in step.iter_mut().enumerate().skip(1) {
        let way = |from, to| least.get(&(from, to)).copied();
        if let (Some(there), Some(back)) = (way(rank - 1, rank), way(rank, rank - 1)) {
            let apart = (there - back) / 2.0;
            ahead += if apart.abs() < tolerance { 0.0 } else { apart };
        }
        let moments = own.actions.iter_mut().flat_map(|of| {
            [&mut of.asked, &mut of.start, &mut of.end, &mut of.message.0, &mut of.message.1]
        });
        let whole = [&mut own.asked, &mut own.begin, &mut own.end];
        moments.chain(whole).for_each(|at| *at -= ahead);
    }
}

/// The timeline of a step as it was measured.
pub fn as_run(plan: &Plan, step: &[MeasuredStep]) -> Timeline {
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

fn arithmetic(plan: &Plan, rank: usize) -> impl Iterator<Item = Action> {
    plan.list(rank).iter().flat_map(|entry| entry.actions())
}

/// The durations of a rank's actions, and of its work before each, such as handing over a message.
fn durations(own: &MeasuredStep) -> impl Iterator<Item = (f64, f64)> {
    let before = std::iter::once(own.begin).chain(own.actions.iter().map(|of| of.end));
    own.actions.iter().zip(before).map(|(of, before)| (of.end - of.start, of.asked - before))
}

/// For each rank and each of its actions: how long the rank is idle before it.
type Idle = Vec<Vec<f64>>;

/// The idle times of each rehearsal.
fn layers(plan: &Plan, step: &[MeasuredStep], usual: &Usual) -> Result<[Idle; 5], PlanError> {
    let placement = plan.shape().placement;
    let ranks = 0..placement.ranks();
    let took: HashMap<Action, (f64, f64)> =
        ranks.clone().flat_map(|rank| arithmetic(plan, rank).zip(durations(&step[rank]))).collect();
    let travels = travels(plan, step);
    let mean = |kind: Kind| {
        let stages = (0..placement.stages()).filter_map(|at| usual.actions.get(&(at, kind)));
        let stages: Vec<f64> = stages.copied().collect();
        stages.iter().sum::<f64>() / stages.len().max(1) as f64
    };
    let even: HashMap<Kind, f64> = Kind::ALL.map(|kind| (kind, mean(kind))).into_iter().collect();
    let none = |_: &Action| 0.0;
    let alike = |action: &Action| even[&action.kind];
    let often = |action: &Action| usual.of(action.stage, action.kind);
    let message = |action: &Action| travels.get(action).copied().unwrap_or(0.0);
    let usually = |cost, message, in_order| {
        settled(plan, step, |begin| RehearsalTimes {
            cost,
            before: &none,
            message,
            begin,
            in_order,
            side_by_side: None,
        })
    };
    let now = RehearsalTimes {
        cost: &|action| took[action].0,
        before: &|action| took[action].1,
        message: &message,
        begin: step.iter().map(|own| own.begin).collect(),
        in_order: true,
        side_by_side: None,
    };
    Ok([
        usually(&alike, &none, true)?,
        usually(&often, &none, true)?,
        usually(&often, &message, false)?,
        usually(&often, &message, true)?,
        idle(plan, now)?.0,
    ])
}

/// A rehearsal of a step that follows others like it: a rank begins when it is done with the one before.
fn settled<'a>(
    plan: &Plan,
    step: &[MeasuredStep],
    times: impl Fn(Vec<f64>) -> RehearsalTimes<'a>,
) -> Result<Idle, PlanError> {
    let longest = step.iter().map(|own| own.end - own.begin).fold(0.0, f64::max);
    let barrier = step.iter().map(|own| own.barrier).fold(0.0, f64::max);
    let mut begin = vec![0.0; step.len()];
    // After a wait for each other, all ranks begin the next step together.
    if barrier < BARRIER * longest {
        for _ in 0..2 {
            let ends = idle(plan, times(begin))?.1;
            let tail = |own: &MeasuredStep| {
                own.end - own.barrier - own.actions.last().map_or(own.begin, |of| of.end)
            };
            begin = ends.iter().zip(step).map(|(end, own)| end + tail(own)).collect();
            let first = begin.iter().copied().fold(f64::INFINITY, f64::min);
            begin.iter_mut().for_each(|at| *at -= first);
        }
    }
    Ok(idle(plan, times(begin))?.0)
}

/// The part of a step from which waiting at its end counts as a barrier.
const BARRIER: f64 = 0.01;

/// How long each rank is idle before each action in a rehearsal, and when it is done with the last one.
fn idle(plan: &Plan, times: RehearsalTimes) -> Result<(Idle, Vec<f64>), PlanError> {
    let (begin, before) = (times.begin.clone(), times.before);
    let timeline = Timeline::with(plan, times)?;
    let of_rank = |(own, begin): (&Vec<Ran>, &f64)| {
        let ends = std::iter::once(*begin).chain(own.iter().map(|ran| ran.end));
        let idle = |(ran, end): (&Ran, f64)| ran.start - end - before(&ran.action);
        own.iter().zip(ends).map(idle).collect()
    };
    let idle = timeline.ranks.iter().zip(&begin).map(of_rank).collect();
    let last = |(own, begin): (&Vec<Ran>, &f64)| own.last().map_or(*begin, |ran| ran.end);
    Ok((idle, timeline.ranks.iter().zip(&begin).map(last).collect()))
}

/// When each message was sent: as soon as its rank was done with the arithmetic before it, and with waiting for its own messages.
fn sent(plan: &Plan, step: &[MeasuredStep]) -> HashMap<Action, f64> {
    let mut sent = HashMap::new();
    for (rank, own) in step.iter().enumerate() {
        let (mut done, mut ended, mut left) = (own.begin, own.begin, own.actions.iter());
        for action in plan.actions(rank) {
            match action.kind {
                Kind::SendForward | Kind::SendBackward => {
                    sent.insert(*action, done);
                }
                Kind::WaitSendForward | Kind::WaitSendBackward => {
                    done = ended + left.as_slice().first().map_or(0.0, |of| of.held);
                }
                kind if kind.computes() => {
                    ended = left.next().map_or(ended, |of| of.end);
                    done = ended;
                }
                _ => {}
            }
        }
    }
    sent
}

/// A message as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Travelled {
    /// How it is received.
    pub receive: Action,
    /// The ranks.
    pub from: usize,
    /// The same.
    pub to: usize,
    /// Which of the receiver's actions needs it.
    pub at: usize,
    /// When it could be sent.
    pub sent: f64,
    /// When it could be received.
    pub posted: f64,
    /// When it had arrived.
    pub arrived: f64,
}

/// Fills in when messages arrived that nobody waited for, whose arrival is not a number: after the usual time of those that
/// somebody waited for, and before they were needed.
pub fn fill_arrivals(plan: &Plan, steps: &mut [Vec<MeasuredStep>]) {
    let all: Vec<Vec<Travelled>> = steps.iter().map(|step| messages(plan, step)).collect();
    let took = |kind: Kind| {
        let known = all.iter().flatten().filter(|of| of.receive.kind == kind);
        let took = known.map(|of| of.arrived - of.posted.max(of.sent));
        median(took.filter(|took| !took.is_nan()).map(|took| took.max(0.0)).collect())
    };
    let usual = [Kind::ReceiveForward, Kind::ReceiveBackward].map(|kind| (kind, took(kind)));
    for (step, messages) in steps.iter_mut().zip(&all) {
        for of in messages.iter().filter(|of| of.arrived.is_nan()) {
            let took = usual.iter().find(|of_kind| of_kind.0 == of.receive.kind);
            let own = &mut step[of.to].actions[of.at];
            let arrived = of.posted.max(of.sent) + took.map_or(0.0, |of| of.1);
            own.message.1 = arrived.min(own.start);
        }
    }
}

/// All messages, those to a rank in the order in which it receives them.
pub fn messages(plan: &Plan, step: &[MeasuredStep]) -> Vec<Travelled> {
    let (placement, sent) = (plan.shape().placement, sent(plan, step));
    let mut messages = Vec::new();
    for (to, own) in step.iter().enumerate() {
        for (at, (action, of)) in arithmetic(plan, to).zip(&own.actions).enumerate() {
            let Some(receive) = received_for(&placement, &action) else { continue };
            let (stage, kind) = if receive.kind == Kind::ReceiveForward {
                (action.stage - 1, Kind::SendForward)
            } else {
                (action.stage + 1, Kind::SendBackward)
            };
            let sent = sent.get(&Action { stage, kind, ..action }).copied();
            let (posted, arrived) = of.message;
            messages.push(Travelled {
                receive,
                from: placement.rank(stage),
                to,
                at,
                sent: sent.unwrap_or(posted),
                posted,
                arrived,
            });
        }
    }
    messages
}

/// How long each message travelled, by how it is received, once it was sent, could be received, and the
/// one before it had arrived.
fn travels(plan: &Plan, step: &[MeasuredStep]) -> HashMap<Action, f64> {
    let mut last: HashMap<(usize, usize, Kind), f64> = HashMap::new();
    let travelled = messages(plan, step).into_iter().map(|of| {
        let queue = (of.from, of.to, of.receive.kind);
        let before = last.insert(queue, of.arrived).unwrap_or(f64::MIN);
        (of.receive, (of.arrived - of.posted.max(of.sent).max(before)).max(0.0))
    });
    travelled.collect()
}

#[cfg(test)]
mod tests;
