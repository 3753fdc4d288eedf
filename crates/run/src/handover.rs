//! How the state of a run goes from the ranks of one generation to those of the next.
//!
//! Each rank that was there brings the elements that it certainly has after the last step that all can reach: its shard, or all of a
//! replica, and the copy of another rank's shard. Elements that every rank has are copied at home. The others are sent to all
//! by the first rank that has them.
//!
//! Input: what a rank has kept, and the ranks of both generations. Output: the values and the optimizer's state of the new ones. This file does not know who
//! is gone, or why.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use paceline_checkpoint::pieces::{self, Piece, Ranges};
use paceline_checkpoint::progress::Progress;
use paceline_checkpoint::{self as checkpoint, Checkpoint, Previous};
use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{Optimizer, Storage};
use paceline_rendezvous::RunMember;
use paceline_settings::config::TrainConfig;
use paceline_strategies::{InterruptedStep, LeftTrainer, PeerShard, Replica, Stepped};
use serde::{Deserialize, Serialize};

use crate::resume::Begin;
use crate::training::{AfterStep, Training, batches_of_step};

/// The state that a rank has of a generation that is over.
pub(crate) struct Kept {
    left: LeftTrainer,
    /// The step that it may have to complete.
    interrupted: Option<InterruptedStep>,
}

/// Where a rank stands, for the others.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct RankStanding {
    progress: Progress,
    after: Option<AfterStep>,
    stepped: Option<Stepped>,
    optimizer_steps: u64,
    /// The steps of this run so far.
    num_steps: u64,
    /// Whether all ranks of its generation can complete one step more.
    has_passed: bool,
}

/// The words of a rank that meets the others again: where it stands, if it has state, and whether it knows that no step was made.
type Said = (Option<RankStanding>, bool);

/// The state from which the ranks of a generation begin.
pub(crate) struct HandedOver<'h> {
    /// The ranks of the generation, with those that only bring state.
    all: &'h Group,
    /// Where the ranks that bring state stand. `None` if no rank brings any.
    standing: Option<(Progress, u64)>,
    /// Whether no step was made yet.
    is_beginning: bool,
    pieces: Vec<Piece>,
    /// Whether this rank has listeners from an earlier generation.
    pub(crate) has_listeners: bool,
}

/// Elements of a tensor that a rank has.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct HeldPiece {
    name: String,
    range: Range<usize>,
    dtype: String,
}

impl HeldPiece {
    fn of(piece: &Piece) -> Self {
        let range = piece.start..piece.start + piece.data.num_elems();
        Self { name: piece.name.clone(), range, dtype: piece.data.dtype().name().to_owned() }
    }
}

/// Elements of a tensor, and the rank that has them.
type Held = (Range<usize>, usize);

impl Kept {
    pub(crate) fn new(left: LeftTrainer) -> Self {
        let interrupted = left.interrupted();
        Self { left, interrupted }
    }

    fn standing(&self, run: &Training) -> RankStanding {
        RankStanding {
            progress: run.progress,
            after: run.after,
            stepped: run.regroups.stepped,
            optimizer_steps: self.left.optimizer.steps(),
            num_steps: run.num_steps,
            has_passed: self.interrupted.is_some_and(|step| step.has_passed),
        }
    }

