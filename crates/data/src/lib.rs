//! Data: the samples to train on, their order, and how they get into memory in time.
//!
//! Input: a folder or a seed. Output: [`Batch`]es of tensors, divided into the shares of the ranks, in an
//! order that depends only on the seed and the epoch. A [`Dataset`] reads one sample. A [`Sampler`] decides
//! which samples of each batch a rank reads. A [`Loader`] reads them ahead of the training loop.
//!
//! This crate knows nothing of models. A sampler gets the pair (rank, world); the crate knows nothing more of ranks.
//!
//! # A data set of your own
//!
//! ```
//! use std::sync::Arc;
//!
//! use paceline_data::{Dataset, Field, Loader, LoaderConfig, SampleOrder, Sample, Sampler};
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
//!     fn fields(&self) -> Vec<Field> {
//!         vec![Field::f32("inputs", [1]), Field::f32("targets", [1])]
//!     }
//!
//!     fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
//!         let x = index as f32 / 100.0;
//!         sample.f32("inputs")[0] = x;
//!         sample.f32("targets")[0] = x * x;
//!     }
//! }
//!
//! // The second of two ranks, which share global batches of 32 samples.
//! let dataset = Arc::new(Squares);
//! let sampler = Sampler::new(dataset.len(), 32, 1, 2, SampleOrder::Shuffled { seed: 42 })?;
//! let config = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
//! let mut rows = Vec::new();
//! for batch in Loader::new(dataset, sampler, Allocator::new(), config)? {
//!     let batch = batch?;
//!     rows.push(batch.num_samples());
//! }
//! assert_eq!(rows, [16, 16, 16, 2]); // of 32, 32, 32 and 4
//! # Ok::<(), paceline_data::DataError>(())
//! ```
//!
//! # Samples of different lengths
//!
//! A ragged field has one extent, the first, that varies from sample to sample. A batch pads it to the longest sample of
//! the rank, and has the lengths as a tensor of its own.
//!
//! ```
//! use std::sync::Arc;
//!
//! use paceline_data::{Dataset, Field, Loader, LoaderConfig, SampleOrder, Sample, Sampler};
//! use paceline_memory::Allocator;
//!
//! /// 1, then 1 2, then 1 2 3, and so on.
//! struct Counting;
//!
//! impl Dataset for Counting {
//!     fn len(&self) -> usize {
//!         3
//!     }
//!
//!     fn fields(&self) -> Vec<Field> {
//!         vec![Field::ragged_i64("inputs", 3, 0).below(4), Field::class(2)]
//!     }
//!
//!     fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
//!         sample.set_length(index + 1);
//!         for (value, number) in sample.i64("inputs").iter_mut().zip(1..) {
//!             *value = number;
//!         }
//!         sample.set_class(index as i64 % 2);
//!     }
//! }
//!
//! let sampler = Sampler::new(3, 3, 0, 1, SampleOrder::Sequential)?;
//! let mut loader =
//!     Loader::new(Arc::new(Counting), sampler, Allocator::new(), LoaderConfig::default())?;
//! let batch = loader.next().unwrap()?;
//! let values = |name| batch.get(name).unwrap().read::<i64>();
//! assert_eq!(values("inputs")?[..], [1, 0, 0, 1, 2, 0, 1, 2, 3]); // (3, 3)
//! assert_eq!(values("lengths")?[..], [1, 2, 3]);
//! assert_eq!(values("targets")?[..], [0, 1, 0]);
//! # Ok::<(), paceline_data::DataError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod arrays;
mod batch;
mod cifar10;
mod dataset;
mod decoded;
mod digest;
mod error;
mod field;
mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
#[path = "../../../fuzz/checks/data.rs"]
pub mod fuzzing;
mod idx;
mod image_folder;
mod loader;
mod mnist;
mod npy;
mod number_table;
mod pixels;
mod random;
mod sample;
mod sampler;
mod subset;
mod synthetic_images;
mod synthetic_regression;
mod synthetic_tokens;
pub mod text;

pub use arrays::Arrays;
pub use batch::{Batch, Position};
pub use cifar10::Cifar10;
pub use dataset::{Dataset, Split};
pub use decoded::Decoded;
pub use error::DataError;
pub use field::{BatchShape, Field, TensorShape};
pub use image_folder::ImageFolder;
pub use loader::{Loader, LoaderConfig, Prefetch};
pub use mnist::Mnist;
pub use npy::NpyFolder;
pub use number_table::NumberTable;
pub use sample::{OwnedSample, Sample};
pub use sampler::{EpochPlan, SampleCounts, SampleOrder, Sampler, Share, ShareIter};
pub use subset::Subset;
pub use synthetic_images::{SyntheticImages, SyntheticImagesConfig};
pub use synthetic_regression::SyntheticRegression;
pub use synthetic_tokens::SyntheticTokens;
