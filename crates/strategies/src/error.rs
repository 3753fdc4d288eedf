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
    /// A strategy was told of gradients otherwise than once a step.
    #[error("the gradient of {name} was announced {problem}; it must be announced once a step")]
    Announcement {
        /// The parameter, or those among which it is.
        name: String,
        /// How often instead.
        problem: &'static str,
    },
    /// A step has no gradient of some parameters.
    #[error(
        "no layer gave a gradient for {}; {}",
        names.join(", "),
        if *is_new {
            "the first step used them, so the graph is not static: pass --no-static-graph"
        } else {
            "replicas would drift apart: take them out of the model, freeze them, or pass \
             --find-unused-parameters"
        }
    )]
    Unused {
        /// Their names.
        names: Vec<String>,
        /// Whether parameters may be unused, but these were used in the first step.
        is_new: bool,
    },
    /// A parameter that the first step left out has a gradient.
    #[error(
        "{name} has a gradient, though the first step did not use it, so the graph is not static: pass \
         --no-static-graph"
    )]
    UsedAfterAll {
        /// Its name.
        name: String,
    },
    /// A setting makes no sense.
    #[error("{0}")]
    Setting(String),
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
