//! Distributed training that shows where every millisecond and megabyte goes.
//!
//! This crate puts the others together under one name, and has the command line. It contains no arithmetic.
//!
//! A program with a model, a data set or a strategy of its own is a [`Program`]; the [`prelude`] has the names for it:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     paceline::Program::new().main()
//! }
//! ```
//!
//! Within a program, training is a function ([`Program::train`]):
//!
//! ```no_run
//! let run = paceline::Program::new().train(["--epochs", "1", "--nproc", "2", "--quiet"])?;
//! println!("loss {:?}, weights {}", run.loss(), run.weights());
//! # Ok::<(), paceline::Failure>(())
//! ```
//!
//! Start reading at [`run::trainer`], which holds the training loop from top to bottom.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cli")]
pub mod commands;
pub mod prelude;

#[cfg(feature = "cli")]
mod logging;
#[cfg(feature = "cli")]
mod mistakes;
#[cfg(feature = "cli")]
mod program;

// The crates below, so that a program needs no other dependency.
#[cfg(feature = "analysis")]
pub use paceline_analysis as analysis;
#[cfg(feature = "charts")]
pub use paceline_table as table;
#[cfg(feature = "studies")]
pub use {
    clap, paceline_checkpoint as checkpoint, paceline_choices as choices,
    paceline_commbench as commbench, paceline_hub as hub, paceline_launch as launch,
    paceline_observe as observe, paceline_run as run, paceline_settings as settings,
    paceline_study as study,
};
pub use {
    paceline_collectives as collectives, paceline_data as data, paceline_kernels as kernels,
    paceline_memory as memory, paceline_model as model, paceline_strategies as strategies,
    paceline_trace as trace,
};

pub use paceline_failure::{Failure, Result};
#[cfg(feature = "studies")]
pub use paceline_run::train::FinishedRun;
#[cfg(feature = "cli")]
pub use program::Program;
