//! Reduces the gradients of whole units to even shards, during the backward pass.
//!
//! Input: announcements of final gradients. Output: this rank's shard of the mean over the ranks, in the storage of the
//! replica. A unit is sent when all its gradients are final. Units are sent in one order on all ranks, because all ranks
//! must call the same operations in the same order: that of the layers, or, if gradients are reduced after each micro-batch, the
//! order of the rank's list. This file does not know where values lie.

use std::collections::VecDeque;

use paceline_collectives::{Group, Purpose, ReduceOp, Work};
use paceline_kernels::elementwise;
use paceline_memory::{Category, Tensor};
use paceline_model::{Held, Model, ParamId, UnitId, View};
use paceline_trace::SpanTrack;

use super::arena::Arena;
use super::backward_order;
use super::gathers::exposed;
use super::place::{ShardPlace, padding};
use crate::strategy::span;
use crate::{Replica, Result, StrategyError};

/// Where the gradients of open units lie: each apart from that of the unit before it, which is still being reduced.
pub(crate) fn plan_gradients(model: &Model) -> Arena {
    let layout = &model.layout;
    let order = backward_order(model).into_iter().filter(|unit| !layout.unit(*unit).is_frozen);
    let (roots, inner): (Vec<_>, Vec<_>) = order.partition(|unit| layout.unit(*unit).is_root);
    Arena::plan(layout, &inner, &roots, 1, 0)
}

/// Memory for the whole gradients of units that are open.
#[derive(Debug)]
pub(crate) struct GradArena {
    pub(crate) arena: Arena,
    pub(crate) memory: Tensor,
    /// Where a shard goes that is added to that of an earlier pass: each at its place in the arena, divided by the number of
    /// shards. `None` if gradients are reduced once per step.
    pub(crate) shards: Option<Tensor>,
}

impl GradArena {
    /// Allocates the memory on every rank.
    pub(crate) fn new(replica: &Replica, adds_shards: bool) -> Result<Self> {
        let Replica { model, compute, mesh, options, .. } = replica;
        let arena = plan_gradients(model);
        let dtype = options.precision.grads;
        let tensor = |len: usize| -> Result<Tensor> {
            let bytes = len * dtype.size_bytes();
            let memory = mesh.allocate(&compute.allocator, bytes, Category::Unsharded)?;
            Ok(Tensor::new(memory, 0, dtype, [len])?)
        };
        let memory = tensor(arena.len())?;
        let count = ShardPlace::new(mesh.shape(), replica.group.rank()).count;
        let shards = adds_shards.then(|| tensor(arena.len() / count)).transpose()?;
        Ok(Self { arena, memory, shards })
    }
}

/// The reductions of a step.
#[derive(Debug)]
pub(crate) struct Reductions {
    /// The ranks that divide a unit.
    group: Group,
    /// The ranks that hold the same shard, if there are any.
    replicas: Option<Group>,
    place: ShardPlace,
    /// `None` if gradients lie in the storage of the replica, which holds all of them.
    arena: Option<GradArena>,
    /// The trained units in the order in which they are sent, root units last.
    order: Vec<UnitId>,
    /// The number of units in `order` that are not roots.
    num_inner: usize,
    /// The next unit to send.
    next: usize,
    /// The gradients of each unit that are not final yet in this pass.
    pending: Vec<usize>,
    num_params: Vec<usize>,
    /// Gradients of units that had to leave the arena before their turn, because another unit was not final.
    moved: Vec<Option<Tensor>>,
    /// Whether a unit's place in the arena holds gradients of this pass.
    holds: Vec<bool>,
    in_flight: VecDeque<InFlight>,
    /// Whether other operations of the group run between the reductions.
    is_beside_gathers: bool,
    /// How often each unit has been sent in this step.
    sent: Vec<usize>,
}

/// An operation that has not been awaited.
#[derive(Debug)]
struct InFlight {
    unit: UnitId,
    /// `None` only while one operation takes the place of another.
    work: Option<Work>,
    /// Whether the mean over the ranks that hold the same shard is still to come.
    is_partial: bool,
    /// Where the shard goes before it is added to that of earlier passes.
    added: Option<Tensor>,
    /// Keeps moved gradients until they are reduced.
    _source: Tensor,
}

