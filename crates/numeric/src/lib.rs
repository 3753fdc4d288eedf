//! The rules that arithmetic and communication share, so that all ways to compute a result give the same bits.
//!
//! - [`tree`]: the order in which values are added up.
//! - [`mod@bf16`], [`mod@f16`]: rounding to 16 bits.
//! - [`SimdLevel`]: the vector instructions that a loop is compiled for, and [`Instructions`] that a process is held to.
//!
//! This crate has no loops of its own. It does not know tensors, threads or ranks.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod bf16;
pub mod f16;
pub mod tree;

mod instructions;
mod simd_level;

pub use instructions::Instructions;
pub use simd_level::SimdLevel;
