//! Reduces the gradients of whole units to even shards, during the backward pass.
//!
//! Input: announcements of final gradients. Output: this rank's shard of the mean over the ranks, in the storage of the
//! replica. A unit is sent when all its gradients are final. All ranks
//! must call the same operations in the same order: that of the layers, or, if gradients are reduced after each micro-batch, that
//! of the rank's list. This file does not know where values lie.

use std::collections::VecDeque;

use paceline_collectives::{Purpose, Work};
use paceline_kernels::elementwise;
use paceline_memory::{Category, Tensor};
use paceline_model::{Held, ParamId, UnitId, View};

use super::arena::{UnitMemory, unsharded};
use super::gathers::exposed;
use super::place::{ShardPlace, padding};
use super::{ShardRanks, backward_order, plan_backward};
use crate::{Replica, Result, StepContext, StrategyError, span};

/// Memory for the whole gradients of units that are open, each apart from the unit before it, which is still being reduced.
#[derive(Debug)]
pub(crate) struct GradArena {
    units: UnitMemory,
    /// Where a shard goes that is added to that of an earlier pass: at its place in the arena, divided by the number of
    /// shards. `None` if gradients are reduced once per step.
    shards: Option<Tensor>,
}

impl GradArena {
    /// Allocates the memory on every rank.
    pub(crate) fn new(replica: &Replica, adds_shards: bool) -> Result<Self> {
        let dtype = replica.options.precision.grads;
        let arena = plan_backward(&replica.model, true, 1);
        let shards_len = arena.len() / ShardPlace::of(replica).count;
        let units = UnitMemory::new(replica, arena, dtype)?;
        let shards = adds_shards.then(|| unsharded(replica, dtype, shards_len)).transpose()?;
        Ok(Self { units, shards })
    }
}

#[derive(Debug)]
pub(crate) struct Reductions {
    ranks: ShardRanks,
    /// `None` if gradients lie in the storage of the replica, which holds all of them.
    arena: Option<GradArena>,
    /// The trained units in the order in which they are sent, root units last.
    order: Vec<UnitId>,
    /// The number of units in `order` that are not roots.
    num_inner: usize,
    /// The next unit to send.
    next: usize,
    /// By the number of the unit.
    units: Vec<UnitGrads>,
    in_flight: VecDeque<ReducedUnit>,
    /// Whether other operations of the group run between the reductions.
    is_beside_gathers: bool,
}

/// The gradients of a unit in a step.
#[derive(Debug)]
struct UnitGrads {
    num_params: usize,
    /// The gradients that are not final yet in this pass.
    pending: usize,
    /// How often the unit has been sent in this step.
    num_sent: usize,
    whole: WholeGrads,
}

/// Where the whole gradients of a unit are in this pass, if they are not in the storage of the replica.
#[derive(Clone, Debug)]
enum WholeGrads {
    /// The unit was not open yet, or has been sent.
    Nowhere,
    /// At the place of the unit in the arena.
    InArena,
    /// They had to leave the arena before their turn, because another unit was not final.
    Moved(Tensor),
}

impl UnitGrads {
    fn new(num_params: usize) -> Self {
        Self { num_params, pending: num_params, num_sent: 0, whole: WholeGrads::Nowhere }
    }
}

/// A unit whose operation has not been awaited.
#[derive(Debug)]
struct ReducedUnit {
    unit: UnitId,
    work: Work,
    /// Whether the mean over the ranks that hold the same shard is still to come.
    is_partial: bool,
    /// Where the shard goes before it is added to that of earlier passes.
    added: Option<Tensor>,
    /// Keeps moved gradients until they are reduced.
    _source: Tensor,
}

impl Reductions {
    /// With `is_beside_gathers`, the strategy gathers units with the same group during the backward pass.
    pub(crate) fn new(
        replica: &Replica,
        arena: Option<GradArena>,
        is_beside_gathers: bool,
    ) -> Self {
        let layout = &replica.model.layout;
        let mut order = backward_order(&replica.model);
        order.retain(|unit| {
            let unit = layout.unit(*unit);
            !unit.is_frozen && !unit.range.is_empty()
        });
        let num_inner = order.iter().filter(|unit| !layout.unit(**unit).is_root).count();
        let mut num_params = vec![0; layout.units().len()];
        layout.trained().for_each(|(_, param)| num_params[param.unit.0] += 1);
        let units = num_params.into_iter().map(UnitGrads::new).collect();
        let (ranks, next, in_flight) = (ShardRanks::of(replica), 0, VecDeque::new());
        Self { ranks, arena, order, num_inner, next, units, in_flight, is_beside_gathers }
    }

    /// Whether units are sent when they are closed. Where ranks leave out layers, gradients become final at other moments, but
    /// all ranks close their units in the same order, and between the same gathers.
    fn sends_at_close(&self, replica: &Replica) -> bool {
        self.is_beside_gathers && replica.options.find_unused_parameters
    }

