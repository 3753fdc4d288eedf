//! The names that a program with its own model, data set or strategy needs: `use paceline::prelude::*`.

pub use std::sync::Arc;

pub use clap;
pub use clap::Args;
pub use paceline_collectives::{Group, MeshShape, ReduceOp, Work};
pub use paceline_data::{DataError, Dataset, Field, Sample, Split};
pub use paceline_kernels::linear::Activation;
pub use paceline_kernels::{Real, Stored, dispatch};
pub use paceline_memory::Tensor;
pub use paceline_model::layers::{Linear, Sequence};
pub use paceline_model::{
    Batch, Block, Context, CrossEntropy, Half, Init, Layer, LayoutBuilder, MeanSquaredError, Model,
    ModelError, Objective, ParamId, Saved, layers,
};
pub use paceline_strategies::Result as StrategyResult;
pub use paceline_strategies::{Exactness, Replica, StepContext, Strategy, StrategyError, span};
pub use paceline_trace::SpanTrack;

pub use crate::{Failure, FinishedRun, Program};
pub use paceline_choices::data::DataSettings;
pub use paceline_choices::models::{Defaults, ModelSettings, Samples};
pub use paceline_choices::own::{Own, OwnStrategy};
pub use paceline_choices::strategies::{StrategySettings, Synchronizes};
