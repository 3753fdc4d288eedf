//! Rehearsal: when each rank does what, if each action takes a stated time.
//!
//! A rank does one thing after the other; a message travels by itself, once it
//! is sent and awaited, and messages of one kind from one rank to another follow each other. Times are in the unit of the
//! costs. Nothing is computed.

use std::collections::HashMap;

use crate::{Action, Costs, Entry, Kind, Placement, Plan, PlanError, Waiting};

/// When an action is carried out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ran {
    /// The action. Messages are not among them.
    pub action: Action,
    /// When it begins.
    pub start: f64,
    /// When it is done.
    pub end: f64,
}

/// When each rank does what.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The arithmetic of each rank, in order.
    pub ranks: Vec<Vec<Ran>>,
    /// When the last rank is done.
    pub makespan: f64,
}

impl Timeline {
    /// Rehearses a plan.
    ///
    /// # Errors
    ///
    /// If messages do not match, or if ranks deadlock.
    pub fn of(plan: &Plan, costs: &Costs) -> Result<Self, PlanError> {
        Self::beginning_at(plan, costs, vec![0.0; plan.shape().placement.ranks()])
    }

    /// Rehearses a plan whose ranks begin at these times.
    pub(crate) fn beginning_at(
        plan: &Plan,
        costs: &Costs,
        begin: Vec<f64>,
    ) -> Result<Self, PlanError> {
        let times = RehearsalTimes {
            cost: &|action| costs.of(action),
            before: &|_| 0.0,
            message: &|_| costs.message,
            begin,
            in_order: true,
            side_by_side: costs.side_by_side,
        };
        Self::with(plan, times)
    }

    /// Rehearses a plan in which each action and each message takes its own time.
    pub(crate) fn with(plan: &Plan, times: RehearsalTimes) -> Result<Self, PlanError> {
        let placement = plan.shape().placement;
        let mut rehearsal = RehearsalState::new(plan, times);
        let lists: Vec<&[Action]> = (0..placement.ranks()).map(|rank| plan.actions(rank)).collect();
        loop {
            let mut moved = false;
            for (rank, list) in lists.iter().enumerate() {
                while let Some(action) = list.get(rehearsal.at[rank]) {
                    if rehearsal.carry_out(rank, action)?.is_some() {
                        break;
                    }
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        rehearsal.finish(&lists)
    }

    /// The time in which a rank computes.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|ran| ran.end - ran.start).sum()
    }

    /// The longest time from a rank's first action to the end of its last one.
    pub fn longest_rank(&self) -> f64 {
        let span = |ran: &Vec<Ran>| match (ran.first(), ran.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.ranks.iter().map(span).fold(0.0, f64::max)
    }

    /// The part of the ranks' time until the last one is done in which they do not compute.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.busy(rank)).sum();
        let all = self.makespan * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - busy / all } else { 0.0 }
    }
}

/// The durations in a rehearsal.
pub(crate) struct RehearsalTimes<'a> {
    /// Arithmetic.
    pub(crate) cost: &'a dyn Fn(&Action) -> f64,
    /// The rank's work before it can wait for the arithmetic's input.
    pub(crate) before: &'a dyn Fn(&Action) -> f64,
    /// A message, named by how it is received.
    pub(crate) message: &'a dyn Fn(&Action) -> f64,
    /// When each rank begins.
    pub(crate) begin: Vec<f64>,
    /// Whether a message waits for those before it in its queue.
    pub(crate) in_order: bool,
    /// See [`Costs::side_by_side`].
    pub(crate) side_by_side: Option<f64>,
}

/// Messages of one kind from one rank to another.
#[derive(Debug, Default)]
struct MessageQueue {
    /// Messages that have been sent, and when.
    sent: Vec<(Action, f64)>,
    /// Messages that are awaited, and since when.
    awaited: Vec<(Action, f64)>,
    /// The position of each awaited message.
    positions: HashMap<Action, usize>,
    /// When messages have left: both ranks have asked for them.
    left: Vec<f64>,
    /// When they have arrived.
    arrived: Vec<f64>,
}

/// Two ranks, and whether messages between them go forward.
type Route = (usize, usize, bool);

