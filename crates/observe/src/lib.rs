//! The observations of a run about itself, and the conclusions from them.
//!
//! The trainer passes events to [`figures::event::Listeners`]; the views are listeners. Each folder imports only those
//! above it here:
//!
//! | folder | contents |
//! |---|---|
//! | [`record`] | the measurements of a rank about its own steps, and the report that it sends to rank 0 |
//! | [`insight`] | conclusions from the reports of all ranks: where a step's time goes, what would change it, and how much memory a run needs |
//! | [`figures`] | every figure of a run, defined once, and the events at which there are new ones |
//! | [`views`] | where figures are shown: on the console, in files, in TensorBoard, as traces |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod figures;
pub mod insight;
pub mod record;
pub mod views;
