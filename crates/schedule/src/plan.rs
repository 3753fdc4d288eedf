//! Plans: the lists of all ranks.

use crate::{Action, Costs, Entry, Kind, Placement, PlanError, Schedule, Timeline};

/// The stages and micro-batches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Which rank has which stages.
    pub placement: Placement,
    /// Into how many micro-batches a batch is divided.
    pub micro_batches: usize,
}

/// The actions of each rank in a step, messages included. A plan is complete, its messages match, and it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    shape: Shape,
    lists: Vec<Vec<Entry>>,
    /// The same with messages.
    actions: Vec<Vec<Action>>,
}

impl Plan {
    /// The plan of a schedule on `ranks` ranks.
    ///
    /// # Errors
    ///
    /// If the schedule does not know such a step, if the costs are not those of its stages, or as in [`Plan::of_lists`].
    pub fn new(
        schedule: &dyn Schedule,
        ranks: usize,
        micro_batches: usize,
        costs: impl FnOnce(&Placement) -> Costs,
    ) -> Result<Self, PlanError> {
        if ranks == 0 || micro_batches == 0 {
            let reason = format!(
                "{ranks} ranks and {micro_batches} micro-batches; there must be at least one of each"
            );
            return Err(PlanError::Setting(reason));
        }
        let shape = Shape { placement: schedule.placement(ranks), micro_batches };
        schedule.check(&shape)?;
        let (costs, stages) = (costs(&shape.placement), shape.placement.stages());
        let parts = [&costs.forward, &costs.backward_input, &costs.backward_weight];
        if let Some(part) = parts.into_iter().find(|part| part.len() != stages) {
            let reason = format!("{stages} stages, and costs of {}", part.len());
            return Err(PlanError::Setting(reason));
        }
        let lists = (0..ranks).map(|rank| schedule.list(&shape, rank, &costs)).collect();
        Self::of_lists(shape, lists)
    }

    /// A plan of these lists, one for each rank, without messages.
    ///
    /// # Errors
    ///
    /// If an action is missing, there twice, or on the wrong rank; if messages of two ranks are not sent in the order in which
    /// they are awaited; if ranks deadlock.
    pub fn of_lists(shape: Shape, lists: Vec<Vec<Entry>>) -> Result<Self, PlanError> {
        check_complete(&shape, &lists)?;
        let actions = lists.iter().map(|list| with_messages(&shape.placement, list)).collect();
        Self::rehearsed(shape, lists, actions)
    }

