//! The errors of this crate.

use std::fmt;

use paceline_collectives::CollectiveError;
use paceline_kernels::KernelError;
use paceline_memory::MemoryError;
use paceline_model::ModelError;

/// An error of this crate.
#[derive(thiserror::Error)]
pub enum StrategyError {
    /// Communication failed.
    // The source, by which a program tells whose fault it is.
    #[error("{0}")]
    Collective(#[from] CollectiveError),
    /// The model returned an error.
    #[error(transparent)]
    Model(ModelError),
    /// A kernel refused its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor or buffer could not be allocated or claimed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A gradient was not announced to the strategy exactly once in a step.
    #[error("the gradient of {name} was announced {problem}; it must be announced once a step")]
    Announcement {
        /// The parameter, or several parameters that include it.
        name: String,
        /// How often it was announced instead.
        problem: &'static str,
    },
    /// A step gave no gradient for some parameters.
    #[error(
        "no layer gave a gradient for {}; {}",
        names.join(", "),
        if *is_new {
            "the first step used them, so the graph is not static: set ReplicaOptions::static_graph to false"
        } else {
            "replicas would drift apart: take them out of the model, freeze them, or set \
             ReplicaOptions::find_unused_parameters"
        }
    )]
    Unused {
        /// The names of these parameters.
        names: Vec<String>,
        /// Whether unused parameters are allowed, but these were used in the first step.
        is_new: bool,
    },
    /// A parameter that the first step did not use has a gradient in a later step.
    #[error(
        "{name} has a gradient, though the first step did not use it, so the graph is not static: set \
         ReplicaOptions::static_graph to false"
    )]
    UsedAfterAll {
        /// The parameter's name.
        name: String,
    },
    /// A setting has an invalid value.
    #[error("{0}")]
    Setting(String),
    /// The strategy cannot work with this number of ranks.
    #[error("strategy {strategy} works with one rank only, not {world_size}")]
    OneRankOnly {
        /// The strategy.
        strategy: &'static str,
        /// The number of ranks of its group.
        world_size: usize,
    },
}

impl fmt::Debug for StrategyError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<ModelError> for StrategyError {
    /// Unwraps an error that this crate raised inside a hook.
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
    /// Wraps an error of a hook, which runs inside the model's backward pass.
    fn from(error: StrategyError) -> Self {
        ModelError::Hook(Box::new(error))
    }
}
