//! Reads lists as PyTorch's pipelining writes them: a row for each rank, a cell for each action.
//!
//! Input: the text of a file of `_dump_csv`, in either of its forms. Output: a plan, checked as any other; messages that the file
//! does not have are added as PyTorch adds them. An error names the rank, the column (counted from 1) and the action.

use std::collections::{HashMap, HashSet};

use crate::plan::{check_complete, received_for, sent_after};
use crate::timeline::needs;
use crate::{Action, Entry, Kind, Placement, Plan, PlanError, Shape};

/// The most cells of a file.
const MAX_CELLS: usize = 1 << 20;

/// The most rows, which is the most ranks of a run.
const MAX_RANKS: usize = 1024;

/// Actions that concern neither the order of passes nor messages: sharded parameters, and the sum of gradients.
const OTHERS: [&str; 4] = ["UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"];

/// The cells of a rank that are not empty.
type Row = Vec<Entry>;

/// The column of each action of each rank; the last one if it is there twice.
type Columns = HashMap<(usize, Action), usize>;

impl Plan {
    /// The plan of a file of PyTorch's `_dump_csv`.
    ///
    /// # Errors
    ///
    /// As [`Plan::of_lists`], and if a cell is no action, or if stages are placed as in none of our schedules.
    pub fn of_csv(text: &str) -> Result<Self, PlanError> {
        let (rows, columns) = rows(text)?;
        Self::of_rows(&rows).map_err(|error| located(error, &columns))
    }

    /// The plan of all that each rank does, with or without messages.
    ///
    /// # Errors
    ///
    /// As [`Plan::of_csv`].
    pub fn of_rows(rows: &[Vec<Entry>]) -> Result<Self, PlanError> {
        let is_work = |entry: &&Entry| entry.actions().all(|action| action.kind.computes());
        let works = |row: &Row| row.iter().filter(is_work).copied().collect::<Row>();
        let lists: Vec<Row> = rows.iter().map(works).collect();
        let shape = shape(&lists)?;
        check_complete(&shape, &lists)?;
        let has_messages = rows.iter().zip(&lists).any(|(row, list)| row.len() > list.len());
        let actions = if has_messages {
            let flat = |row: &Row| row.iter().flat_map(|entry| entry.actions()).collect();
            let actions: Vec<Vec<Action>> = rows.iter().map(flat).collect();
            check_messages(&shape.placement, &actions)?;
            actions
        } else {
            lowered(&shape.placement, &lists)
        };
        Self::rehearsed(shape, lists, actions)
    }
}

/// The rows of a file, and where each action is.
fn rows(text: &str) -> Result<(Vec<Row>, Columns), PlanError> {
    let (mut rows, mut columns) = (Vec::new(), Columns::new());
    let mut left = MAX_CELLS;
    for (rank, line) in text.trim_end().lines().enumerate() {
        if rank == MAX_RANKS {
            let problem = format!("more than {MAX_RANKS} rows (one for each rank)");
            return Err(PlanError::Setting(problem));
        }
        let mut row = Row::new();
        for (at, cell) in line.split(',').enumerate() {
            left = left.checked_sub(1).ok_or_else(|| {
                PlanError::Setting(format!(
                    "rank {rank}, column {}: more than a million cells",
                    at + 1
                ))
            })?;
            let entry = Entry::of_cell(cell.trim()).map_err(|problem| {
                PlanError::Setting(format!("rank {rank}, column {}: {problem}", at + 1))
            })?;
            for action in entry.iter().flat_map(|entry| entry.actions()) {
                columns.insert((rank, action), at + 1);
            }
            row.extend(entry);
        }
        rows.push(row);
    }
    Ok((rows, columns))
}

impl Entry {
    /// The content of a cell; `None` if it is empty or of no concern.
    ///
    /// # Errors
    ///
    /// If it is no action.
    pub fn of_cell(cell: &str) -> Result<Option<Self>, String> {
        let kind = cell.trim_start_matches(|c: char| c.is_ascii_digit());
        if cell.is_empty() || kind.len() < cell.len() && OTHERS.contains(&kind) {
            return Ok(None);
        }
        let pair = cell.strip_prefix('(').and_then(|cell| cell.strip_suffix(")OVERLAP_F_B"));
        let Some((first, second)) = pair.and_then(|pair| pair.split_once(';')) else {
            let shown: String = cell.chars().take(SHOWN).collect();
            return shown.parse().map(|action| Some(Self::One(action)));
        };
        let (first, second): (Action, Action) = (first.trim().parse()?, second.trim().parse()?);
        if !first.kind.computes() || !second.kind.computes() {
            return Err(format!("{first} and {second} are no pair of passes"));
        }
        Ok(Some(Self::Overlapped(first, second)))
    }
}

