//! The calls of a pass on the strategy, in training and in evaluation.
//!
//! Input: the calls of the model. Output: calls of the strategy, with each gradient announced exactly once per step, even
//! if the step does not use its parameter.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use paceline_collectives::{Purpose, ReduceOp, Work};
use paceline_memory::Tensor;
use paceline_model::{
    Computed, GradReadiness, Layer, ParamId, PartExchange, PassHooks, Storage, UnitId, UnitPass,
    View,
};

use crate::observer::Phase;
use crate::state::UnusedParams;
use crate::{Replica, Result, StepContext, Strategy, StrategyError, span};

/// The strategy and its context during a pass.
pub(crate) struct StepHooks<'a> {
    pub(crate) strategy: &'a mut dyn Strategy,
    pub(crate) cx: StepContext<'a>,
    /// Whether the loss is summed over the ranks.
    pub(crate) is_shared: bool,
    /// Whether this is the last backward pass of the step.
    pub(crate) is_last: bool,
    /// The parameters that the first step left out, if the graph is static.
    known: Option<Arc<UnusedParams>>,
    /// Whether the parameters that no step uses still have to be announced in this pass.
    announces_unused: bool,
    pub(crate) launch: PassLaunch,
    /// Exchanges with the ranks that divide the layers, in order.
    exchanges: VecDeque<Work>,
}

/// How the passes of a step are launched.
#[derive(Debug)]
pub(crate) enum PassLaunch {
    /// Each piece of work by itself.
    ByWork,
    /// As a graph. The gradients that have become final in it, in order, are announced afterwards.
    Graph(Vec<ParamId>),
    /// As a graph that has the communication too.
    GraphThatSends,
}

impl<'a> StepHooks<'a> {
    pub(crate) fn new(strategy: &'a mut dyn Strategy, cx: StepContext<'a>) -> Self {
        let is_shared = cx.state.synchronizes && strategy.shares_loss();
        let known = cx.state.left_out.clone();
        let (is_last, announces_unused, launch) = (false, true, PassLaunch::ByWork);
        let exchanges = VecDeque::new();
        Self { strategy, cx, is_shared, is_last, known, announces_unused, launch, exchanges }
    }

    /// Announces a gradient to the strategy, now that this rank's part of it is final.
    pub(crate) fn announce(&mut self, id: ParamId) -> Result<()> {
        let Replica { model, storage, compute, options, .. } = self.cx.replica;
        let partial_sums = &self.cx.state.partial_sums;
        if options.no_sync && !partial_sums.is_empty() {
            partial_sums.add_to(compute, &storage.grad(id)?, model.layout.param(id).start)?;
        }
        if let PassLaunch::Graph(deferred) = &mut self.launch {
            deferred.push(id);
            return Ok(());
        }
        self.cx.track.mark(span::GRADIENT_READY, id.0);
        if self.cx.state.synchronizes {
            self.strategy.gradient_ready(&mut self.cx, id)?;
        }
        Ok(())
    }

    /// Whether a gradient that no step uses is announced in this pass: in each one, if each is reduced.
    fn announces_in_pass(&self, id: ParamId) -> bool {
        let Replica { model, options, .. } = self.cx.replica;
        let is_root = model.layout.unit(model.layout.param(id).unit).is_root;
        let is_each = self.strategy.reduces_every_pass() || !options.no_sync;
        self.is_last || !is_root || !is_each
    }

    /// Sets a gradient that no layer has written to zero, unless it lies in memory of its unit that the strategy clears.
    fn clear(&self, id: ParamId) -> Result<()> {
        let storage = &self.cx.replica.storage;
        if storage.has_all_grads() {
            storage.grad(id)?.fill_zero()?;
        }
        Ok(())
    }

    /// Whether no step uses a parameter.
    fn is_never_used(&self, id: ParamId) -> bool {
        self.known.as_ref().is_some_and(|known| known.unused.contains(&id))
    }

    fn used_after_all(&self, id: ParamId) -> StrategyError {
        let name = self.cx.replica.model.layout.param(id).name.clone();
        StrategyError::UsedAfterAll { name }
    }

    /// Announces zero gradients for the parameters that no step uses, once per pass that announces. This must come after the
    /// forward pass: these parameters, and so what the strategy sends here, may depend on the rank, and all ranks must send the
    /// sums of the loss first.
    fn announce_never_used(&mut self) -> Result<()> {
        self.announces_unused = false;
        if let Some(known) = self.known.clone() {
            for &id in &known.unused {
                if self.announces_in_pass(id) {
                    self.clear(id)?;
                    self.announce(id)?;
                }
            }
        }
        Ok(())
    }

