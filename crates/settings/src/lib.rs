//! What states a run, and what it becomes.
//!
//! The settings that the user stated, by flags ([`flags`]), in a file ([`spec_file`]) or by a recipe ([`recipes`]), form a
//! specification ([`spec`]). Once all defaults are filled in and everything is checked, it becomes a configuration
//! ([`config`]), of which [`strategy`], [`ranks`], [`schedule`], [`origin`] and [`profile`] are the parts. Who fills it in
//! and who trains with it is above this crate.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
pub mod copies;
pub mod flags;
pub mod loss_scale;
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
