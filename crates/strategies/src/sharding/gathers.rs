//! Brings the values of units together from the ranks that own them.
//!
//! Input: shards of the values in the replica's storage. Output: whole units, in memory that holds all of them or only
//! open ones. A strategy starts gathers and waits for them.

use paceline_collectives::{Purpose, Work};
use paceline_kernels::cast;
use paceline_model::{Held, UnitId};
use paceline_trace::{Span, SpanTrack, now_ns};

use super::arena::UnitMemory;
use super::{ShardRanks, order_of_need};
use crate::{Replica, Result, StepContext, StrategyError, span};

/// The values of a unit at its place.
#[derive(Debug)]
enum Gathered {
    /// The place does not hold the current values.
    Closed,
    /// An operation gathers the values.
    Underway(Work),
    /// The values are there, and a pass uses them or is about to.
    Open,
    /// The values are there until another unit takes the place.
    Free,
}

/// The gathered values of all units.
#[derive(Debug)]
pub(crate) struct Gathers {
    ranks: ShardRanks,
    /// Where gathered units lie. `None` if each is at its place in the storage of the replica, which holds everything.
    memory: Option<UnitMemory>,
    /// Where units travel in 16 bits, if they do: at the same places.
    rounded: Option<UnitMemory>,
    /// Whether they travel with all digits nevertheless.
    keeps_digits: bool,
    /// By the number of the unit.
    units: Vec<Gathered>,
}

impl Gathers {
    /// All units are open in the storage of the replica, and closed in memory of their own.
    pub(crate) fn new(
        replica: &Replica,
        memory: Option<UnitMemory>,
        rounded: Option<UnitMemory>,
    ) -> Self {
        let first = || if memory.is_some() { Gathered::Closed } else { Gathered::Open };
        let units = replica.model.layout.units().iter().map(|_| first()).collect();
        Self { ranks: ShardRanks::of(replica), memory, rounded, keeps_digits: false, units }
    }

    /// Starts to gather all trained units, after the owners have updated them and all gathers before are there, in the order
    /// in which the next step needs them.
    pub(crate) fn send_updated(&mut self, cx: &mut StepContext) -> Result<()> {
        let model = &cx.replica.model;
        let layout = &model.layout;
        for unit in order_of_need(model) {
            let of_unit = layout.unit(unit);
            if !of_unit.is_frozen && !of_unit.range.is_empty() {
                self.units[unit.0] = Gathered::Closed;
                self.start(cx, unit)?;
            }
        }
        Ok(())
    }

    /// Starts to gather a unit, unless its values are there or on their way. Closes the units whose place it takes, which no
    /// pass may use.
    pub(crate) fn start(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<()> {
        let replica = cx.replica;
        let is_empty = replica.model.layout.unit(unit).range.is_empty();
        if is_empty || !matches!(self.units[unit.0], Gathered::Closed) {
            return Ok(());
        }
        let memory = self.memory.as_ref();
        let neighbors = memory.map(|memory| memory.arena.neighbors(unit).collect::<Vec<_>>());
        for neighbor in neighbors.unwrap_or_default() {
            self.evict(cx, neighbor)?;
        }
        let (values, range) = (replica.storage.values(), &replica.model.layout.unit(unit).range);
        let share = values.slice(self.ranks.place.shard(range))?;
        let whole = match &self.memory {
            Some(memory) => memory.of(unit)?,
            None => values.slice(range.clone())?,
        };
        let group = self.ranks.shard.for_purpose(Purpose::Gather(unit.0));
        let work = match self.rounds() {
            None => group.all_gather_async(&share, &whole)?,
            Some(rounded) => {
                let (whole, begin) = (rounded.of(unit)?, group.rank() * share.num_elems());
                let own = whole.slice(begin..begin + share.num_elems())?;
                cast::narrow(&replica.compute, &share, &own)?;
                group.all_gather_async(&own, &whole)?
            }
        };
        self.units[unit.0] = Gathered::Underway(work);
        Ok(())
    }

    /// Where units travel in 16 bits, if they do now.
    fn rounds(&self) -> Option<&UnitMemory> {
        self.rounded.as_ref().filter(|_| !self.keeps_digits)
    }

    /// The values of a unit with all digits, outside of any pass, until another unit takes its place.
    pub(crate) fn masters(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<Held> {
        if self.rounded.is_none() {
            return self.open(cx, unit);
        }
        self.evict(cx, unit)?;
        self.keeps_digits = true;
        let values = self.open(cx, unit);
        self.keeps_digits = false;
        // A pass works with the rounded values.
        self.units[unit.0] = Gathered::Closed;
        values
    }

    /// Waits until the values of a unit are there, and returns them. Starts to gather them if necessary.
    pub(crate) fn open(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<Held> {
        let replica = cx.replica;
        let layout = &replica.model.layout;
        // Where all units are held, a unit is brought up to date once per step.
        let is_there = matches!(self.units[unit.0], Gathered::Open) && self.memory.is_none();
        if !layout.unit(unit).range.is_empty() && !is_there {
            self.start(cx, unit)?;
            cx.track.mark(span::GATHER_NEEDED, unit.0);
            self.wait(cx, unit)?;
            self.units[unit.0] = Gathered::Open;
            cx.track.mark(span::GATHER_THERE, unit.0);
        }
        match &self.memory {
            Some(memory) => Ok(Held::of_unit(layout, unit, &memory.of(unit)?)?),
            None => Ok(replica.storage.values().clone()),
        }
    }

    /// Closes a unit after its pass, so that another unit may take its place; until then it need not be gathered again. A unit in
    /// the storage of the replica stays open.
    pub(crate) fn close(&mut self, unit: UnitId) {
        if self.memory.is_some() && matches!(self.units[unit.0], Gathered::Open) {
            self.units[unit.0] = Gathered::Free;
        }
    }

    /// Ends the validity of a unit's values. With debug assertions its place is filled with not-a-number.
    fn evict(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<()> {
        self.wait(cx, unit)?;
        if let (Some(memory), Gathered::Open | Gathered::Free) = (&self.memory, &self.units[unit.0])
        {
            memory.free(unit)?;
        }
        self.units[unit.0] = Gathered::Closed;
        Ok(())
    }

    /// Evicts all units, because their values are about to change.
    pub(crate) fn evict_all(&mut self, cx: &mut StepContext) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.evict(cx, UnitId(unit)))
    }

    /// Waits for all gathers that are on their way, also if one of them fails.
    pub(crate) fn wait_all(&mut self, cx: &mut StepContext) -> Result<()> {
        (0..self.units.len()).map(|unit| self.wait(cx, UnitId(unit))).fold(Ok(()), Result::and)
    }

    /// Waits for the gather of a unit, if it is on its way.
    fn wait(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<()> {
        if let Gathered::Underway(work) = &self.units[unit.0] {
            exposed(cx.track, span::GATHER, || work.wait())?;
            if let (Some(rounded), Some(memory)) = (self.rounds(), &self.memory) {
                cast::widen(&cx.replica.compute, &rounded.of(unit)?, &memory.of(unit)?)?;
            }
            self.units[unit.0] = Gathered::Open;
        }
        Ok(())
    }
}

/// Runs `run`, which blocks on communication, and records the time under `name` and as exposed.
pub(crate) fn exposed<T, E>(
    track: &mut SpanTrack,
    name: &'static str,
    run: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<T>
where
    StrategyError: From<E>,
{
    let start_ns = now_ns();
    let outcome = run()?;
    let span = Span { start_ns, end_ns: now_ns() };
    track.push(span::EXPOSED, span);
    track.push(name, span);
    Ok(outcome)
}