/// The most characters of a cell that are read: no action is longer.
const SHOWN: usize = 60;

/// The stages and micro-batches of lists.
fn shape(lists: &[Row]) -> Result<Shape, PlanError> {
    let ranks = lists.len();
    let (mut of_stage, mut micro_batches) = (HashMap::new(), HashSet::new());
    let mut last = None;
    for (rank, list) in lists.iter().enumerate() {
        for action in list.iter().flat_map(|entry| entry.actions()) {
            of_stage.entry(action.stage).or_insert_with(HashSet::new).insert(rank);
            micro_batches.insert(action.micro_batch);
            last = last.max(Some((action, rank)));
        }
    }
    let (stages, micro_batches) = (of_stage.len(), micro_batches.len());
    let refused = |text: String| Err(PlanError::Setting(text));
    let Some((action, rank)) = last else {
        return refused("there is no pass in it".to_owned());
    };
    if action.stage >= stages {
        let problem = "there is no pass of a stage before it; stages are counted from 0";
        return Err(PlanError::Action { rank, action, problem });
    }
    if stages.saturating_mul(micro_batches) > MAX_CELLS {
        return refused(format!("{stages} stages and {micro_batches} micro-batches: too many"));
    }
    if !stages.is_multiple_of(ranks) {
        return refused(format!("{ranks} rows (one for each rank) for {stages} stages"));
    }
    let looped = Placement::looped(ranks, stages / ranks);
    let v = Placement::v(ranks);
    let apart = |of: &Placement| {
        let own = |stage: usize| HashSet::from([of.rank(stage)]);
        (0..stages).find(|stage| of_stage.get(stage).is_some_and(|ranks| *ranks != own(*stage)))
    };
    let placement = if stages == 2 * ranks && apart(&looped).is_some() { v } else { looped };
    if let Some(stage) = apart(&placement)
        && of_stage.values().all(|ranks| ranks.len() == 1)
    {
        let rank = of_stage[&stage].iter().next().copied().unwrap_or_default();
        return refused(format!(
            "stage {stage} is on rank {rank}; stages must lie as in PyTorch's schedules, from the first rank to the last in each \
             loop, or to the last and back"
        ));
    }
    Ok(Shape { placement, micro_batches })
}

/// Checks the messages of lists: each is sent once after its pass, and received once before the pass that needs it.
fn check_messages(placement: &Placement, actions: &[Vec<Action>]) -> Result<(), PlanError> {
    let is_wait = |kind| matches!(kind, Kind::WaitSendForward | Kind::WaitSendBackward);
    let has_waits = actions.iter().flatten().any(|action| is_wait(action.kind));
    for (rank, list) in actions.iter().enumerate() {
        let refused = |action: Action, problem| Err(PlanError::Action { rank, action, problem });
        // Messages that must still be sent, sends that must still be waited for, and messages that a later pass uses.
        let (mut unsent, mut unawaited, mut unused) =
            (HashSet::new(), HashSet::new(), HashSet::new());
        for action in list {
            if let Some(receive) = received_for(placement, action)
                && !unused.remove(&receive)
            {
                return refused(receive, "it does not come before the pass that needs it");
            }
            unsent.extend(sent_after(placement, action));
            let is_known = match action.kind {
                Kind::SendForward | Kind::SendBackward => {
                    let is_new = unawaited.insert(*action);
                    unsent.remove(action) && is_new
                }
                Kind::ReceiveForward | Kind::ReceiveBackward => unused.insert(*action),
                Kind::WaitSendForward => {
                    unawaited.remove(&Action { kind: Kind::SendForward, ..*action })
                }
                Kind::WaitSendBackward => {
                    unawaited.remove(&Action { kind: Kind::SendBackward, ..*action })
                }
                _ => true,
            };
            if !is_known {
                return refused(
                    *action,
                    "it is there twice, or its pass or message does not come before it",
                );
            }
        }
        let first = |of: HashSet<Action>| of.into_iter().min();
        if let Some(action) = first(unsent) {
            return refused(action, "it is missing");
        }
        if let Some(action) = first(unused) {
            return refused(action, "no pass after it needs this message");
        }
        if let Some(action) = first(unawaited).filter(|_| has_waits) {
            return refused(action, "its WAIT_SEND is missing");
        }
    }
    Ok(())
}