    /// The view of a unit that a backward pass opens: `values`, and the place for its gradients if the pass writes them.
    pub(crate) fn open(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
        values: Held,
        writes_grads: bool,
    ) -> Result<View> {
        let replica = cx.replica;
        let layout = &replica.model.layout;
        let Some(of) = self.arena.as_ref().filter(|_| writes_grads) else {
            let grads = writes_grads.then(|| replica.storage.grads().clone());
            return Ok(View::new(values, grads, false));
        };
        if self.units[unit.0].num_params == 0 {
            return Ok(View::new(values, None, false));
        }
        let memory = of.units.of(unit)?;
        let taken: Vec<UnitId> = of.units.arena.neighbors(unit).chain([unit]).collect();
        while self.in_flight.iter().any(|of| taken.contains(&of.unit)) {
            self.receive(cx)?;
        }
        if cfg!(debug_assertions) {
            // Not-a-number, so that a gradient which no layer writes does not look right.
            memory.fill_bytes(0xFF)?;
        }
        // Padding is reduced too. A gradient that is announced as zero before its unit is open is not written again.
        if replica.options.find_unused_parameters {
            memory.fill_zero()?
        } else {
            padding(layout, unit).into_iter().try_for_each(|gap| memory.slice(gap)?.fill_zero())?
        }
        self.units[unit.0].whole = WholeGrads::InArena;
        Ok(View::new(values, Some(Held::of_unit(layout, unit, &memory)?), true))
    }

    /// Sends all units whose turn it is, once the gradient of a parameter is final.
    pub(crate) fn ready(&mut self, replica: &Replica, id: ParamId) -> Result<()> {
        if self.sends_at_close(replica) {
            return Ok(());
        }
        let param = replica.model.layout.param(id);
        let is_inner = !replica.model.layout.unit(param.unit).is_root;
        let sends_at_once = is_inner && self.sends_at_once(replica);
        if is_inner && self.adds_passes() && !sends_at_once && self.next == self.num_inner {
            self.begin_next_pass();
        }
        let UnitGrads { pending, num_params, .. } = &mut self.units[param.unit.0];
        *pending = pending.checked_sub(1).ok_or_else(|| StrategyError::Announcement {
            name: param.name.clone(),
            problem: "more than once",
        })?;
        if sends_at_once && *pending == 0 {
            *pending = *num_params;
            return self.send(replica, param.unit);
        }
        while self.next < self.num_inner && self.units[self.order[self.next].0].pending == 0 {
            self.send(replica, self.order[self.next])?;
            self.next += 1;
        }
        Ok(())
    }

    /// Closes a unit in a backward pass. Gradients that wait for their turn leave the arena.
    pub(crate) fn close(&mut self, replica: &Replica, unit: UnitId) -> Result<()> {
        let layout = &replica.model.layout;
        if self.sends_at_close(replica) && self.arena.is_some() {
            if self.order[..self.next].contains(&unit) {
                self.begin_next_pass();
            }
            if self.order.get(self.next) == Some(&unit) && !layout.unit(unit).is_root {
                self.send(replica, unit)?;
                self.next += 1;
            }
        }
        let Some(GradArena { units, .. }) = &self.arena else { return Ok(()) };
        let whole = &mut self.units[unit.0].whole;
        if matches!(whole, WholeGrads::InArena) && !layout.unit(unit).is_root {
            let from = units.of(unit)?;
            let allocator = &replica.compute.allocator;
            let to = allocator.tensor(from.dtype(), from.shape(), Category::Unsharded)?;
            replica.compute.copy(&from, &to)?;
            *whole = WholeGrads::Moved(to);
        }
        Ok(())
    }

    fn adds_passes(&self) -> bool {
        self.arena.as_ref().is_some_and(|of| of.shards.is_some())
    }

    /// Whether a unit is sent as soon as its gradients are final. The order of the micro-batches on the stages of a rank
    /// is the same on all ranks that have these stages, unless layers may be left out.
    fn sends_at_once(&self, replica: &Replica) -> bool {
        self.adds_passes() && !replica.options.find_unused_parameters
    }

    /// Begins another backward pass of the same step.
    fn begin_next_pass(&mut self) {
        self.next = 0;
        for unit in &self.order[..self.num_inner] {
            let of_unit = &mut self.units[unit.0];
            of_unit.pending = of_unit.num_params;
        }
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self, cx: &mut StepContext) -> Result<()> {
        self.receive_all(cx)?;
        self.next = 0;
        self.units.iter_mut().for_each(|of| *of = UnitGrads::new(of.num_params));
        Ok(())
    }

    /// Ends the step: sends the root units, and waits for everything.
    pub(crate) fn finish(&mut self, cx: &mut StepContext) -> Result<()> {
        let replica = cx.replica;
        if self.sends_at_once(replica) {
            let inner = &self.order[..self.num_inner];
            let is_late = |unit: &UnitId| {
                let of_unit = &self.units[unit.0];
                of_unit.num_sent == 0 || of_unit.pending != of_unit.num_params
            };
            self.next = inner.iter().position(is_late).unwrap_or(self.num_inner);
        }
        let sends_all = self.sends_at_close(replica);
        while self.next < self.order.len()
            && (sends_all || self.units[self.order[self.next].0].pending == 0)
        {
            self.send(replica, self.order[self.next])?;
            self.next += 1;
        }
        self.check_all_sent(replica)?;
        self.receive_all(cx)
    }

