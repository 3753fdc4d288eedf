//! Checkpoints: everything that a run needs to go on as if it had never stopped, except what a lossy
//! strategy keeps for itself; a run that saves with such a strategy is warned.
//!
//! A checkpoint is one file, `checkpoint.safetensors`, in a folder of the user's. Its tensors are parameters,
//! running statistics and optimizer state; its metadata say where the run stands and which settings decide
//! how it goes on. The file is replaced in one atomic step, so there is always a complete one.
//!
//! This module knows nothing of ranks, nor of how a run is configured: the settings that have to be the same
//! are handed in as a list.

mod file;
mod setting;

pub use file::{Checkpoint, is_in, save};
pub use setting::Setting;
