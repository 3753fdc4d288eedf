//! Passes the events of a training step on to the strategy.
//!
//! Input: the hooks of a pass, called by the model. Output: calls of the strategy. Keeps track of the parameters that a
//! step does not use, so that the strategy is told of each gradient exactly once per step.

use paceline_collectives::{Purpose, ReduceOp};
use paceline_memory::Tensor;
use paceline_model::{GradReadiness, ParamId, PassHooks, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::accumulation::PartialSums;
use crate::replica::LeftOut;
use crate::strategy::span;
use crate::{Replica, Result, Strategy, StrategyError};

/// Passes the model's calls on to the strategy.
pub(crate) struct Hooks<'a> {
    pub(crate) strategy: &'a mut dyn Strategy,
    pub(crate) replica: &'a Replica,
    /// The gradients of other micro-batches, if they are not in place.
    pub(crate) partial_sums: &'a mut PartialSums,
    pub(crate) track: &'a mut SpanTrack,
    /// Whether the loss is summed over the ranks.
    pub(crate) is_shared: bool,
    /// Whether this is the last backward pass of the step.
    pub(crate) is_last: bool,
    /// Whether the parameters that no step uses still have to be announced in this pass.
    pub(crate) leaves_out: bool,
    /// The gradients of which the strategy is told behind the passes, if the passes are a graph.
    pub(crate) later: Option<Vec<ParamId>>,
}

impl<'a> Hooks<'a> {
    fn announce(&mut self, id: ParamId) -> Result<()> {
        let Replica { model, storage, compute, .. } = self.replica;
        if !self.partial_sums.is_empty() && self.replica.options.no_sync {
            let start = model.layout.param(id).start;
            self.partial_sums.add_to(compute, &storage.grad(id)?, start)?;
        }
        match &mut self.later {
            Some(later) => {
                later.push(id);
                Ok(())
            }
            None => {
                self.track.mark(span::GRADIENT_READY, id.0);
                self.strategy.gradient_ready(self.replica, self.track, id)
            }
        }
    }

    /// Whether the strategy is told of a gradient that no step uses in this pass: in each one, if each is reduced.
    fn announces_unused(&self, id: ParamId) -> bool {
        let layout = &self.replica.model.layout;
        let is_root = layout.unit(layout.param(id).unit).is_root;
        let is_each = self.strategy.reduces_every_pass() || !self.replica.options.no_sync;
        self.is_last || !is_root || !is_each
    }

    /// Sets a gradient that no layer has written to zero, unless it lies in memory of its unit that the strategy clears.
    fn clear(&self, id: ParamId) -> Result<()> {
        let storage = &self.replica.storage;
        if storage.has_all_grads() {
            storage.grad(id)?.fill_zero()?;
        }
        Ok(())
    }

    /// The parameters that no step uses.
    fn never_used(&self) -> &'a [ParamId] {
        self.replica.left_out.as_ref().map_or(&[], |left_out| &left_out.unused)
    }

    fn used_after_all(&self, id: ParamId) -> StrategyError {
        let name = self.replica.model.layout.param(id).name.clone();
        StrategyError::UsedAfterAll { name }
    }

    /// Announces zero gradients for the parameters that no step uses, once per pass that announces. This must come after the
    /// forward pass: which parameters these are may depend on the rank, so what the strategy sends here may
    /// too, and all ranks must send the sums of the loss first.
    fn announce_never_used(&mut self) -> Result<()> {
        if std::mem::take(&mut self.leaves_out) {
            for &id in self.never_used() {
                if self.announces_unused(id) {
                    self.clear(id)?;
                    self.announce(id)?;
                }
            }
        }
        Ok(())
    }

    /// Announces the parameters that the step has not used, or used only in part, and returns them. Errors
    /// if there are any that [`ReplicaOptions`](crate::ReplicaOptions) does not allow, or, with a static
    /// graph, any that the first step did not leave out.
    pub(crate) fn finish_left_out(&mut self, readiness: &GradReadiness) -> Result<LeftOut> {
        let Replica { model, options, left_out: known, .. } = self.replica;
        self.announce_never_used()?;
        if let Some(&id) = self.never_used().iter().find(|id| readiness.is_written(**id)) {
            return Err(self.used_after_all(id));
        }
        let is_meant = |id: &ParamId| !self.never_used().contains(id);
        let left_out: Vec<ParamId> = readiness.unfinished(self.is_last).filter(is_meant).collect();
        let is_known = |id: &ParamId| known.as_ref().is_some_and(|k| k.unfinished.contains(id));
        let new: Vec<&ParamId> = left_out.iter().filter(|id| !is_known(id)).collect();
        if !new.is_empty() && (!options.find_unused_parameters || known.is_some()) {
            let names = new.iter().map(|id| model.layout.param(**id).name.clone()).collect();
            let is_new = options.find_unused_parameters;
            return Err(StrategyError::Unused { names, is_new });
        }
        for &id in &left_out {
            if !readiness.is_written(id) {
                self.clear(id)?;
            }
            self.announce(id)?;
        }
        let (unfinished, unused) = left_out.into_iter().partition(|id| readiness.is_written(*id));
        Ok(LeftOut { unused, unfinished })
    }
}

impl PassHooks for Hooks<'_> {
    fn pre_forward(&mut self, _: &Storage, unit: UnitId) -> paceline_model::Result<View> {
        Ok(self.strategy.pre_forward(self.replica, self.track, unit)?)
    }

    fn post_forward(&mut self, unit: UnitId) -> paceline_model::Result<()> {
        Ok(self.strategy.post_forward(self.replica, self.track, unit)?)
    }

    fn pre_backward(
        &mut self,
        _: &Storage,
        unit: UnitId,
        writes_grads: bool,
    ) -> paceline_model::Result<View> {
        Ok(self.strategy.pre_backward(self.replica, self.track, unit, writes_grads)?)
    }

    fn post_backward(&mut self, unit: UnitId, writes_grads: bool) -> paceline_model::Result<()> {
        Ok(self.strategy.post_backward(self.replica, self.track, unit, writes_grads)?)
    }

    fn gradient_ready(&mut self, id: ParamId) -> paceline_model::Result<()> {
        if self.never_used().contains(&id) {
            return Err(self.used_after_all(id).into());
        }
        self.announce_never_used()?;
        Ok(self.announce(id)?)
    }

    fn syncs_statistics(&self) -> bool {
        self.replica.options.sync_batch_norm && self.is_shared
    }

    fn sum_over_ranks(&mut self, sums: &Tensor) -> paceline_model::Result<()> {
        let group = self.replica.group.for_purpose(Purpose::Statistics);
        let reduce = || group.all_reduce(sums, ReduceOp::Sum);
        self.track.record(span::EXPOSED, reduce).map_err(StrategyError::from)?;
        Ok(())
    }
}
