//! What a run measures, and where its figures are shown.
//!
//! The trainer tells [`event::Listeners`] what happens; the views are listeners.
//!
//! | file | what it holds |
//! |---|---|
//! | [`event`] | what the trainer tells, and who can listen |
//! | [`meter`] | from spans and records of operations to times of a step |
//! | [`readiness`] | where in a step its operations and gradients lie |
//! | [`steps`] | the measured steps, in bounded memory |
//! | [`rank_report`] | what a rank has to say at the end |
//! | [`anatomy`] | the operations and gradients of a step over all ranks, and the slowest rank |
//! | [`facts`] | everything that is known of a run at its end |
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
pub mod jsonl;
pub mod meter;
pub mod page;
pub mod profiler;
pub mod rank_report;
pub mod readiness;
pub mod steps;
pub mod summary;
pub mod table;
pub mod tensorboard;

use std::path::Path;

pub use rank_report::TOTAL;

use crate::Result;
use crate::run::config::TrainConfig;
use event::Listeners;

/// The views of a run with this folder, which only rank 0 has. A run without one may still write its summary
/// to a file, for rank 0 alone is told how it ended.
pub fn listeners<'a>(config: &'a TrainConfig, folder: Option<&Path>) -> Result<Listeners<'a>> {
    let mut listeners = Listeners::default();
    listeners.add(summary::SummaryFile::new(folder, config.json.as_deref()));
    let Some(folder) = folder else { return Ok(listeners) };
    listeners.add(jsonl::MetricsFile::create(folder)?);
    if config.tensorboard {
        let folder = folder.join("tensorboard");
        listeners.add(tensorboard::TensorBoard::create(&folder)?);
    }
    if !config.quiet {
        listeners.add(console::Console::new(config, folder));
    }
    Ok(listeners)
}
