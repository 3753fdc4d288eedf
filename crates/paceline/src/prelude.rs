//! The names for a training of one's own: `use paceline::prelude::*`.
//!
//! A [`Model`] is a list of [`Block`]s and an [`Objective`]. A block is a [`Layer`] whose parameters form a unit, made by a
//! [`LayoutBuilder`]. Each rank has a [`Trainer`], which makes steps on its [`Batch`]es. Ranks form a [`Group`]: threads of one program by
//! [`Group::threads`], or processes. The strategy decides what each rank holds, and when gradients travel; all exact ones end with the same
//! bits:
//!
//! ```
//! use std::thread;
//!
//! use paceline::prelude::*;
//!
//! /// Numbers (8, 3) and their sums (8, 1), other ones on each rank.
//! fn batch(rank: usize) -> Result<Batch> {
//!     let memory = Allocator::new();
//!     let tensor = |columns: usize| memory.tensor(DType::F32, [8, columns], Category::Data);
//!     let (inputs, targets) = (tensor(3)?, tensor(1)?);
//!     for (at, value) in inputs.write::<f32>()?.iter_mut().enumerate() {
//!         *value = ((24 * rank + at) as f32).sin();
//!     }
//!     let sums = inputs.read::<f32>()?.chunks(3).map(|row| row.iter().sum()).collect::<Vec<f32>>();
//!     targets.write::<f32>()?.copy_from_slice(&sums);
//!     Ok(Batch::new(inputs, targets))
//! }
//!
//! fn train(group: Group, strategy: impl Strategy + 'static) -> Result<(f64, String)> {
//!     let (rank, mut layout) = (group.rank(), LayoutBuilder::new());
//!     let sum = layout.block("sum", |unit| Linear::new(unit, 3, 1, Activation::None));
//!     let model = Model::new("sum", [sum], MeanSquaredError, layout.finish(group.world_size()));
//!     let mut trainer = Trainer::new(model, strategy, group, AdamW { lr: 0.1, ..AdamW::default() })?;
//!     for _ in 0..100 {
//!         trainer.step(&[batch(rank)?])?;
//!     }
//!     Ok((trainer.evaluate(&[batch(rank)?])?.loss, trainer.digest()?))
//! }
//!
//! fn on_two_ranks<S: Strategy + 'static>(strategy: fn() -> S) -> Result<Vec<(f64, String)>> {
//!     thread::scope(|scope| {
//!         let start = |group| scope.spawn(move || train(group, strategy()));
//!         let ranks: Vec<_> = Group::threads(2).into_iter().map(start).collect();
//!         ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
//!     })
//! }
//!
//! let ends = on_two_ranks(Ddp::default)?;
//! assert!(ends[0].0 < 0.01 && ends[0] == ends[1]);
//! // The same bits, with a half of the parameters and of the optimizer's state on each rank.
//! assert_eq!(on_two_ranks(|| Sharded::new(ZeroStage::Three, ShardOptions::default()))?, ends);
//! # Ok::<(), Failure>(())
//! ```
//!
//! A layer of an element-wise function is an [`Elementwise`] of a [`Function`]; any other implements [`Layer`]. With the feature `cli`, a
//! `Program` is the command line with models, data sets and strategies of one's own: `Own` types, whose fields are flags.

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

#[cfg(feature = "studies")]
pub use crate::FinishedRun;
#[cfg(feature = "cli")]
pub use crate::Program;
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