impl Reductions {
    pub(crate) fn new(
        replica: &Replica,
        groups: (Group, Option<Group>),
        place: ShardPlace,
        arena: Option<GradArena>,
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
        Self {
            group: groups.0,
            replicas: groups.1,
            place,
            arena,
            order,
            num_inner,
            next: 0,
            pending: num_params.clone(),
            moved: num_params.iter().map(|_| None).collect(),
            holds: vec![false; num_params.len()],
            sent: vec![0; num_params.len()],
            num_params,
            in_flight: VecDeque::new(),
            is_beside_gathers: false,
        }
    }

    /// For a strategy that gathers units with the same group during the backward pass.
    pub(crate) fn beside_gathers(self) -> Self {
        Self { is_beside_gathers: true, ..self }
    }

    /// Whether units are sent when they are closed. Gradients become final at other moments on a rank that leaves out
    /// layers, but all ranks close their units in the same order, and between the same gathers.
    fn sends_at_close(&self, replica: &Replica) -> bool {
        self.is_beside_gathers && replica.options.find_unused_parameters
    }

    /// The view of a unit that a backward pass opens: `values`, and the place for its gradients if the pass writes them.
    pub(crate) fn open(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        (values, writes_grads): (Held, bool),
    ) -> Result<View> {
        let layout = &replica.model.layout;
        let Some(GradArena { arena, memory, .. }) = self.arena.as_ref().filter(|_| writes_grads)
        else {
            let grads = writes_grads.then(|| replica.storage.grads().clone());
            return Ok(View::new(values, grads, false));
        };
        if self.num_params[unit.0] == 0 {
            return Ok(View::new(values, None, false));
        }
        let memory = memory.slice(arena.place(unit))?;
        let taken: Vec<UnitId> = arena.neighbors(unit).chain([unit]).collect();
        while self.in_flight.iter().any(|of| taken.contains(&of.unit)) {
            self.receive(replica, track)?;
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
        self.holds[unit.0] = true;
        Ok(View::new(values, Some(Held::of_unit(layout, unit, &memory)?), true))
    }

    /// The gradient of a parameter is final. Sends all units whose turn it is.
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
        let pending = &mut self.pending[param.unit.0];
        *pending = pending.checked_sub(1).ok_or_else(|| StrategyError::Announcement {
            name: param.name.clone(),
            problem: "more than once",
        })?;
        if sends_at_once && *pending == 0 {
            *pending = self.num_params[param.unit.0];
            return self.send(replica, param.unit);
        }
        while self.next < self.num_inner && self.pending[self.order[self.next].0] == 0 {
            self.send(replica, self.order[self.next])?;
            self.next += 1;
        }
        Ok(())
    }

