//! Checkpoints: everything that a run needs to continue as if it had never stopped.
//!
//! A checkpoint is a folder, `step-000000123`, in a folder that the user chooses. Each rank writes one file of shards, and
//! rank 0 writes `index.json`, which says what they mean. The index has logical tensors without padding, so a checkpoint
//! can be read by any number of ranks in any placement.
//!
//! - `index`: which tensors there are, where their elements lie, and the digests of the files
//! - `pieces`: which elements a rank writes
//! - `snapshot`, `writer`, `saver`: copied at once, written in the background, completed by rank 0
//! - `steps`, `folder`: the checkpoints in a folder, and the run to which the folder belongs
//! - `proof`, `not_finite`: which of them are proven by the steps after them, and from which one a restart begins
//! - `reader`, `opened`: any range of any tensor, compared with the digests, put into place
//! - `verify`, `export`, `hugging_face`, `command`: `paceline checkpoint`
//!
//! This crate knows neither how ranks talk to each other nor how a run is configured: it gets the settings that have to
//! be the same as a list.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod args;
pub mod command;
pub mod hugging_face;
pub mod index;
pub mod pieces;
pub mod progress;
mod reader;

mod export;
mod folder;
mod not_finite;
mod opened;
mod proof;
mod saver;
mod setting;
mod snapshot;
mod steps;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

pub use folder::Folder;
pub use index::Previous;
pub use not_finite::NotFinite;
pub use opened::{Checkpoint, RankOfRun, find, head};
pub use proof::{GOOD_AFTER_STEPS, Restart, restart};
pub use saver::{SAVE_LIMIT, SaveSettings, Saver};
pub use setting::Setting;
pub use snapshot::MIN_BUDGET_BYTES;
pub use steps::{in_the_way, is_in, latest};

pub use snapshot::entries;
