//! A training run: the work of one rank, from the batches to the summary.
//!
//! The user's settings become a configuration, whose defaults are filled in and whose parts are checked together
//! ([`resolve`], [`resolve_ranks`], [`shortage`]). [`train`] starts the ranks, and [`evaluate`] those that only evaluate.
//!
//! The ranks agree, and each builds the parts of its steps ([`setup`]). [`trainer`] has the loop: it counts optimizer steps, gets
//! batches ([`batches`]), brings them to the device ([`to_device`]), makes the step ([`step`]), evaluates ([`evaluation`]) and saves (`saving`); `ending` reports. Checkpoints have the position of a run, so that it can
//! continue where another one stopped ([`resume`]), with the flags that the checkpoint records ([`recorded`]). All ranks
//! must have the same settings ([`agreement`]), and ranks that a strategy keeps equal the same weights ([`equality`]). Work that
//! may take longer than an operation, such as a save, is done [`together`]. The files that a run writes go to its
//! [`folder`]. [`instructions`] are those that the user holds a process to.
//!
//! Nothing here depends on whether the ranks are threads or processes, nor on which flags were typed.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod agreement;
pub mod batches;
mod card_watch;
mod device_checks;
mod ending;
pub mod equality;
pub mod evaluate;
pub mod evaluation;
pub mod folder;
mod generated;
mod generations;
mod handover;
pub mod instructions;
mod markers;
pub mod parts;
pub mod precision;
pub mod predictions;
pub mod recorded;
pub mod resolve;
pub mod resolve_ranks;
pub mod resume;
pub mod same_bits;
pub mod sample;
mod saving;
pub mod setup;
pub mod shards;
pub mod shortage;
mod staging;
pub mod step;
pub mod to_device;
pub mod together;
pub mod train;
pub mod trainer;
mod training;
mod watch;

#[cfg(test)]
mod figure_tests;
#[cfg(test)]
mod shortage_tests;
#[cfg(test)]
mod together_tests;
