//! What a run measures, and where its figures are shown.
//!
//! The trainer tells [`event::Listeners`] what happens; the views are listeners.
//!
//! | file | what it holds |
//! |---|---|
//! | [`event`] | the events of training, and the trait of listeners |
//! | [`memory`] | the memory of a rank by phase and category |
//! | [`memory_lines`] | what the console prints about it, beside the prediction |
//! | [`meter`] | turns spans and records of operations into the times of a step |
//! | [`readiness`] | when in a step its operations and gradients take place |
//! | [`steps`] | the measured steps, in bounded memory |
//! | [`samples`] | some of them with the times of operations and gradients, from which advice is computed |
//! | [`rank_report`] | the report of a rank at the end |
//! | [`anatomy`] | the operations and gradients of a step over all ranks, and the slowest rank |
//! | [`facts`] | everything that is known about a run at its end |
//! | [`figure`], [`table`] | every figure: name, unit, definition, how it is computed and where it is shown |
//! | [`console`], [`blocks`], [`jsonl`], [`summary`], [`tensorboard`] | the views of the table |
//! | [`page`] | the table as `docs/metrics.md` |
//! | [`profiler`] | traces of some of the steps |

pub mod anatomy;
pub mod blocks;
pub mod console;
pub mod event;
pub mod facts;
pub mod figure;
#[cfg(test)]
mod figure_tests;
pub mod gathers;
pub mod jsonl;
pub mod memory;
pub mod memory_lines;
pub mod meter;
pub mod page;
pub mod profiler;
pub mod rank_report;
pub mod readiness;
pub mod samples;
pub mod steps;
pub mod summary;
pub mod table;
pub mod tensorboard;

use std::path::Path;

pub use memory::TOTAL;

use crate::Result;
use crate::disk::Disk;
use crate::run::config::TrainConfig;
use event::Listeners;

/// The views of a run. Only rank 0 has a run folder. Without a folder, there is still the view that
/// writes the summary to the file of `--json`, and on rank 0 only, because only rank 0 gets the event
/// with the results.
pub fn listeners<'a>(
    disk: &Disk,
    config: &'a TrainConfig,
    folder: Option<&Path>,
) -> Result<Listeners<'a>> {
    let mut listeners = Listeners::default();
    listeners.add(summary::SummaryFile::new(disk.clone(), folder, config.json.as_deref()));
    let Some(folder) = folder else { return Ok(listeners) };
    listeners.add(jsonl::MetricsFile::create(disk, folder)?);
    if config.tensorboard {
        listeners.add(tensorboard::TensorBoard::create(disk, folder)?);
    }
    if !config.quiet {
        listeners.add(console::Console::new(config, folder));
    }
    Ok(listeners)
}