    /// Makes `run` and this state those of the last step that all ranks of the old generation can reach. Collective among `all`;
    /// ranks without state pass `None`, and advance to the others' step. `is_beginning` says that this rank knows that no step was made.
    pub(crate) fn agree<'h>(
        (kept, is_beginning): (Option<&mut Self>, bool),
        run: &mut Training,
        config: &TrainConfig,
        all: &'h Group,
    ) -> Result<HandedOver<'h>> {
        let own = kept.as_ref().map(|kept| kept.standing(run));
        let said: Vec<Said> = all.all_gather_object(&(own, is_beginning))?;
        let mut handed = HandedOver {
            all,
            standing: None,
            is_beginning: said.iter().any(|(_, is_beginning)| *is_beginning),
            pieces: Vec::new(),
            has_listeners: false,
        };
        let reached = |of: &RankStanding| of.progress.steps + u64::from(of.has_passed);
        let Some(reached) = said.iter().filter_map(|(of, _)| of.as_ref()).map(reached).max() else {
            return Ok(handed);
        };
        let mut own = None;
        if let Some(kept) = kept {
            if run.progress.steps < reached {
                let step = kept.interrupted.take().ok_or_else(|| behind(run, reached))?;
                kept.left.complete()?;
                let num_batches = batches_of_step(config, &run.progress);
                run.advance(config, num_batches, step.stepped.loss.samples, &step.stepped);
            }
            kept.interrupted = None;
            kept.left.restore_buffers()?;
            handed.pieces = pieces_of(&kept.left)?;
            own = Some(kept.standing(run));
        }
        // An evaluation or a save that one rank has not finished is made again by all.
        let standings: Vec<RankStanding> =
            all.all_gather_object(&own)?.into_iter().flatten().collect();
        let first = standings.iter().find(|of| of.after.is_some()).unwrap_or(&standings[0]);
        (run.progress, run.after, run.num_steps) = (first.progress, first.after, first.num_steps);
        run.regroups.stepped = first.stepped;
        handed.standing = Some((first.progress, first.optimizer_steps));
        Ok(handed)
    }
}

/// The elements that a rank certainly has.
fn pieces_of(left: &LeftTrainer) -> Result<Vec<Piece>> {
    let mut all =
        pieces::of_ranges("", &Ranges::from(&left.valid), &left.storage, &left.optimizer)?;
    if let Some(PeerShard { owned, storage, optimizer, .. }) = left.peer() {
        all.extend(pieces::of_ranges("", &Ranges::from(owned), storage, optimizer)?);
    }
    all.extend(buffers_of(&left.storage)?);
    Ok(all)
}

/// The running statistics of the units that a rank computes.
fn buffers_of(storage: &Storage) -> Result<Vec<Piece>> {
    pieces::of_buffers(storage, |unit| !storage.layout().unit(unit).is_elsewhere)
}

fn behind(run: &Training, reached: u64) -> Failure {
    Failure::Run(format!(
        "this rank has made {} steps and cannot make step {reached}, which another rank has made",
        run.progress.steps
    ))
}

impl HandedOver<'_> {
    /// Gives this rank's state to the others, and takes what `replica` needs. `None` if no rank has some of it: then the run begins at its
    /// last checkpoint, or `member` tells the others that nobody can go on. Collective among the ranks of both generations.
    pub(crate) fn take_over(
        &self,
        config: &TrainConfig,
        replica: &Replica,
        optimizer: &mut Optimizer,
        member: Option<&RunMember>,
    ) -> Result<Option<Begin>> {
        let lost = || lost(config, replica, member).map(|()| None);
        let Some((progress, steps)) = self.standing else {
            return if self.is_beginning { Ok(None) } else { lost() };
        };
        let storage = &replica.storage;
        let values = storage.values().ranges().to_vec();
        let held = Ranges { values, ..Ranges::from(&replica.owned) };
        let mut wanted = pieces::of_ranges("", &held, storage, optimizer)?;
        wanted.extend(buffers_of(storage)?);
        if !self.exchange(&wanted)? {
            return lost();
        }
        optimizer.resume_after(steps);
        let save = config.checkpoints.save.as_deref();
        let previous = save.filter(|_| replica.world.rank() == 0).and_then(newest);
        Ok(Some(Begin { progress, previous }))
    }

    /// The same for a rank that only brings state.
    pub(crate) fn give(&self) -> Result<()> {
        if self.standing.is_some() {
            self.exchange(&[])?;
        }
        Ok(())
    }

    /// Fills the pieces that this rank wants with those that the ranks have. Returns whether all ranks have got all.
    fn exchange(&self, wanted: &[Piece]) -> Result<bool> {
        let own: Vec<HeldPiece> = self.pieces.iter().map(HeldPiece::of).collect();
        let mut catalog: BTreeMap<(String, String), Vec<Held>> = BTreeMap::new();
        for (rank, entries) in self.all.all_gather_object(&own)?.into_iter().enumerate() {
            for HeldPiece { name, range, dtype } in entries {
                catalog.entry((name, dtype)).or_default().push((range, rank));
            }
        }
        let mut parts = Vec::new();
        for ((name, dtype), held) in &catalog {
            let dtype = dtype.parse().unwrap_or(DType::U8);
            parts.extend(segments(held).into_iter().map(|segment| (name, dtype, segment)));
        }
        let has = |piece: &Piece| {
            let found = parts.iter().filter(|(name, ..)| piece.name == **name);
            found.map(|(_, _, (range, _))| common(piece, range).len()).sum::<usize>()
        };
        // Nothing is copied unless all is there: the run begins elsewhere, perhaps with its first weights.
        let has_all = wanted.iter().all(|piece| has(piece) == piece.data.num_elems());
        if !self.all.all_gather_object(&has_all)?.into_iter().all(|has_all| has_all) {
            return Ok(false);
        }
        for (name, dtype, (range, holders)) in &parts {
            let Some(part) = self.bring(name, *dtype, range, holders)? else { continue };
            let mut of_name = wanted.iter().filter(|piece| piece.name == **name);
            of_name.try_for_each(|piece| copy_common(piece, range, &part))?;
        }
        Ok(true)
    }

    /// Elements that these ranks have: at home if all have them, and otherwise sent by the first of them.
    fn bring(
        &self,
        name: &str,
        dtype: DType,
        range: &Range<usize>,
        holders: &[usize],
    ) -> Result<Option<Tensor>> {
        let own = self.part(name, range);
        if holders.len() == self.all.world_size() {
            return Ok(own);
        }
        let new = || Allocator::new().tensor(dtype, [range.len()], Category::Communication);
        let part = own.map_or_else(new, Ok)?;
        self.all.broadcast(&part, holders[0])?;
        Ok(Some(part))
    }

    /// This rank's elements of a range, if it has all of them in one piece.
    fn part(&self, name: &str, range: &Range<usize>) -> Option<Tensor> {
        self.pieces.iter().filter(|piece| piece.name == name).find_map(|piece| {
            let begin = range.start.checked_sub(piece.start)?;
            let end = begin + range.len();
            (end <= piece.data.num_elems()).then(|| piece.data.slice(begin..end).ok())?
        })
    }
}