    /// Ends a backward pass whose gradients are reduced: announces the parameters that it has not used, or used only in part, and
    /// returns them. Errors if [`ReplicaOptions`](crate::ReplicaOptions) does not allow them, or, with a static
    /// graph, if the first step did not leave them out.
    pub(crate) fn end_backward(&mut self, readiness: &GradReadiness) -> Result<UnusedParams> {
        let Replica { model, options, .. } = self.cx.replica;
        if self.announces_unused {
            self.announce_never_used()?;
        }
        let known = self.known.clone();
        let never_used = known.as_ref().map_or(&[][..], |known| &known.unused);
        if let Some(&id) = never_used.iter().find(|id| readiness.is_written(**id)) {
            return Err(self.used_after_all(id));
        }
        let is_meant = |id: &ParamId| !never_used.contains(id);
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
        self.announces_unused = true;
        let (unfinished, unused) = left_out.into_iter().partition(|id| readiness.is_written(*id));
        Ok(UnusedParams { unused, unfinished })
    }
}

impl PassHooks for StepHooks<'_> {
    fn open(&mut self, _: &Storage, unit: UnitId, pass: UnitPass) -> paceline_model::Result<View> {
        Ok(match pass {
            UnitPass::Forward => self.strategy.pre_forward(&mut self.cx, unit),
            UnitPass::Backward { writes_grads } => {
                self.strategy.pre_backward(&mut self.cx, unit, writes_grads)
            }
        }?)
    }

    fn close(&mut self, unit: UnitId, pass: UnitPass) -> paceline_model::Result<()> {
        Ok(match pass {
            UnitPass::Forward => self.strategy.post_forward(&mut self.cx, unit),
            UnitPass::Backward { writes_grads } => {
                self.strategy.post_backward(&mut self.cx, unit, writes_grads)
            }
        }?)
    }

    fn gradient_ready(&mut self, id: ParamId) -> paceline_model::Result<()> {
        if self.is_never_used(id) {
            return Err(self.used_after_all(id).into());
        }
        if self.announces_unused {
            self.announce_never_used()?;
        }
        Ok(self.announce(id)?)
    }

    fn observes(&self) -> bool {
        self.cx.state.executor.observer.is_some()
    }

    fn computed(&mut self, of: Computed, tensor: &Tensor) -> paceline_model::Result<()> {
        let StepContext { replica: Replica { model, compute, .. }, state, .. } = &mut self.cx;
        let Some(observer) = &mut state.executor.observer else { return Ok(()) };
        let (layout, blocks) = (&model.layout, &model.blocks);
        let number = |of: &dyn Layer| {
            blocks.iter().position(|block| std::ptr::addr_eq(block, of)).unwrap_or(0)
        };
        let unit = |number: usize| Cow::Borrowed(&*layout.unit(blocks[number].unit).name);
        let (phase, order, name) = match of {
            Computed::Output(of) => (Phase::Forward, number(of), unit(number(of))),
            Computed::InputGradient(of) => {
                (Phase::Backward, blocks.len() - number(of), unit(number(of)))
            }
            Computed::LossGradient => (Phase::Loss, 0, Cow::Borrowed("loss")),
            // Each layer that uses it has a part of it, and only their sum is the same in all layouts.
            Computed::Gradient(id) if layout.unit(layout.param(id).unit).is_root => return Ok(()),
            Computed::Gradient(id) => (Phase::Gradient, id.0, layout.param(id).label()),
        };
        Ok(observer.add(compute, phase, (order, &name), (tensor.dims(), 0), tensor)?)
    }

    fn syncs_statistics(&self) -> bool {
        self.cx.replica.options.sync_batch_norm && self.is_shared
    }

    fn sum_over_ranks(&mut self, sums: &Tensor) -> paceline_model::Result<()> {
        let group = self.cx.replica.group.for_purpose(Purpose::Statistics);
        let reduce = || group.all_reduce(sums, ReduceOp::Sum);
        self.cx.track.record(span::EXPOSED, reduce).map_err(StrategyError::from)?;
        Ok(())
    }

    fn start_exchange(&mut self, of: PartExchange) -> paceline_model::Result<()> {
        let Some(ranks) = &self.cx.replica.tensor else { return Ok(()) };
        let ranks = ranks.for_purpose(Purpose::Layer);
        let work = match of {
            PartExchange::Gather { own, all } => ranks.all_gather_async(own, all),
            PartExchange::Scatter { sum, own } => {
                ranks.reduce_scatter_async(sum, own, ReduceOp::Sum)
            }
            PartExchange::Sum(sum) => ranks.all_reduce_async(sum, ReduceOp::Sum),
            PartExchange::Max(most) => ranks.all_reduce_async(most, ReduceOp::Max),
        };
        self.exchanges.push_back(work.map_err(StrategyError::from)?);
        Ok(())
    }

    fn finish_exchange(&mut self) -> paceline_model::Result<()> {
        let Some(work) = self.exchanges.pop_front() else { return Ok(()) };
        self.cx.wait(&work)?;
        Ok(())
    }
}
