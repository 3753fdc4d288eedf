//! A training run: what was asked for, and what one rank does, from the batches to the summary.
//!
//! What was stated, by flags ([`flags`]) or by a file ([`spec_file`]), is a [`spec`]; with all defaults and
//! checked as a whole ([`resolve`]), it is a configuration ([`config`]).
//!
//! [`trainer`] holds the loop: it counts optimizer steps, asks for batches ([`batches`]), makes the step
//! ([`step`]), evaluates ([`evaluation`]) and saves. Where the run stands is a value of its own
//! ([`progress`]), which a checkpoint holds too, so that a run can go on where another one stopped
//! ([`resume`]). What a run writes goes to its [`folder`].
//!
//! Nothing here depends on whether the ranks are threads or processes, nor on which flags were typed.

pub mod batches;
pub mod config;
pub mod evaluation;
pub mod flags;
pub mod folder;
pub mod named;
pub mod open_data;
pub mod origin;
pub mod progress;
pub mod ranks;
pub mod resolve;
pub mod resolve_ranks;
pub mod resume;
pub mod schedule;
pub mod shards;
pub mod spec;
pub mod spec_file;
pub mod step;
pub mod strategy;
pub mod trainer;
