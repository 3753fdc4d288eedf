//! Training without communication, and in alternating blocks with and without it, to measure what
//! synchronization costs.
//!
//! Replicas that are never synchronized diverge, so the trained model is useless. The time per step is
//! useful: the difference from the time of another strategy is the cost of that strategy. On a noisy machine
//! the two times must be measured in alternation, in [`SyncBlocks`].

use paceline_collectives::MeshShape;

use crate::{Exactness, Result, StepContext, Strategy, StrategyError};

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

    fn finish_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        Ok(())
    }
}

/// Blocks of steps with a strategy and blocks of steps without communication, in turns. Before each step,
/// [`StepState::synchronizes`](crate::StepState::synchronizes) says which kind it is.
#[derive(Clone, Copy, Debug)]
pub struct SyncBlocks {
    num_steps: usize,
}

impl SyncBlocks {
    /// Blocks of this many steps. Errors if it is zero.
    pub fn new(num_steps: usize) -> Result<Self> {
        if num_steps == 0 {
            let reason =
                "blocks of steps with and without synchronization have at least 1 step, not 0";
            return Err(StrategyError::Setting(reason.to_owned()));
        }
        Ok(Self { num_steps })
    }

    /// Whether step number `step`, counted from 0, is synchronized. The first block is.
    pub fn is_synchronized(self, step: usize) -> bool {
        (step / self.num_steps).is_multiple_of(2)
    }

    /// The guarantee that is left of a strategy's: the steps without synchronization let the ranks diverge, and nothing makes them
    /// equal again.
    pub fn exactness(self, of_strategy: &Exactness) -> Exactness {
        let num_steps = self.num_steps;
        let words = of_strategy.words();
        let words = format!("{words}, {num_steps} steps with it and {num_steps} without");
        Exactness::Unsynchronized(words)
    }
}
