//! Training on one rank, without communication.

use paceline_collectives::MeshShape;

use crate::{Exactness, Replica, Result, StepContext, Strategy, StrategyError};

/// Training on one rank: the baseline for all other strategies.
#[derive(Debug, Default)]
pub struct Single;

impl Strategy for Single {
    fn name(&self) -> &'static str {
        "single"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        match replica.group.world_size() {
            1 => Ok(()),
            world_size => Err(StrategyError::OneRankOnly { strategy: self.name(), world_size }),
        }
    }

    fn finish_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        Ok(())
    }
}
