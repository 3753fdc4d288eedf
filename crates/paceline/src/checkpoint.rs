//! Checkpoints: everything that a run needs to go on as if it had never stopped.
//!
//! A checkpoint is one file, `checkpoint.safetensors`, in a folder of the user's: parameters and
//! optimizer state as tensors, the place in the data and the settings that decide it as metadata. It
//! is replaced in one atomic step, so there is always a complete one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use paceline_memory::DType;
use paceline_model::weights::{self, WeightFile};
use paceline_model::{Model, Optimizer, Storage};

use crate::config::TrainConfig;
use crate::{Failure, Result};

/// The file's name in its folder.
const FILE: &str = "checkpoint.safetensors";
/// What metadata of this version look like.
const VERSION: &str = "1";

/// Where a run stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Epochs that are complete.
    pub epochs: u64,
    /// Steps made, over all epochs.
    pub steps: u64,
}

/// The settings that must agree for a run to go on to the same bits, as flag and value.
fn sampling(config: &TrainConfig) -> Vec<(&'static str, String)> {
    vec![
        ("--seed", config.seed.to_string()),
        ("--global-batch-size", config.global_batch_size.to_string()),
        ("--steps-per-epoch", config.steps_per_epoch.to_string()),
        ("--data", config.data.kind.name().to_owned()),
        ("--samples", config.data.samples.map_or("all".into(), |samples| samples.to_string())),
    ]
}

/// Writes the checkpoint of a run that stands at `progress`.
pub fn save(
    folder: &Path,
    config: &TrainConfig,
    storage: &Storage,
    optimizer: &Optimizer,
    progress: Progress,
) -> Result<()> {
    fs::create_dir_all(folder)
        .map_err(|e| Failure::io(format!("cannot make the folder {}", folder.display()), e))?;
    let mut metadata = BTreeMap::from([
        ("version".to_owned(), VERSION.to_owned()),
        ("epochs".to_owned(), progress.epochs.to_string()),
        ("steps".to_owned(), progress.steps.to_string()),
        ("optimizer_steps".to_owned(), optimizer.steps().to_string()),
    ]);
    for (flag, value) in sampling(config) {
        metadata.insert(flag.trim_start_matches('-').to_owned(), value);
    }
    Ok(weights::save(&folder.join(FILE), storage, optimizer, &metadata)?)
}

/// Checks that the checkpoint in `folder` is whole and belongs to this run. Loads nothing.
pub fn check(folder: &Path, config: &TrainConfig, model: &Model) -> Result<()> {
    let refuse =
        |reason: String| Failure::Usage(format!("--resume {}: {reason}", folder.display()));
    let file = WeightFile::open(&folder.join(FILE)).map_err(|e| refuse(e.to_string()))?;
    file.check(&model.layout, DType::F32, &config.optimizer.config())
        .map_err(|e| refuse(e.to_string()))?;
    if file.metadata().get("version").is_none_or(|version| version != VERSION) {
        return Err(refuse("it was written by another version".into()));
    }
    for (flag, ours) in sampling(config) {
        let theirs = file.metadata().get(flag.trim_start_matches('-'));
        if theirs != Some(&ours) {
            let theirs = theirs.map_or("nothing", String::as_str);
            return Err(refuse(format!(
                "it was written with {flag} {theirs}, this run has {ours}; the samples would come \
                 in another order: pass the same {flag}"
            )));
        }
    }
    let progress = progress_of(&file).map_err(refuse)?;
    if progress.epochs >= config.epochs as u64 {
        return Err(refuse(format!(
            "it has {} complete epochs already; pass a larger --epochs than {}",
            progress.epochs, config.epochs
        )));
    }
    Ok(())
}

/// Loads the checkpoint in `folder`, and says where the run stands.
pub fn load(folder: &Path, storage: &Storage, optimizer: &mut Optimizer) -> Result<Progress> {
    let file = WeightFile::open(&folder.join(FILE))?;
    file.restore(storage, optimizer)?;
    optimizer.resume_after(number(&file, "optimizer_steps").map_err(Failure::Run)?);
    progress_of(&file).map_err(Failure::Run)
}

fn progress_of(file: &WeightFile) -> std::result::Result<Progress, String> {
    Ok(Progress { epochs: number(file, "epochs")?, steps: number(file, "steps")? })
}

fn number(file: &WeightFile, key: &str) -> std::result::Result<u64, String> {
    let text = file.metadata().get(key).ok_or_else(|| format!("it does not say its {key}"))?;
    text.parse().map_err(|_| format!("its {key} ({text}) is not a number"))
}