struct RehearsalState<'a> {
    placement: Placement,
    times: RehearsalTimes<'a>,
    /// The next action of each rank, and when the rank is free for it.
    at: Vec<usize>,
    free: Vec<f64>,
    ran: Vec<Vec<Ran>>,
    done: HashMap<Action, f64>,
    /// The second action of each pair, by the first one.
    second: HashMap<Action, Action>,
    queues: HashMap<Route, MessageQueue>,
}

impl<'a> RehearsalState<'a> {
    fn new(plan: &Plan, times: RehearsalTimes<'a>) -> Self {
        let placement = plan.shape().placement;
        let ranks = placement.ranks();
        let entries = (0..ranks).flat_map(|rank| plan.list(rank));
        let pair = |entry: &Entry| match *entry {
            Entry::One(_) => None,
            Entry::Overlapped(first, second) => Some((first, second)),
        };
        let second = entries.filter_map(pair).collect();
        let (done, queues) = (HashMap::new(), HashMap::new());
        let (at, free, ran) = (vec![0; ranks], times.begin.clone(), vec![Vec::new(); ranks]);
        Self { placement, times, at, free, ran, done, second, queues }
    }

    /// Carries an action out, or says what has to be done before.
    fn carry_out(&mut self, rank: usize, action: &Action) -> Result<Option<Waiting>, PlanError> {
        if let Some(waiting) = self.waits_for_send(rank, action) {
            return Ok(waiting);
        }
        if !action.kind.computes() {
            self.pass_on(rank, action)?;
            self.at[rank] += 1;
            return Ok(None);
        }
        if self.done.contains_key(action) {
            // It was the second one of a pair.
            self.at[rank] += 1;
            return Ok(None);
        }
        let second = self.times.side_by_side.and_then(|_| self.second.get(action).copied());
        let mut start = self.free[rank] + (self.times.before)(action);
        for action in std::iter::once(*action).chain(second) {
            for needs in needs(&self.placement, &action).into_iter().flatten() {
                match self.known(rank, &action, &needs) {
                    Some(time) => start = start.max(time),
                    None => {
                        let of = self.placement.rank(needs.stage);
                        return Ok(Some(Waiting { rank, action, needs, of }));
                    }
                }
            }
        }
        let part = self.times.side_by_side.filter(|_| second.is_some()).unwrap_or(1.0);
        let actions = || std::iter::once(*action).chain(second);
        let end = start + part * actions().map(|action| (self.times.cost)(&action)).sum::<f64>();
        for action in actions() {
            let own_end = (start + part * (self.times.cost)(&action)).min(end);
            self.ran[rank].push(Ran { action, start, end: own_end });
            start = own_end;
            self.done.insert(action, end);
            if action.kind == Kind::Backward {
                // For actions that need the input half alone.
                self.done.insert(Action { kind: Kind::BackwardInput, ..action }, end);
            }
        }
        self.free[rank] = end;
        self.at[rank] += 1;
        Ok(None)
    }

    /// When what an action needs is there; `None` if nobody knows yet.
    fn known(&self, rank: usize, action: &Action, needs: &Action) -> Option<f64> {
        let from = self.placement.rank(needs.stage);
        if from == rank {
            return self.done.get(needs).copied();
        }
        let forward = needs.stage < action.stage;
        let queue = self.queues.get(&(from, rank, forward))?;
        let kind = if forward { Kind::ReceiveForward } else { Kind::ReceiveBackward };
        let position = queue.positions.get(&Action { kind, ..*action })?;
        queue.arrived.get(*position).copied()
    }

    /// Lets a rank wait until a message of it has left, if that is the action.
    fn waits_for_send(&mut self, rank: usize, action: &Action) -> Option<Option<Waiting>> {
        let (stage, kind) = match action.kind {
            Kind::WaitSendForward => (action.stage + 1, Kind::ReceiveForward),
            Kind::WaitSendBackward => (action.stage - 1, Kind::ReceiveBackward),
            _ => return None,
        };
        let needs = Action { stage, kind, ..*action };
        let of = self.placement.rank(stage);
        let queue = self.queues.get(&(rank, of, kind == Kind::ReceiveForward));
        let left = queue.and_then(|queue| queue.left.get(*queue.positions.get(&needs)?).copied());
        let Some(left) = left else {
            return Some(Some(Waiting { rank, action: *action, needs, of }));
        };
        self.free[rank] = self.free[rank].max(left);
        self.at[rank] += 1;
        Some(None)
    }

