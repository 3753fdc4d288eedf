//! The settings of a run: as stated, and as resolved.
//!
//! The settings that the user stated, by flags ([`flags`]), in a file ([`spec_file`]) or by a recipe ([`recipes`]), form a
//! specification ([`spec`]). Once all defaults are filled in and everything is checked, it becomes a configuration
//! ([`config`]); its parts are [`strategy`], [`ranks`], [`schedule`], [`origin`] and [`profile`]. The code that fills it in
//! and the code that trains with it are above this crate.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
pub mod flags;
pub mod loss_scale;
pub mod micro_batches;
pub mod named;
pub mod open_data;
pub mod origin;
pub mod part;
pub mod pipeline;
pub mod profile;
pub mod ranks;
pub mod recipes;
pub mod schedule;
pub mod spec;
pub mod spec_file;
pub mod strategy;