    /// A backward pass closes a unit. Gradients that wait for their turn leave the arena.
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
        let Some(GradArena { arena, memory, .. }) = &self.arena else { return Ok(()) };
        if self.holds[unit.0] && !layout.unit(unit).is_root {
            let from = memory.slice(arena.place(unit))?;
            let allocator = &replica.compute.allocator;
            let to = allocator.tensor(from.dtype(), from.shape(), Category::Unsharded)?;
            replica.compute.copy(&from, &to)?;
            self.moved[unit.0] = Some(to);
            self.holds[unit.0] = false;
        }
        Ok(())
    }

    /// Whether gradients are reduced in every backward pass of a step.
    fn adds_passes(&self) -> bool {
        self.arena.as_ref().is_some_and(|of| of.shards.is_some())
    }

    /// Whether a unit is sent as soon as its gradients are final. The stages of a rank take micro-batches in an order of their
    /// own. It is the same on all ranks that have these stages, unless layers may be left out.
    fn sends_at_once(&self, replica: &Replica) -> bool {
        self.adds_passes() && !replica.options.find_unused_parameters
    }

    /// Begins another backward pass of the same step.
    fn begin_next_pass(&mut self) {
        self.next = 0;
        for unit in &self.order[..self.num_inner] {
            self.pending[unit.0] = self.num_params[unit.0];
        }
    }

    /// Ends the step: sends the root units, and waits for everything.
    pub(crate) fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        if self.sends_at_once(replica) {
            let inner = &self.order[..self.num_inner];
            let is_late = |unit: &UnitId| {
                self.sent[unit.0] == 0 || self.pending[unit.0] != self.num_params[unit.0]
            };
            self.next = inner.iter().position(is_late).unwrap_or(self.num_inner);
        }
        let sends_all = self.sends_at_close(replica);
        while self.next < self.order.len()
            && (sends_all || self.pending[self.order[self.next].0] == 0)
        {
            self.send(replica, self.order[self.next])?;
            self.next += 1;
        }
        self.check_all_sent(replica)?;
        while !self.in_flight.is_empty() {
            self.receive(replica, track)?;
        }
        self.next = 0;
        self.sent.fill(0);
        self.pending.clone_from(&self.num_params);
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
        let own = self.place.shard(&layout.unit(unit).range);
        let source = match (self.moved[unit.0].take(), &self.arena) {
            (Some(moved), _) => moved,
            (None, None) => replica.storage.grads().slice(layout.unit(unit).range.clone())?,
            (None, Some(GradArena { arena, memory, .. })) if self.holds[unit.0] => {
                memory.slice(arena.place(unit))?
            }
            // No layer has used the unit, so its gradient is zero. Another unit may be open at its place.
            (None, Some(GradArena { memory, .. })) => {
                let len = layout.unit(unit).range.len();
                let allocator = &replica.compute.allocator;
                let zeros = allocator.tensor(memory.dtype(), [len], Category::Unsharded)?;
                zeros.fill_zero()?;
                zeros
            }
        };
        self.holds[unit.0] = false;
        let is_inner = !layout.unit(unit).is_root;
        let shard = replica.storage.grads().slice(own)?;
        let added = match &self.arena {
            Some(GradArena { arena, shards: Some(shards), .. })
                if self.sent[unit.0] > 0 && is_inner =>
            {
                let (at, count) = (arena.place(unit), self.place.count);
                Some(shards.slice(at.start / count..at.end / count)?)
            }
            _ => None,
        };
        let group = self.group.for_purpose(Purpose::Bucket(unit.0));
        let result = added.as_ref().unwrap_or(&shard);
        let work = Some(group.reduce_scatter_async(&source, result, ReduceOp::Mean)?);
        self.sent[unit.0] += 1;
        let is_partial = self.replicas.is_some();
        self.in_flight.push_back(InFlight { unit, work, is_partial, added, _source: source });
        self.average_finished(replica)
    }

    /// Averages over the ranks that hold the same shard what is reduced over the ranks that divide a unit, without waiting for other
    /// ranks.
    fn average_finished(&mut self, replica: &Replica) -> Result<()> {
        let Some(replicas) = &self.replicas else { return Ok(()) };
        // With one shard, the replicas may be all ranks, whose group has other operations too. Then no rank may let their order
        // depend on the time: the reduction is a copy, for which `average` waits.
        let may_look = self.group.world_size() > 1;
        for of in self.in_flight.iter_mut() {
            // The operations of a group keep their order.
            let is_under_way = |work: &Work| may_look && !work.is_finished();
            if of.is_partial && of.work.as_ref().is_some_and(is_under_way) {
                break;
            }
            if of.is_partial {
                average(replicas, replica, self.place, of)?;
            }
        }
        Ok(())
    }

    /// Waits for the first operation in flight, and adds what it has brought to what is there from earlier passes.
    fn receive(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        let Some(mut first) = self.in_flight.pop_front() else { return Ok(()) };
        if let Some(replicas) = self.replicas.as_ref().filter(|_| first.is_partial) {
            exposed(track, span::REDUCE_SCATTER, || {
                average(replicas, replica, self.place, &mut first)
            })?;
        }
        if let Some(work) = first.work {
            exposed(track, span::REDUCE_SCATTER, || work.wait())?;
        }
        if let Some(added) = first.added {
            let own = self.place.shard(&replica.model.layout.unit(first.unit).range);
            let shard = replica.storage.grads().slice(own)?;
            track.record(span::GRAD_SYNC, || elementwise::add(&replica.compute, &added, &shard))?;
        }
        Ok(())
    }
}

/// Waits for the reduction over the ranks that divide a unit. Then starts to average the shard over the ranks that hold
/// the same shard.
fn average(
    replicas: &Group,
    replica: &Replica,
    place: ShardPlace,
    of: &mut InFlight,
) -> Result<()> {
    let own = place.shard(&replica.model.layout.unit(of.unit).range);
    let shard = match &of.added {
        Some(added) => added.clone(),
        None => replica.storage.grads().slice(own)?,
    };
    if let Some(partial) = of.work.take() {
        partial.wait()?;
    }
    of.work = Some(replicas.all_reduce_async(&shard, ReduceOp::Mean)?);
    of.is_partial = false;
    Ok(())
}
