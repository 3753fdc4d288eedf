//! What can go wrong in a strategy.

use paceline_collectives::CollectiveError;
use paceline_kernels::KernelError;
use paceline_memory::MemoryError;
use paceline_model::ModelError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// Communication failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The model refused.
    #[error(transparent)]
    Model(ModelError),
    /// A kernel refused its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A layer of the model breaks the rule that every gradient is announced exactly once a step.
    #[error("the gradient of {name} was announced {problem}; a layer must announce each once")]
    Announcement {
        /// The parameter, or those among which it is.
        name: String,
        /// How often instead.
        problem: &'static str,
    },
    /// The strategy cannot work with this number of ranks.
    #[error("strategy {strategy} works with one rank only, not {world_size}")]
    OneRankOnly {
        /// The strategy.
        strategy: &'static str,
        /// The number of ranks it was given.
        world_size: usize,
    },
}

impl From<ModelError> for StrategyError {
    /// An error that this crate raised inside a hook comes back as it was.
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Hook(inner) => match inner.downcast::<StrategyError>() {
                Ok(own) => *own,
                Err(other) => StrategyError::Model(ModelError::Hook(other)),
            },
            other => StrategyError::Model(other),
        }
    }
}

impl From<StrategyError> for ModelError {
    /// For hooks, which run inside the model's backward pass.
    fn from(error: StrategyError) -> Self {
        ModelError::Hook(Box::new(error))
    }
}