    fn receive_all(&mut self, cx: &mut StepContext) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.receive(cx)?;
        }
        Ok(())
    }

    /// Fails unless all units have been sent. If training went on, the ranks would silently diverge.
    fn check_all_sent(&self, replica: &Replica) -> Result<()> {
        let Some(&late) = self.order.get(self.next) else { return Ok(()) };
        let layout = &replica.model.layout;
        let params = layout.trained().filter(|(_, param)| param.unit == late);
        let names: Vec<&str> = params.map(|(_, param)| &*param.name).collect();
        Err(StrategyError::Announcement { name: names.join(" or "), problem: "never" })
    }

    fn send(&mut self, replica: &Replica, unit: UnitId) -> Result<()> {
        let layout = &replica.model.layout;
        let place = self.ranks.place;
        let own = place.shard(&layout.unit(unit).range);
        let of_unit = &mut self.units[unit.0];
        let source = match (&of_unit.whole, &self.arena) {
            (WholeGrads::Moved(moved), _) => moved.clone(),
            (_, None) => replica.storage.grads().slice(layout.unit(unit).range.clone())?,
            (WholeGrads::InArena, Some(GradArena { units, .. })) => units.of(unit)?,
            // No layer has used the unit, so its gradient is zero. Another unit may be open at its place.
            (WholeGrads::Nowhere, Some(_)) => {
                let len = layout.unit(unit).range.len();
                let (allocator, dtype) =
                    (&replica.compute.allocator, replica.options.precision.grads);
                let zeros = allocator.tensor(dtype, [len], Category::Unsharded)?;
                zeros.fill_zero()?;
                zeros
            }
        };
        of_unit.whole = WholeGrads::Nowhere;
        let is_inner = !layout.unit(unit).is_root;
        let shard = replica.storage.grads().slice(own)?;
        let added = match &self.arena {
            Some(GradArena { units, shards: Some(shards) }) if of_unit.num_sent > 0 && is_inner => {
                let (at, count) = (units.arena.place(unit), place.count);
                Some(shards.slice(at.start / count..at.end / count)?)
            }
            _ => None,
        };
        of_unit.num_sent += 1;
        let group = self.ranks.shard.for_purpose(Purpose::Bucket(unit.0));
        let result = added.as_ref().unwrap_or(&shard);
        let work = group.reduce_scatter_async(&source, result, replica.reduce_op())?;
        let is_partial = self.ranks.replicas.is_some();
        self.in_flight.push_back(ReducedUnit { unit, work, is_partial, added, _source: source });
        self.average_finished(replica)
    }

    /// Averages the reduced shards over the replicas of each shard, without waiting for other ranks.
    fn average_finished(&mut self, replica: &Replica) -> Result<()> {
        // With one shard, the replicas may be all ranks, whose group has other operations too, and their order must not depend
        // on the time: the reduction is a copy, for which `average` waits.
        let may_look = self.ranks.shard.world_size() > 1;
        for of in self.in_flight.iter_mut().filter(|of| of.is_partial) {
            // The operations of a group keep their order.
            if may_look && !of.work.is_finished() {
                break;
            }
            of.average(replica, &self.ranks)?;
        }
        Ok(())
    }

    /// Waits for the first operation in flight, and adds its result to that of earlier passes.
    fn receive(&mut self, cx: &mut StepContext) -> Result<()> {
        let Some(mut first) = self.in_flight.pop_front() else { return Ok(()) };
        let replica = cx.replica;
        if first.is_partial {
            let average = || first.average(replica, &self.ranks);
            exposed(cx.track, span::REDUCE_SCATTER, average)?;
        }
        exposed(cx.track, span::REDUCE_SCATTER, || first.work.wait())?;
        if let Some(added) = &first.added {
            let Replica { model, storage, compute, .. } = replica;
            let own = self.ranks.place.shard(&model.layout.unit(first.unit).range);
            let shard = storage.grads().slice(own)?;
            cx.track.record(span::GRAD_SYNC, || elementwise::add(compute, added, &shard))?;
        }
        Ok(())
    }
}

impl ReducedUnit {
    /// Waits for the reduction over the ranks that divide the unit. Then starts to average the shard over its replicas.
    fn average(&mut self, replica: &Replica, ranks: &ShardRanks) -> Result<()> {
        self.is_partial = false;
        let Some(replicas) = &ranks.replicas else { return Ok(()) };
        let own = ranks.place.shard(&replica.model.layout.unit(self.unit).range);
        let shard = match &self.added {
            Some(added) => added.clone(),
            None => replica.storage.grads().slice(own)?,
        };
        self.work.wait()?;
        self.work = replicas.all_reduce_async(&shard, replica.reduce_op())?;
        Ok(())
    }
}