    /// A plan of complete lists and of the same with messages.
    pub(crate) fn rehearsed(
        shape: Shape,
        lists: Vec<Vec<Entry>>,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self, PlanError> {
        let plan = Self { shape, lists, actions };
        let costs = Costs::even(&shape.placement, 1.0, 1.0, 1.0);
        Timeline::of(&plan, &costs)?;
        Ok(plan)
    }

    /// Its stages and micro-batches.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The arithmetic of a rank.
    pub fn list(&self, rank: usize) -> &[Entry] {
        &self.lists[rank]
    }

    /// All that a rank does, messages included.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// The most micro-batches on a rank between their forward pass and the end of their backward pass.
    /// With several chunks, each holds a part of a micro-batch.
    pub fn in_flight(&self, rank: usize) -> f64 {
        let placement = &self.shape.placement;
        self.kept(&vec![1.0; placement.stages()])[rank] / placement.chunks() as f64
    }

    /// The most that each rank keeps of micro-batches in flight, if each keeps this much in each stage.
    pub fn kept(&self, of_stages: &[f64]) -> Vec<f64> {
        let of_rank = |list: &Vec<Entry>| {
            let (mut now, mut most) = (0.0f64, 0.0f64);
            for action in list.iter().flat_map(|entry| entry.actions()) {
                match action.kind {
                    Kind::Forward => now += of_stages[action.stage],
                    Kind::Backward | Kind::BackwardWeight => now -= of_stages[action.stage],
                    _ => {}
                }
                most = most.max(now);
            }
            most
        };
        self.lists.iter().map(of_rank).collect()
    }

    /// Whether each stage adds up the gradients of the micro-batches in their order, as one process does.
    pub fn adds_in_order(&self) -> bool {
        let mut next = vec![0; self.shape.placement.stages()];
        let all = self.lists.iter().flatten().flat_map(|entry| entry.actions());
        all.filter(|action| matches!(action.kind, Kind::Backward | Kind::BackwardWeight)).all(
            |action| {
                let next = &mut next[action.stage];
                *next += 1;
                action.micro_batch + 1 == *next
            },
        )
    }

    /// The lists as CSV, one row for each rank, in the form of PyTorch's pipelining.
    pub fn csv(&self) -> String {
        let text = |entry: &Entry| match entry {
            Entry::One(action) => action.to_string(),
            Entry::Overlapped(first, second) => format!("({first};{second})OVERLAP_F_B"),
        };
        let row = |list: &Vec<Entry>| list.iter().map(text).collect::<Vec<_>>().join(",") + "\n";
        self.lists.iter().map(row).collect()
    }
}

/// Checks that each rank does the arithmetic of its stages, each piece once and each micro-batch's in order.
pub(crate) fn check_complete(shape: &Shape, lists: &[Vec<Entry>]) -> Result<(), PlanError> {
    let Shape { placement, micro_batches } = *shape;
    if lists.len() != placement.ranks() {
        let (got, ranks) = (lists.len(), placement.ranks());
        return Err(PlanError::Setting(format!("{got} lists for {ranks} ranks")));
    }
    // What has been done of each stage and micro-batch: nothing, the forward pass, the input half, everything.
    let mut done = vec![Kind::ReceiveForward; placement.stages() * micro_batches];
    for (rank, list) in lists.iter().enumerate() {
        for action in list.iter().flat_map(|entry| entry.actions()) {
            let refused = |problem: &'static str| Err(PlanError::Action { rank, action, problem });
            let Action { stage, kind, micro_batch } = action;
            if stage >= placement.stages() || micro_batch >= micro_batches {
                return refused("there is no such stage or micro-batch");
            }
            if placement.rank(stage) != rank {
                return refused("another rank has this stage");
            }
            let done = &mut done[stage * micro_batches + micro_batch];
            *done = match (*done, kind) {
                (Kind::ReceiveForward, Kind::Forward) => Kind::Forward,
                (Kind::Forward, Kind::BackwardInput) => Kind::BackwardInput,
                (Kind::Forward, Kind::Backward) => Kind::Backward,
                (Kind::BackwardInput, Kind::BackwardWeight) => Kind::Backward,
                _ if !kind.computes() => return refused("messages follow from the arithmetic"),
                (Kind::ReceiveForward, _) => {
                    return refused("its forward pass does not come before it");
                }
                (Kind::Forward, Kind::BackwardWeight) => {
                    return refused("its input half does not come before it");
                }
                _ => return refused("it is there twice"),
            };
        }
    }
    match done.iter().position(|done| *done != Kind::Backward) {
        None => Ok(()),
        Some(at) => {
            let (stage, micro_batch) = (at / micro_batches, at % micro_batches);
            let next = match done[at] {
                Kind::ReceiveForward => Kind::Forward,
                Kind::Forward => Kind::Backward,
                _ => Kind::BackwardWeight,
            };
            let (rank, action) = (placement.rank(stage), Action::new(stage, next, micro_batch));
            Err(PlanError::Action { rank, action, problem: "it is missing" })
        }
    }
}

/// A list with its messages. Each is sent right after its action, and may arrive while the action before the one that
/// needs it runs.
fn with_messages(placement: &Placement, list: &[Entry]) -> Vec<Action> {
    let computed: Vec<Action> = list.iter().flat_map(|entry| entry.actions()).collect();
    let receives = |action: &Action| received_for(placement, action);
    let mut actions = Vec::with_capacity(3 * computed.len());
    actions.extend(computed.first().and_then(receives));
    for (at, action) in computed.iter().enumerate() {
        actions.extend(computed.get(at + 1).and_then(receives));
        actions.push(*action);
        actions.extend(sent_after(placement, action));
    }
    actions
}

/// The message that an action needs, if it comes from another rank.
pub(crate) fn received_for(placement: &Placement, action: &Action) -> Option<Action> {
    let Action { stage, kind, micro_batch } = *action;
    let (from, kind) = match kind {
        Kind::Forward => (stage.checked_sub(1)?, Kind::ReceiveForward),
        Kind::Backward | Kind::BackwardInput => (stage + 1, Kind::ReceiveBackward),
        _ => return None,
    };
    let is_elsewhere = from < placement.stages() && placement.rank(from) != placement.rank(stage);
    is_elsewhere.then(|| Action::new(stage, kind, micro_batch))
}

/// The message that an action makes, if it goes to another rank.
pub(crate) fn sent_after(placement: &Placement, action: &Action) -> Option<Action> {
    let Action { stage, kind, micro_batch } = *action;
    let (to, kind) = match kind {
        Kind::Forward => (stage + 1, Kind::SendForward),
        Kind::Backward | Kind::BackwardInput => (stage.checked_sub(1)?, Kind::SendBackward),
        _ => return None,
    };
    let is_elsewhere = to < placement.stages() && placement.rank(to) != placement.rank(stage);
    is_elsewhere.then(|| Action::new(stage, kind, micro_batch))
}
