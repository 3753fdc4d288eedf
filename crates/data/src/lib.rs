//! Data: the samples to train on, their order, and how they get into memory in time.
//!
//! Input: a folder or a seed. Output: [`Batch`]es of tensors, divided into the shares of the ranks, in an
//! order that depends only on the seed and the epoch. A [`Dataset`] reads one sample. A [`Sampler`] decides
//! which samples of each batch a rank reads. A [`Loader`] reads them ahead of the training loop.
//!
//! This crate knows nothing of models. Of ranks it knows only the pair (rank, world) that a sampler is given.
//!
//! # A data set of your own
//!
//! ```
//! use std::sync::Arc;
//!
//! use paceline_data::{
//!     Dataset, Loader, LoaderConfig, Order, Sampler, TargetMut, TargetSpec,
//! };
//! use paceline_memory::Allocator;
//!
//! /// Numbers from 0 to 1 and their squares.
//! struct Squares;
//!
//! impl Dataset for Squares {
//!     fn len(&self) -> usize {
//!         100
//!     }
//!
//!     fn input_shape(&self) -> &[usize] {
//!         &[1]
//!     }
//!
//!     fn target(&self) -> TargetSpec {
//!         TargetSpec::Values { dim: 1 }
//!     }
//!
//!     fn read(&self, _epoch: u64, index: usize, input: &mut [f32], target: TargetMut<'_>) {
//!         input[0] = index as f32 / 100.0;
//!         target.values()[0] = input[0] * input[0];
//!     }
//! }
//!
//! // The second of two ranks, which share global batches of 32 samples.
//! let dataset = Arc::new(Squares);
//! let sampler = Sampler::new(dataset.len(), 32, 1, 2, Order::Shuffled { seed: 42 })?;
//! let config = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
//! let mut rows = Vec::new();
//! for batch in Loader::new(dataset, sampler, Allocator::new(), config)? {
//!     let batch = batch?;
//!     rows.push(batch.inputs.dims()[0]);
//! }
//! assert_eq!(rows, [16, 16, 16, 2]); // of 32, 32, 32 and 4
//! # Ok::<(), paceline_data::DataError>(())
//! ```
#![forbid(unsafe_code)]

mod batch;
mod cifar10;
mod dataset;
mod error;
mod files;
#[doc(hidden)]
pub mod fuzzing;
mod idx;
mod loader;
mod mnist;
mod random;
mod sampler;
mod subset;
mod synthetic_images;
mod synthetic_regression;

pub use batch::{Batch, Position};
pub use cifar10::Cifar10;
pub use dataset::{Dataset, Split, TargetMut, TargetSpec};
pub use error::DataError;
pub use loader::{Loader, LoaderConfig, Prefetch};
pub use mnist::Mnist;
pub use sampler::{EpochPlan, Order, SampleCounts, Sampler, Share};
pub use subset::Subset;
pub use synthetic_images::{SyntheticImages, SyntheticImagesConfig};
pub use synthetic_regression::SyntheticRegression;
