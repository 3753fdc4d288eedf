//! Models as layers with an explicit forward and backward pass, over flat parameter storage.
//!
//! Input: batches. Output: losses, and gradients that are written directly into flat storage and announced as
//! soon as they are final. There is no graph and no tape: a layer returns from its forward pass what it needs
//! in its backward pass. [`layers::Sequence`] composes layers.
//!
//! This crate knows nothing of ranks, but which part of a divided layer is its own: the code that receives the announcements shares and
//! synchronizes storage.
//!
//! Your own layer implements the two passes. [`dispatch`](paceline_kernels::dispatch) lets it work in f32, f64 and bf16
//! with one loop. Finite differences can check it, in f64:
//!
//! ```
//! use paceline_kernels::{Stored, dispatch};
//! use paceline_memory::Tensor;
//! use paceline_model::{Context, Half, Layer, LayoutBuilder, Result, Saved, gradcheck};
//!
//! /// y = x^2, element by element.
//! struct Square;
//!
//! impl Layer for Square {
//!     fn has_parameters(&self) -> bool {
//!         false
//!     }
//!
//!     fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
//!         let output = cx.activation(input.shape())?;
//!         dispatch!("square", input.dtype(), S => {
//!             for (y, x) in output.write::<S>()?.iter_mut().zip(input.read::<S>()?.iter()) {
//!                 *y = S::store(x.load() * x.load());
//!             }
//!             Ok((output, Saved::of([input])))
//!         })
//!     }
//!
//!     fn backward(
//!         &self,
//!         cx: &mut Context,
//!         saved: &mut Saved,
//!         d_output: Tensor,
//!         _: Half,
//!     ) -> Result<Option<Tensor>> {
//!         let [input] = saved.tensors()?;
//!         let d_input = cx.gradient_of(&input)?;
//!         dispatch!("square", input.dtype(), S => {
//!             let (x, dy) = (input.read::<S>()?, d_output.read::<S>()?);
//!             for (i, dx) in d_input.write::<S>()?.iter_mut().enumerate() {
//!                 *dx = S::store((x[i].load() + x[i].load()) * dy[i].load());
//!             }
//!             Ok(Some(d_input))
//!         })
//!     }
//! }
//!
//! let layout = LayoutBuilder::new().finish(1);
//! let worst = gradcheck::worst_error(&Square, &layout, &[3, 4], 42)?;
//! assert!(worst < 1e-7);
//! # Ok::<(), paceline_model::ModelError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
#[path = "../../../fuzz/checks/model.rs"]
pub mod fuzzing;
pub mod gradcheck;
pub mod layers;
pub mod pretrained;
pub mod weights;

mod batch;
mod block;
mod cache;
mod cnn;
mod context;
mod costs;
mod difference;
mod divided;
mod error;
mod exchange;
mod held;
mod init;
mod layer;
mod layout;
mod llama;
mod mlp;
mod model;
mod objective;
mod optimizer;
mod owned;
mod precision;
mod readiness;
mod rehearsal;
mod storage;
mod view;

pub use batch::Batch;
pub use block::Block;
pub use cnn::CnnConfig;
pub use context::{Computed, Context, Mode, PassHooks, UnitPass};
pub use costs::{BlockCost, block_costs};
pub use difference::{Difference, FileTensor};
pub use divided::{Divided, ParamPart};
pub use error::ModelError;
pub use exchange::PartExchange;
pub use held::Held;
pub use init::Init;
pub use layer::{Half, Layer, Saved};
pub use layout::{
    BufferId, Layout, LayoutBuilder, Param, ParamId, StateBuffer, Unit, UnitBuilder, UnitId,
};
pub use llama::{
    Decoder, Generator, LlamaConfig, LlamaTask, Sampling, SpecialTokens, TokenSampler,
};
pub use mlp::MlpConfig;
pub use model::Model;
pub use objective::{CrossEntropy, MeanSquaredError, Objective};
pub use optimizer::{Optimizer, OptimizerConfig};
pub use owned::Owned;
pub use precision::Precision;
pub use readiness::GradReadiness;
pub use rehearsal::{Rehearsal, boundaries};
pub use storage::{Storage, WeightsDigest};
pub use view::{OpenUnits, View};

/// The result of all functions of this crate that can fail.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
