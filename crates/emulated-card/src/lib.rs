//! A CUDA card without a card, for tests.
//!
//! The shared library `libpaceline_emulated_card.so` exports the functions of the CUDA driver, of cuBLASLt and of NCCL
//! that paceline uses; a test opens it in their place. Kernels run on an interpreter of PTX that checks every access,
//! and work runs as late as the program allows, in an order that a seed decides. So a wait that is missing, memory that
//! is freed too early, and a kernel that touches what it must not are found on any machine.
//!
//! Input: calls of the three libraries, and PTX. Output: what a card would have computed, or the error code that it
//! would have given, with a message that says more. This crate knows nothing of paceline.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod boundary;
mod driver;
mod fault;
mod lt;
mod memory;
mod nccl;
pub mod ptx;
mod random;

pub use fault::{Fault, FaultKind};
pub use memory::DeviceMemory;
