//! Memory: where every byte is, what it is for, and who may touch it now.
//!
//! Input: sizes and categories. Output: [`Buffer`]s (pooled host memory, or windows into mappings that other
//! processes share) and [`Tensor`]s (typed and shaped ranges of buffers), each on its [`Device`]. Every access
//! takes a claim on its range. Work that runs in the background leaves its place in its [`Stream`], and later uses must
//! be ordered behind it by its [`Event`]. If a running collective and a layer use the same gradients, the result is an
//! error and never a data race.
//!
//! This crate knows nothing of arithmetic, layers or ranks.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod accelerator;
mod account;
mod allocator;
mod buffer;
mod device;
mod dtype;
mod error;
mod event;
mod heap;
mod mapping;
mod stream;
mod tensor;
mod uses;

pub use accelerator::{Accelerator, Arena, Body, DeviceStream, DoneTimes, Segment, SimSpec};
pub use account::{Category, PhaseUsage, Usage};
pub use allocator::Allocator;
pub use buffer::{Access, Buffer, Claim, ReadGuard, WriteGuard};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{MemoryError, Result};
pub use event::{Event, EventState, Signal};
pub use mapping::Mapping;
pub use stream::Stream;
pub use tensor::{Shape, Tensor};
