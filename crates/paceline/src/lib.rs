//! Distributed training that shows where every millisecond and megabyte goes.
//!
//! This crate puts the others together: the command line and its resolved configuration, the
//! launcher, the training loop, checkpoints, measurements and reports. It knows how nothing is
//! computed.
//!
//! A program with a model, a data set or a strategy of its own is a [`Program`]; the [`prelude`] has what it needs:
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

pub mod analyze;
pub mod bench;
pub mod check;
pub mod checkpoint;
pub mod choices;
pub mod cli;
pub mod comm;
pub mod compare;
pub mod disk;
pub mod download;
pub mod environment;
pub mod evaluate;
pub mod experiment;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod hub;
pub mod insight;
pub mod launcher;
pub mod links;
pub mod metrics;
pub mod outputs;
pub mod prelude;
pub mod profile;
pub mod resources;
pub mod run;
pub mod streams;
pub mod sweep;
pub mod trace;

mod bar;
mod connect;
mod failure;
mod program;
mod screen;
mod text;
mod threads;

// The crates below, so that a program needs no other dependency.
pub use {
    clap, paceline_collectives as collectives, paceline_data as data, paceline_kernels as kernels,
    paceline_memory as memory, paceline_model as model, paceline_strategies as strategies,
};

pub use experiment::FinishedRun;
pub use failure::Failure;
pub use program::Program;

/// The result of everything here that can fail.
pub type Result<T> = std::result::Result<T, Failure>;
