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
pub mod check;
pub mod cli;
pub mod compare;
pub mod evaluate;
pub mod experiment;
pub mod fetch;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod insight;
pub mod links;
pub mod metrics;
pub mod prelude;
pub mod run;
pub mod sweep;
pub mod trace;

mod program;

// The crates below, so that a program needs no other dependency.
pub use {
    clap, paceline_collectives as collectives, paceline_data as data, paceline_kernels as kernels,
    paceline_memory as memory, paceline_model as model, paceline_strategies as strategies,
};

// Until each of them names the crate itself, the modules here find these as `crate::disk` and so on.
pub use paceline_checkpoint as checkpoint;
pub use paceline_choices as choices;
pub use paceline_commbench as bench;
use paceline_failure as failure;
pub use paceline_failure::{Failure, Result, outputs};
use paceline_host::{bar, text};
pub use paceline_host::{disk, resources, streams};
pub use paceline_hub::{self as hub, download};
pub use paceline_launch::{comm, environment, launcher};
use paceline_launch::{connect, threads};

pub use paceline_settings::profile;

pub use experiment::FinishedRun;
pub use program::Program;
