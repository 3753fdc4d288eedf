//! Distributed training that shows where every millisecond and megabyte goes.
//!
//! This crate puts the others together: the command line and its resolved configuration, the
//! launcher, the training loop, checkpoints, measurements and reports. It knows how nothing is
//! computed.
//!
//! Start reading at [`run::trainer`], which holds the training loop from top to bottom.
#![forbid(unsafe_code)]

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
pub mod insight;
pub mod launcher;
pub mod links;
pub mod metrics;
pub mod outputs;
pub mod profile;
pub mod resources;
pub mod run;
pub mod streams;
pub mod sweep;
pub mod trace;

mod connect;
mod failure;
mod text;
mod threads;

pub use failure::Failure;

/// The result of everything here that can fail.
pub type Result<T> = std::result::Result<T, Failure>;
