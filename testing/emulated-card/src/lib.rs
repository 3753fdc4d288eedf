//! A CUDA card without a card, for tests.
//!
//! The shared library `libpaceline_emulated_card.so` exports the functions of the CUDA driver, cuBLASLt, NCCL, NVML and CUPTI
//! that paceline uses, and a test opens it instead of them. Kernels run on an interpreter of PTX that checks every access. Work runs
//! as late as the program allows, in an order that a seed decides. So tests on any machine find a missing wait, memory that is
//! freed too early, and a kernel's wrong access.
//!
//! Input: calls of these libraries, and PTX. Output: what a card would have computed, or the error code that it
//! would have given, with a message that says more (`paceline_emulated_fault`). But for [`for_tests`], this crate knows
//! nothing of paceline.
//!
//! | environment variable | meaning | default |
//! |---|---|---|
//! | `PACELINE_EMULATED_SEED` | decides every order that CUDA leaves open; 0 is the plain order | 0 |
//! | `PACELINE_EMULATED_CARDS` | number of cards | 1 |
//! | `PACELINE_EMULATED_MEMORY` | bytes of memory of each card | 1 GiB |
//! | `PACELINE_EMULATED_VERSION` | version of the driver | 13000 |
//! | `PACELINE_EMULATED_STEPS` | a launch with more instructions is a timeout | 4,000,000,000 |
//! | `PACELINE_EMULATED_CAPABILITY` | compute capability, from which the shared memory of a block follows | 9.0 |
//! | `PACELINE_EMULATED_NCCL_VERSION` | version of NCCL | 22809 |
//! | `PACELINE_EMULATED_NCCL_FAILS` | the rank that NCCL does not connect | none |
//! | `PACELINE_EMULATED_UTILIZATION` | for how much of the time the card is busy, in percent, says NVML | 50 |
//! | `PACELINE_EMULATED_NVML` | a function of NVML that fails, and its status, such as `nvmlInit_v2:9` | none |
//! | `PACELINE_EMULATED_CUPTI` | a function of CUPTI that fails, and its status, such as `cuptiActivityEnable:35` | none |
//! | `PACELINE_EMULATED_NVTX` | a file to which ranges of NVTX are written | none |
//!
//! Where CUDA only warns, the card is strict. It reports a read of uninitialized memory, a barrier that some threads
//! of a block skip, memory that is freed while queued work still uses it, and a copy between the card and memory that
//! is not pinned during a capture.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod boundary;
mod cupti;
mod driver;
mod fault;
pub mod for_tests;
mod lt;
mod memory;
mod nccl;
mod nvml;
mod nvtx;
pub mod ptx;
mod random;

pub use fault::{Fault, FaultKind};
pub use memory::DeviceMemory;
