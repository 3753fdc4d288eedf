//! Trace files: this crate writes and reads them, analyzes them rank by rank and across ranks, merges them,
//! and shows the results as reports, tables and charts.
//!
//! The tracks of a recorder, trace files and named series of numbers go in. Figures, one file of all ranks,
//! HTML, CSV, JSON and Markdown files come out. The crate knows of ranks and devices only what a trace file
//! says about them. It knows nothing of training, models or layers.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod advice;
pub mod doctor;
pub mod hang;
pub mod hta;
pub mod json;
pub mod kineto;
pub mod limit;
pub mod ranks;
pub mod read;
pub mod report;
pub mod snapshot;
pub mod timeline;

pub use paceline_table::{fitted, stats, table};

/// So that `common` names this crate as the tests outside of it do.
#[cfg(test)]
extern crate self as paceline_analysis;

mod alive;
mod backward;
mod calls;
#[cfg(test)]
#[path = "../tests/all/common/mod.rs"]
mod common;
mod error;
mod steps;

pub use error::TraceError;
