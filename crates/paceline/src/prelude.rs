//! The names that a program with its own model, data set or strategy needs: `use paceline::prelude::*`.

pub use std::sync::Arc;

pub use crate::{Failure, Result};
pub use paceline_collectives::{Group, MeshShape, ReduceOp, Work};
pub use paceline_data::{DataError, Dataset, Field, Sample, Split};
pub use paceline_kernels::function::Function;
pub use paceline_kernels::linear::Activation;
pub use paceline_kernels::optimizer::{AdamW, Sgd};
pub use paceline_kernels::{Real, Stored, dispatch};
pub use paceline_memory::{Allocator, Category, DType, Tensor};
pub use paceline_model::layers::{Elementwise, Linear, Sequence};
pub use paceline_model::{
    Batch, Block, Context, CrossEntropy, Half, Init, Layer, LayoutBuilder, MeanSquaredError, Model,
    ModelError, Objective, ParamId, Saved, UnitBuilder, layers,
};
pub use paceline_strategies::Result as StrategyResult;
pub use paceline_strategies::{
    Ddp, Exactness, FlatDdp, Replica, ShardOptions, Sharded, StepContext, Strategy, StrategyError,
    Trainer, ZeroStage, span,
};
pub use paceline_trace::SpanTrack;

#[cfg(feature = "cli")]
pub use crate::{FinishedRun, Program};
#[cfg(feature = "cli")]
pub use clap;
#[cfg(feature = "cli")]
pub use clap::Args;
#[cfg(feature = "cli")]
pub use paceline_choices::data::DataSettings;
#[cfg(feature = "cli")]
pub use paceline_choices::models::{Defaults, ModelSettings, Samples};
#[cfg(feature = "cli")]
pub use paceline_choices::own::{Own, OwnStrategy};
#[cfg(feature = "cli")]
pub use paceline_choices::strategies::{StrategySettings, Synchronizes};
