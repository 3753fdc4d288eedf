//! Training without communication, and in alternating blocks with and without it, to measure what
//! synchronization costs.
//!
//! Replicas that are never synchronized diverge, so the trained model is useless. The time per step is
//! useful: the difference to the time of another strategy is the cost of that strategy. On a noisy machine
//! the two have to be measured in alternation, which [`Alternating`] does.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_kernels::loss::LossSums;
use paceline_model::{Model, Optimizer, ParamId, Storage};
use paceline_trace::SpanTrack;

use crate::{Exactness, MicroBatch, Replica, Result, StepLoss, Strategy, StrategyError};

/// Every rank trains independently. The loss is not shared either.
#[derive(Debug, Default)]
pub struct NoSync;

impl Strategy for NoSync {
    fn name(&self) -> &'static str {
        "no_sync"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Unsynchronised(self.name().to_owned())
    }

    fn shares_loss(&self) -> bool {
        false
    }

    fn finish(&mut self, _: &Replica, _: &mut SpanTrack) -> Result<()> {
        Ok(())
    }
}

/// Alternates between blocks of steps with a strategy and blocks of steps without communication.
pub struct Alternating {
    inner: Box<dyn Strategy>,
    block: usize,
    steps: usize,
}

impl Alternating {
    /// Begins with a block of `block` steps of `inner`. Errors if `block` is zero.
    pub fn new(inner: Box<dyn Strategy>, block: usize) -> Result<Self> {
        if block == 0 {
            let reason =
                "blocks of steps with and without synchronisation have at least 1 step, not 0";
            return Err(StrategyError::Setting(reason.to_owned()));
        }
        Ok(Self { inner, block, steps: 0 })
    }

    /// Whether step number `step`, counted from 0, is synchronized. If `block` is zero, all steps are.
    pub fn is_synchronised(block: usize, step: usize) -> bool {
        step.checked_div(block).unwrap_or(0).is_multiple_of(2)
    }
}

impl Strategy for Alternating {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// The steps without synchronization let the ranks diverge, and nothing makes them equal again.
    fn exactness(&self) -> Exactness {
        let (inner, block) = (self.inner.exactness(), self.block);
        let words = format!("{}, {block} steps with it and {block} without", inner.words());
        Exactness::Unsynchronised(words)
    }

    fn backing(&mut self, model: &Model, compute: &Compute, group: &Group) -> Result<Storage> {
        self.inner.backing(model, compute, group)
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        self.inner.prepare(replica)
    }

    fn shares_loss(&self) -> bool {
        self.inner.shares_loss()
    }

    fn gradient_ready(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        id: ParamId,
    ) -> Result<()> {
        self.inner.gradient_ready(replica, track, id)
    }

    fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.inner.finish(replica, track)
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

    fn settle(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        self.inner.settle(replica, track)
    }

    fn evaluate(&mut self, replica: &Replica, batch: &MicroBatch) -> Result<LossSums> {
        self.inner.evaluate(replica, batch)
    }

    fn train_step(
        &mut self,
        replica: &mut Replica,
        micro_batches: &[MicroBatch],
        track: &mut SpanTrack,
    ) -> Result<StepLoss> {
        let step = self.steps;
        self.steps += 1;
        match Self::is_synchronised(self.block, step) {
            true => self.inner.train_step(replica, micro_batches, track),
            false => NoSync.train_step(replica, micro_batches, track),
        }
    }
}
