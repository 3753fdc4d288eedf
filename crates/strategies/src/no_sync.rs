//! Training without communication, and in alternating blocks with and without it, to measure what
//! synchronization costs.
//!
//! Replicas that are never synchronized diverge, so the trained model is useless. The time per step is
//! useful: the difference from the time of another strategy is the cost of that strategy. On a noisy machine
//! the two times must be measured in alternation, as [`Alternating`] does.

use paceline_collectives::{Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::Tensor;
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::{Exactness, Footprint, Replica, Result, Strategy, StrategyError};

/// Every rank trains independently. The loss is not shared either.
#[derive(Debug, Default)]
pub struct NoSync;

impl Strategy for NoSync {
    fn name(&self) -> &'static str {
        "no_sync"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Unsynchronized(self.name().to_owned())
    }

    fn shares_loss(&self) -> bool {
        false
    }

    fn finish_gradients(&mut self, _: &Replica, _: &mut SpanTrack) -> Result<()> {
        Ok(())
    }
}

/// Alternates between blocks of steps with a strategy and blocks of steps without communication.
pub struct Alternating {
    inner: Box<dyn Strategy>,
    block: usize,
    /// The steps whose gradients are finished.
    steps: usize,
}

impl Alternating {
    /// Begins with a block of `block` steps of `inner`. Errors if `block` is zero.
    pub fn new(inner: Box<dyn Strategy>, block: usize) -> Result<Self> {
        if block == 0 {
            let reason =
                "blocks of steps with and without synchronization have at least 1 step, not 0";
            return Err(StrategyError::Setting(reason.to_owned()));
        }
        Ok(Self { inner, block, steps: 0 })
    }

    /// Whether step number `step`, counted from 0, is synchronized. If `block` is zero, all steps are.
    pub fn is_synchronized(block: usize, step: usize) -> bool {
        step.checked_div(block).unwrap_or(0).is_multiple_of(2)
    }

    fn is_now_synchronized(&self) -> bool {
        Self::is_synchronized(self.block, self.steps)
    }
}

impl Strategy for Alternating {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// The steps without synchronization let the ranks diverge, and nothing makes them equal again.
    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        let (inner, block) = (self.inner.exactness(mesh), self.block);
        let words = format!("{}, {block} steps with it and {block} without", inner.words());
        Exactness::Unsynchronized(words)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        self.inner.owned(model, mesh, rank)
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        self.inner.footprint(model, precision, mesh, rank)
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        self.inner.allocate(model, precision, compute, mesh)
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.inner.prepare(replica)
    }

    fn pre_forward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<View> {
        self.inner.pre_forward(replica, track, unit)
    }

    fn post_forward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<()> {
        self.inner.post_forward(replica, track, unit)
    }

    fn pre_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<View> {
        self.inner.pre_backward(replica, track, unit, writes_grads)
    }

    fn post_backward(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
        writes_grads: bool,
    ) -> Result<()> {
        self.inner.post_backward(replica, track, unit, writes_grads)
    }

    fn max_micro_batches(&self) -> Option<usize> {
        self.inner.max_micro_batches()
    }

    fn passes_are_local(&self) -> bool {
        self.inner.passes_are_local()
    }

    fn reduces_every_pass(&self) -> bool {
        self.inner.reduces_every_pass()
    }

    fn shares_loss(&self) -> bool {
        self.is_now_synchronized() && self.inner.shares_loss()
    }

    fn gradient_ready(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        id: ParamId,
    ) -> Result<()> {
        if self.is_now_synchronized() {
            self.inner.gradient_ready(replica, track, id)
        } else {
            Ok(())
        }
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        let is_synchronized = self.is_now_synchronized();
        self.steps += 1;
        if is_synchronized { self.inner.finish_gradients(replica, track) } else { Ok(()) }
    }

    fn grad_norm(&mut self, replica: &Replica) -> Result<f64> {
        self.inner.grad_norm(replica)
    }

    fn optimizer_step(
        &mut self,
        replica: &Replica,
        optimizer: &mut Optimizer,
        track: &mut SpanTrack,
    ) -> Result<()> {
        self.inner.optimizer_step(replica, optimizer, track)
    }

    fn sync_replicas(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.inner.sync_replicas(replica, track)
    }

    fn gather_unit(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        unit: UnitId,
    ) -> Result<Held> {
        self.inner.gather_unit(replica, track, unit)
    }

    fn digest(&mut self, replica: &Replica) -> Result<String> {
        self.inner.digest(replica)
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        self.inner.state()
    }
}
