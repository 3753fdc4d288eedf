//! What a run measures, and where its figures are shown.
//!
//! The trainer tells [`event::Listeners`] what happens; the views are listeners.
//!
//! | file | what it holds |
//! |---|---|
//! | [`event`] | what the trainer tells, and who can listen |
//! | [`meter`] | from spans and records of operations to times of a step |
//! | [`anatomy`] | where the time of a step went, over all ranks |
//! | [`summary`] | what a run came to |
//! | [`console`], [`jsonl`], [`tensorboard`] | views: the console, `metrics.jsonl`, `TensorBoard`'s event file |
//! | [`profiler`] | traces of some of the steps |

pub mod anatomy;
pub mod console;
pub mod event;
pub mod jsonl;
pub mod meter;
pub mod profiler;
pub mod summary;
pub mod tensorboard;

use std::path::Path;

pub use meter::{TOTAL, quantile};

use crate::Result;
use crate::config::TrainConfig;
use event::Listeners;

/// The views of a run with this folder, which only rank 0 has.
pub fn listeners<'a>(config: &'a TrainConfig, folder: Option<&Path>) -> Result<Listeners<'a>> {
    let mut listeners = Listeners::default();
    let Some(folder) = folder else { return Ok(listeners) };
    listeners.add(jsonl::MetricsFile::create(folder)?);
    if config.tensorboard {
        let folder = folder.join("tensorboard");
        listeners.add(tensorboard::TensorBoard::create(&folder, config.model.has_classes())?);
    }
    listeners.add(summary::SummaryFile::new(folder, config.json.as_deref()));
    if !config.quiet {
        listeners.add(console::Console::new(config, folder));
    }
    Ok(listeners)
}
