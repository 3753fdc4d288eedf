//! Checkpoints: everything that a run needs to continue as if it had never stopped, except the state that
//! a lossy strategy keeps for itself. A run that saves with such a strategy prints a warning.
//!
//! A checkpoint is one file, `checkpoint.safetensors`, in a folder that the user chooses. Its tensors are
//! parameters, running statistics and optimizer state. Its metadata say where the run stands, and the
//! settings that a continuation needs. The file is replaced in one atomic step, and the one before it is kept
//! as `checkpoint.previous.safetensors`, so there is always a complete one. A run holds a lock on the folder.
//!
//! This module knows neither ranks nor how a run is configured: it gets the settings that have to be the
//! same as a list.

mod file;
mod folder;
mod setting;

pub(crate) use file::metadata;
pub use file::{Checkpoint, is_in};
pub use folder::Folder;
pub use setting::Setting;
