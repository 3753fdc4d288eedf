//! Gathers and reduces units whose parameters belong to one rank each, with blocking operations: one per parameter.
//!
//! Input: the parameters or gradients that this rank owns, in the storage of the replica. Output: whole units in memory that
//! units share, and gradients that are reduced to their owners. This file does not know when a strategy needs them.

use paceline_kernels::elementwise;
use paceline_memory::Tensor;
use paceline_model::{Held, Layout, Model, Param, ParamId, Precision, UnitId, View};

use super::arena::{UnitMemory, unsharded};
use super::gathers::exposed;
use super::place::ShardPlace;
use super::{ShardOptions, backward_order, plan_backward};
use crate::{Replica, Result, StepContext, span};

/// The parameters of a unit.
fn params_of(layout: &Layout, unit: UnitId) -> impl Iterator<Item = (ParamId, &Param)> {
    let all = layout.params().iter().enumerate().map(|(at, param)| (ParamId(at), param));
    all.filter(move |(_, param)| param.unit == unit)
}

/// Every owner sends its parameters of a unit to all ranks. Returns the unit.
pub(crate) fn gather(cx: &mut StepContext, memory: &UnitMemory, unit: UnitId) -> Result<Held> {
    let Replica { model, storage, group, .. } = cx.replica;
    let place = ShardPlace::of(cx.replica);
    let whole = Held::of_unit(&model.layout, unit, &memory.of(unit)?)?;
    for (id, param) in params_of(&model.layout, unit) {
        let owner = place.owner(&model.layout, id);
        let own = (owner == place.index).then(|| storage.values().slice(param.range()));
        let (own, result) = (own.transpose()?, whole.slice(param.range())?);
        exposed(cx.track, span::GATHER, || group.broadcast_into(own.as_ref(), &result, owner))?;
    }
    Ok(whole)
}

/// Gradients of units, which are reduced to their owners after the backward pass of the unit.
#[derive(Debug)]
pub(crate) struct OwnerReductions {
    /// `None` if the storage of the replica holds all gradients, which are reduced at the end of the step.
    memory: Option<UnitMemory>,
    /// Where a gradient goes that is added to that of an earlier micro-batch.
    added: Option<Tensor>,
    /// How often each unit has been reduced in this step.
    num_reduced: Vec<usize>,
}

impl OwnerReductions {
    pub(crate) fn new(replica: &Replica, options: &ShardOptions) -> Result<Self> {
        let model = &replica.model;
        let dtype = replica.options.precision.grads;
        let arena = (!options.holds_whole_gradients()).then(|| plan_backward(model, true, 0));
        let memory = arena.map(|arena| UnitMemory::new(replica, arena, dtype)).transpose()?;
        let len = options.adds_shards().then(|| largest_param(&model.layout));
        let added = len.map(|len| unsharded(replica, dtype, len)).transpose()?;
        let num_reduced = vec![0; model.layout.units().len()];
        Ok(Self { memory, added, num_reduced })
    }

    /// The bytes that [`OwnerReductions::new`] allocates.
    pub(crate) fn num_bytes(model: &Model, options: &ShardOptions, precision: Precision) -> usize {
        let open =
            if options.holds_whole_gradients() { 0 } else { plan_backward(model, true, 0).len() };
        let added = if options.adds_shards() { largest_param(&model.layout) } else { 0 };
        (open + added) * precision.grads.size_bytes()
    }

    /// The view of a unit that a backward pass opens: `values`, and the place for its gradients if the pass writes them.
    pub(crate) fn open(
        &self,
        replica: &Replica,
        unit: UnitId,
        values: Held,
        writes_grads: bool,
    ) -> Result<View> {
        let layout = &replica.model.layout;
        Ok(match &self.memory {
            None if writes_grads => View::new(values, Some(replica.storage.grads().clone()), false),
            Some(memory) if writes_grads && !layout.unit(unit).is_frozen => {
                let grads = Held::of_unit(layout, unit, &memory.of(unit)?)?;
                View::new(values, Some(grads), true)
            }
            _ => View::new(values, None, false),
        })
    }

    /// Reduces the gradients of a unit after its backward pass.
    pub(crate) fn close(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<()> {
        let layout = &cx.replica.model.layout;
        let Some(memory) = self.memory.as_ref().filter(|_| !layout.unit(unit).is_frozen) else {
            return Ok(());
        };
        let whole = Held::of_unit(layout, unit, &memory.of(unit)?)?;
        self.reduce(cx, unit, &whole)?;
        self.memory.as_ref().map_or(Ok(()), |memory| memory.free(unit))
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self) {
        self.num_reduced.fill(0);
    }

    /// Ends the step: reduces what no backward pass has opened or closed.
    pub(crate) fn finish(&mut self, cx: &mut StepContext) -> Result<()> {
        let Replica { model, storage, .. } = cx.replica;
        let layout = &model.layout;
        for unit in backward_order(model) {
            if self.num_reduced[unit.0] > 0 || layout.unit(unit).is_frozen {
                continue;
            }
            let whole = match &self.memory {
                None => storage.grads().clone(),
                Some(memory) => {
                    let of_unit = memory.of(unit)?;
                    of_unit.fill_zero()?;
                    Held::of_unit(layout, unit, &of_unit)?
                }
            };
            self.reduce(cx, unit, &whole)?;
        }
        Ok(())
    }

    fn reduce(&mut self, cx: &mut StepContext, unit: UnitId, whole: &Held) -> Result<()> {
        let Replica { model, storage, group, compute, .. } = cx.replica;
        let place = ShardPlace::of(cx.replica);
        let is_first = self.num_reduced[unit.0] == 0;
        self.num_reduced[unit.0] += 1;
        for (id, param) in params_of(&model.layout, unit) {
            let owner = place.owner(&model.layout, id);
            let source = whole.slice(param.range())?;
            let own = (owner == place.index).then(|| storage.grads().slice(param.range()));
            let own = own.transpose()?;
            let added = self.added.as_ref().filter(|_| !is_first && own.is_some());
            let added = added.map(|added| added.slice(0..source.num_elems())).transpose()?;
            let result = added.as_ref().or(own.as_ref());
            let reduce = || group.reduce_into(&source, result, cx.replica.reduce_op(), owner);
            exposed(cx.track, span::REDUCE_SCATTER, reduce)?;
            if let (Some(added), Some(own)) = (added, own) {
                cx.track.record(span::GRAD_SYNC, || elementwise::add(compute, &added, &own))?;
            }
        }
        Ok(())
    }
}

/// The elements of the largest parameter that is trained.
fn largest_param(layout: &Layout) -> usize {
    layout.trained().map(|(_, param)| param.range().len()).max().unwrap_or(0)
}
