//! PTX: a parser and an interpreter.
//!
//! [`parse()`] turns a text into a [`Module`]; [`PtxLaunch::run`] runs one of its kernels on a [`DeviceMemory`]. Every
//! access is checked: bounds, alignment, freed and uninitialized memory, races between the warps of a block, barriers
//! that not all threads reach, shuffles whose lanes are absent. A [`Fault`] names kernel, block, thread and line. The
//! interpreter knows nothing of streams, handles or error codes of CUDA.
//!
//! [`DeviceMemory`]: crate::DeviceMemory
//! [`Fault`]: crate::Fault

mod arithmetic;
mod collective;
mod convert;
mod decode;
mod decode_arithmetic;
mod float;
mod instruction;
mod launch;
mod operand;
mod parse;
mod scalar;
mod shared;
mod source;
mod step;
mod warp;

pub use float::{HalfType, to_tf32};
pub use instruction::{Module, Parameter, PtxKernel, Variable};
pub use launch::PtxLaunch;
pub use parse::{ParseError, parse};