    /// Takes a message of a rank, or its wish to receive one.
    fn pass_on(&mut self, rank: usize, action: &Action) -> Result<(), PlanError> {
        let Action { stage, kind, .. } = *action;
        let (other, forward) = match kind {
            Kind::SendForward => (stage + 1, true),
            Kind::ReceiveForward => (stage - 1, true),
            Kind::SendBackward => (stage - 1, false),
            _ => (stage + 1, false),
        };
        let other = self.placement.rank(other);
        let sends = matches!(kind, Kind::SendForward | Kind::SendBackward);
        let route = if sends { (rank, other, forward) } else { (other, rank, forward) };
        let queue = self.queues.entry(route).or_default();
        if !sends {
            queue.positions.insert(*action, queue.awaited.len());
        }
        let side = if sends { &mut queue.sent } else { &mut queue.awaited };
        side.push((*action, self.free[rank]));
        while let (Some((sent, since)), Some((awaited, wanted))) =
            (queue.sent.get(queue.arrived.len()), queue.awaited.get(queue.arrived.len()))
        {
            let next = if forward { sent.stage + 1 } else { sent.stage - 1 };
            if (next, sent.micro_batch) != (awaited.stage, awaited.micro_batch) {
                let messages = (Some(*sent), Some(*awaited));
                return Err(PlanError::Order { ranks: (route.0, route.1), messages });
            }
            let before = queue.arrived.last().copied().filter(|_| self.times.in_order);
            let begin = since.max(*wanted).max(before.unwrap_or(f64::MIN));
            queue.left.push(since.max(*wanted));
            queue.arrived.push(begin + (self.times.message)(awaited));
        }
        Ok(())
    }

    /// The timeline, if all ranks have come to their end.
    fn finish(mut self, lists: &[&[Action]]) -> Result<Timeline, PlanError> {
        let stuck = (0..lists.len()).find(|rank| self.at[*rank] < lists[*rank].len());
        if let Some(first) = stuck {
            return Err(self.cycle(first, lists));
        }
        let mut makespan = self.free.iter().copied().fold(f64::MIN, f64::max);
        for (&(from, to, _), queue) in &self.queues {
            let at = queue.arrived.len();
            let at = |side: &[(Action, f64)]| side.get(at).map(|(action, _)| *action);
            let messages = (at(&queue.sent), at(&queue.awaited));
            if messages != (None, None) {
                return Err(PlanError::Order { ranks: (from, to), messages });
            }
            makespan = queue.arrived.last().copied().map_or(makespan, |last| last.max(makespan));
        }
        Ok(Timeline { ranks: self.ran, makespan })
    }

    /// Ranks that wait for each other, found from one that waits.
    fn cycle(&mut self, first: usize, lists: &[&[Action]]) -> PlanError {
        let mut path: Vec<Waiting> = Vec::new();
        let mut rank = first;
        loop {
            if let Some(begin) = path.iter().position(|waiting| waiting.rank == rank) {
                return PlanError::Deadlock(path.split_off(begin));
            }
            let action = lists[rank].get(self.at[rank]).copied();
            match action.map(|action| self.carry_out(rank, &action)) {
                Some(Ok(Some(waiting))) => {
                    path.push(waiting);
                    rank = waiting.of;
                }
                Some(Err(error)) => return error,
                // A rank at its end cannot be waited for: the check of completeness has found what it leaves out.
                _ => return PlanError::Deadlock(path),
            }
        }
    }
}

/// The actions that must be done before an action.
pub(crate) fn needs(placement: &Placement, action: &Action) -> [Option<Action>; 2] {
    let Action { stage, kind, micro_batch } = *action;
    let at = |stage, kind| Some(Action::new(stage, kind, micro_batch));
    match kind {
        Kind::Forward => [stage.checked_sub(1).and_then(|before| at(before, kind)), None],
        Kind::Backward | Kind::BackwardInput => {
            let is_last = stage + 1 == placement.stages();
            let gradient = if is_last { None } else { at(stage + 1, Kind::BackwardInput) };
            [at(stage, Kind::Forward), gradient]
        }
        Kind::BackwardWeight => [at(stage, Kind::BackwardInput), None],
        _ => [None, None],
    }
}
