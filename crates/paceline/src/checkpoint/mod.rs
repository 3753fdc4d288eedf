//! Checkpoints: everything that a run needs to go on as if it had never stopped, but for what a lossy
//! strategy keeps for itself; a run that saves is warned of that.
//!
//! A checkpoint is one file, `checkpoint.safetensors`, in a folder of the user's: parameters, running
//! statistics and optimizer state as tensors, and as metadata where the run stands and the settings that
//! decide how it goes on. It is replaced in one atomic step, so there is always a complete one.
//!
//! It knows nothing of ranks, nor of how a run is configured: what has to be the same is handed in as a list.

mod file;
mod setting;

pub use file::{Checkpoint, is_in, save};
pub use setting::Setting;
