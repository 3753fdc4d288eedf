//! A training run on one rank, from the batches to the summary.
//!
//! [`trainer`] holds the loop: it counts optimizer steps, asks for batches ([`batches`]), makes the step
//! ([`step`]), evaluates ([`evaluation`]) and saves. Where the run stands is a value of its own
//! ([`progress`]), which a checkpoint holds too, so that a run can go on where another one stopped
//! ([`resume`]). What a run writes goes to its [`folder`].
//!
//! Nothing here depends on whether the ranks are threads or processes, nor on which flags were typed.

pub mod batches;
pub mod evaluation;
pub mod folder;
pub mod open_data;
pub mod origin;
pub mod progress;
pub mod ranks;
pub mod resume;
pub mod shards;
pub mod step;
pub mod trainer;
