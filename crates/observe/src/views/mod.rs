//! Where figures are shown. Each view is a listener of its own, and knows no other.
//!
//! | file | view |
//! |---|---|
//! | [`console`], [`blocks`], [`memory_lines`] | on the terminal: the epochs, the steps and the summary |
//! | [`jsonl`], [`tensorboard`] | a line or a point for each step, evaluation and checkpoint: `metrics.jsonl`, event files |
//! | [`numerics`] | `numerics.bin`: digests of the gradients and weights of each step |
//! | [`passes`] | `passes.jsonl`: digests of the tensors of each pass |
//! | [`summary`] | `summary.json`, and the file of `--json` |
//! | [`end_files`] | `summary.txt` and `step.svg` |
//! | `step_lines` | the time line of a step, on the terminal and as `step.svg` |
//! | `pipeline_lines`, `pipeline_lanes` | why the ranks of a pipeline were idle, and their step in that picture |
//! | [`profiler`], `card_records` | traces of some of the steps |

mod appended;
pub mod blocks;
mod card_records;
pub mod console;
pub mod end_files;
mod head;
pub mod jsonl;
pub mod memory_lines;
pub mod numerics;
pub mod passes;
mod pipeline_lanes;
mod pipeline_lines;
pub mod profiler;
mod step_lines;
pub mod summary;
pub mod tensorboard;

use std::path::Path;

use paceline_failure::Result;
use paceline_host::disk::Disk;
use paceline_settings::config::TrainConfig;

use crate::figures::event::Listeners;

/// The views of a run. Only rank 0 has a run folder. Without a folder, there is still the view that
/// writes the summary to the file of `--json`, and on rank 0 only, because only rank 0 gets the event
/// with the results.
pub fn listeners<'a>(
    disk: &Disk,
    config: &'a TrainConfig,
    folder: Option<&Path>,
) -> Result<Listeners<'a>> {
    let mut listeners = Listeners::default();
    listeners.add(summary::SummaryFile::new(disk.clone(), folder, config.output.json.as_deref()));
    let Some(folder) = folder else { return Ok(listeners) };
    listeners.add(end_files::EndFiles::new(disk.clone(), config, folder));
    listeners.add(jsonl::MetricsFile::create(disk, folder)?);
    if config.output.watch_numerics {
        listeners.add(numerics::NumericsFile::new(disk, folder));
    }
    if config.output.watch_passes.is_some() {
        listeners.add(passes::PassesFile::create(disk, folder)?);
    }
    if config.output.tensorboard {
        listeners.add(tensorboard::TensorBoard::create(disk, folder)?);
    }
    if !config.output.quiet {
        listeners.add(console::Console::new(config, folder));
    }
    Ok(listeners)
}
