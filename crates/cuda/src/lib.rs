//! NVIDIA cards. The libraries of the vendor are loaded when a card is first asked for, so one program runs with and
//! without them, and nothing of theirs is needed to build it.
//!
//! Input: addresses, sizes and the sources of kernels. Output: memory of a card, streams of work, and events. This crate knows
//! neither tensors nor layers, and orders nothing by itself: the caller that submits work states its waits.
//!
//! | file | contents |
//! |---|---|
//! | [`library`] | finds and opens a library, and says where it was sought |
//! | [`driver`] | the functions of the driver, and their errors |
//! | [`card`] | a card: its properties, memory, and loaded kernels |
//! | [`stream`] | queues of work, and events |
//! | [`graph`] | work of a stream that is captured once and replayed |
//! | [`compiler`] | from a source in CUDA C++ to code for a card, kept on disk |
//! | [`kernel`] | where kernels are stated, and the arguments of a launch |
//! | [`matmul`] | matrix products by cuBLASLt |
//! | [`nccl`] | communication between cards by NCCL |
//! | [`cupti`] | what a card ran, and the calls that put it there |
//! | [`nvml`] | how busy a card is, and its memory |
//! | [`nvtx`] | ranges that a profiler shows |
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod card;
pub mod compiler;
pub mod cupti;
pub mod driver;
pub mod graph;
pub mod kernel;
pub mod library;
pub mod matmul;
pub mod nccl;
pub mod nvml;
pub mod nvtx;
pub mod stream;

mod error;
#[cfg(not(feature = "libraries"))]
mod opened;
#[cfg(feature = "libraries")]
use libloading::os::unix as opened;

pub use card::Card;
pub use error::CudaError;
pub use graph::Graph;
pub use kernel::{Argument, Arguments, CardKernel, Grid, KernelSource};
pub use matmul::{Epilogue, Factor, Matmul, MatmulSizes, MatrixType};
pub use stream::{Event, Stream};

/// Whether everything is there that computing on a card needs: driver, card, compiler and the library of products. Errors
/// with the first that is missing, and where it was sought. `None` stands for any card.
pub fn probe(index: Option<usize>) -> Result<()> {
    let count = driver::count()?;
    if index.unwrap_or_default() >= count {
        return Err(CudaError::NoCard { index: index.unwrap_or_default(), count });
    }
    compiler::version()?;
    matmul::probe()
}

/// The result of this crate.
pub type Result<T> = std::result::Result<T, CudaError>;
