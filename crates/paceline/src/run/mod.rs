//! A training run: its settings, and the work of one rank, from the batches to the summary.
//!
//! The settings that the user stated, by flags ([`flags`]), in a file ([`spec_file`]) or by a recipe
//! ([`recipes`]), form a specification ([`spec`]). Once all defaults are filled in and everything is checked
//! ([`resolve`]), it becomes a configuration ([`config`]).
//!
//! [`trainer`] has the loop: it counts optimizer steps, gets batches ([`batches`]), makes the step
//! ([`step`]), evaluates ([`evaluation`]) and saves ([`saving`]). The position of a run is a value of its own
//! ([`progress`]). Checkpoints have it, too, so that a run can continue where another one stopped
//! ([`resume`]), with the flags that the checkpoint records ([`recorded`]). All ranks must have the same settings
//! ([`agreement`]), and those that a strategy keeps equal the same weights ([`equality`]). A signal ends a run after a step
//! ([`stop`]). What may take longer than an operation, such as a save, they do [`together`]. The files that a run writes go
//! to its [`folder`].
//!
//! Nothing here depends on whether the ranks are threads or processes, nor on which flags were typed.

pub mod agreement;
pub mod batches;
pub mod equality;
pub mod evaluation;
pub mod folder;
pub mod precision;
pub mod recorded;
pub mod resolve;
pub mod resolve_ranks;
pub mod resume;
pub mod saving;
pub mod shards;
pub mod shortage;
pub mod step;
pub mod together;
pub mod trainer;

pub use paceline_checkpoint::progress;
pub use paceline_launch::stop;
pub use paceline_settings::{
    config, flags, named, open_data, origin, ranks, recipes, schedule, spec, spec_file, strategy,
};

#[cfg(test)]
mod shortage_tests;