/// Cuts ranges where one of them begins or ends. Returns each part with the ranks that have it.
fn segments(held: &[Held]) -> Vec<(Range<usize>, Vec<usize>)> {
    let mut bounds: Vec<usize> =
        held.iter().flat_map(|(range, _)| [range.start, range.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let parts = bounds.windows(2).map(|pair| {
        let has = |(range, _): &&Held| range.start <= pair[0] && pair[1] <= range.end;
        let mut holders: Vec<usize> = held.iter().filter(has).map(|(_, rank)| *rank).collect();
        holders.sort_unstable();
        holders.dedup();
        (pair[0]..pair[1], holders)
    });
    parts.filter(|(_, holders)| !holders.is_empty()).collect()
}

/// The elements that a piece has in common with a range.
fn common(piece: &Piece, range: &Range<usize>) -> Range<usize> {
    let (begin, end) = (piece.start.max(range.start), piece.start + piece.data.num_elems());
    begin..end.min(range.end).max(begin)
}

/// Copies the elements that a piece has in common with a range.
fn copy_common(to: &Piece, range: &Range<usize>, from: &Tensor) -> Result<()> {
    let common = common(to, range);
    if common.is_empty() {
        return Ok(());
    }
    let to = to.data.slice(common.start - to.start..common.end - to.start)?;
    let from = from.slice(common.start - range.start..common.end - range.start)?;
    Ok(to.copy_from(&from)?)
}

/// The newest complete checkpoint of a folder.
fn newest(save: &Path) -> Option<Previous> {
    let found = checkpoint::find(save).ok()?;
    let (_, opened, _) = Checkpoint::open_last_good(&found).ok()?;
    opened.as_previous(save)
}

/// Fails unless the run can go on from a checkpoint.
fn lost(config: &TrainConfig, replica: &Replica, member: Option<&RunMember>) -> Result<()> {
    if config.checkpoints.save.is_some() {
        return Ok(());
    }
    let problem = "nobody who is left has the whole state of the run";
    if let (0, Some(member)) = (replica.world.rank(), member) {
        member.give_up(problem);
    }
    Err(match replica.world.rank() {
        0 => Failure::Run(format!(
            "{problem}; pass --replicate-shards 2, so that another rank has a copy of each shard, or --save DIR, so that training goes on \
             from the last checkpoint"
        )),
        _ => Failure::Consequence(problem.into()),
    })
}
