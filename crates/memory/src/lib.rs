//! Memory: where every byte is, what it is for, and who may touch it now.
//!
//! Input: sizes and categories. Output: [`Buffer`]s (pooled memory, or windows into mappings that other processes share) and
//! [`Tensor`]s (typed and shaped ranges of buffers), each on its [`Device`]. Every access takes a claim on its range. Work in
//! the background has a position in its [`Stream`], and later uses must be ordered after it by its [`Event`]. If a running
//! collective and a layer use the same gradients, the result is an error and never a data race.
//!
//! The crate has two halves: `queues` of work, and `buffers` that work uses. Queues know memory only by one trait: work keeps it
//! and uses ranges of it. Above both are `transfer` (bytes in and out of a device) and `graph` (work of a card that is captured
//! and replayed).
//!
//! This crate knows nothing of arithmetic, layers or ranks.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod buffers;
mod device;
mod error;
mod graph;
mod queues;
mod transfer;

pub use buffers::account::{Category, PhaseUsage, Usage};
pub use buffers::allocator::Allocator;
pub use buffers::buffer::{Buffer, Claim, ReadGuard, WriteGuard};
pub use buffers::dtype::{DType, Element, UnknownDType};
pub use buffers::mapping::Mapping;
pub use buffers::shape::Shape;
pub use buffers::tensor::Tensor;
pub use device::Device;
pub use error::{MemoryError, Result};
pub use graph::{GraphPool, GraphedWork};
pub use queues::accelerator::Accelerator;
pub use queues::device_stream::DeviceStream;
pub use queues::event::{Event, EventState, Signal};
pub use queues::sim::SimSpec;
pub use queues::stream::Stream;
pub use queues::times::DoneTimes;
pub use queues::used_memory::Access;
pub use queues::work::Body;