/// The lists with messages, where PyTorch's `_add_send_recv` adds them: the ranks take turns, and whoever sends also writes down
/// that the other rank receives.
fn lowered(placement: &Placement, lists: &[Row]) -> Vec<Vec<Action>> {
    let mut actions: Vec<Vec<Action>> = vec![Vec::new(); lists.len()];
    let mut at = vec![0; lists.len()];
    let mut done: HashSet<Action> = HashSet::new();
    loop {
        let mut moved = false;
        for (rank, list) in lists.iter().enumerate() {
            let Some(entry) = list.get(at[rank]) else { continue };
            let is_ready = |action: Action| match received_for(placement, &action) {
                Some(receive) => done.contains(&receive),
                None => {
                    let mut needed = needs(placement, &action).into_iter().flatten();
                    needed.all(|of| done.contains(&of) || of.stage == action.stage)
                }
            };
            if !entry.actions().all(is_ready) {
                continue;
            }
            actions[rank].extend(entry.actions());
            for action in entry.actions() {
                let is_whole = action.kind == Kind::Backward;
                done.extend(is_whole.then_some(Action { kind: Kind::BackwardInput, ..action }));
                done.insert(action);
                if let Some(send) = sent_after(placement, &action) {
                    let receive = received_by(&send);
                    actions[rank].push(send);
                    actions[placement.rank(receive.stage)].push(receive);
                    done.insert(receive);
                }
            }
            at[rank] += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    // The rehearsal says why these cannot be carried out.
    for ((own, list), at) in actions.iter_mut().zip(lists).zip(at) {
        own.extend(list[at..].iter().flat_map(|entry| entry.actions()));
    }
    actions
}

impl Placement {
    /// The message that a pass needs from another rank, and the one that it makes for another rank.
    pub fn messages(&self, action: &Action) -> (Option<Action>, Option<Action>) {
        (received_for(self, action), sent_after(self, action))
    }
}

/// The other half of a message.
fn received_by(send: &Action) -> Action {
    if send.kind == Kind::SendForward {
        Action { stage: send.stage + 1, kind: Kind::ReceiveForward, ..*send }
    } else {
        Action { stage: send.stage - 1, kind: Kind::ReceiveBackward, ..*send }
    }
}

/// An error with the cells that it is about.
fn located(error: PlanError, columns: &Columns) -> PlanError {
    let mut error = error;
    if let PlanError::Deadlock(cycle) = &mut error {
        // The file may have both halves in one action.
        for of in cycle.iter_mut().filter(|of| of.needs.kind == Kind::BackwardInput) {
            let whole = Action { kind: Kind::Backward, ..of.needs };
            of.needs = if columns.contains_key(&(of.of, whole)) { whole } else { of.needs };
        }
    }
    let of: Vec<(usize, Action)> = match &error {
        PlanError::Setting(_) => Vec::new(),
        PlanError::Action { rank, action, .. } => vec![(*rank, *action)],
        PlanError::Order { ranks: (from, to), messages: (sent, awaited) } => {
            sent.map(|of| (*from, of)).into_iter().chain(awaited.map(|of| (*to, of))).collect()
        }
        PlanError::Deadlock(cycle) => {
            cycle.iter().flat_map(|of| [(of.rank, of.action), (of.of, of.needs)]).collect()
        }
    };
    let mut cells = Vec::new();
    for (rank, action) in of {
        let cell = columns.get(&(rank, action));
        let text = cell.map(|column| format!("{action} is rank {rank}, column {column}"));
        cells.extend(text.filter(|text| !cells.contains(text)));
    }
    let words = if cells.is_empty() { String::new() } else { format!(" ({})", cells.join("; ")) };
    PlanError::Setting(format!("{error}{words}"))
}
