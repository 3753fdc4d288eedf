//! Writes, verifies and reads the file of a checkpoint, and compares it with a run.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

use paceline_data::Position;
use paceline_memory::DType;
use paceline_model::weights::{self, WeightFile};
use paceline_model::{Layout, Optimizer, OptimizerConfig, Storage};

use super::Setting;
use crate::disk::Disk;
use crate::run::progress::{EpochSums, Progress};
use crate::{Failure, Result};

/// The file's name in its folder.
const FILE: &str = "checkpoint.safetensors";
/// The name of the checkpoint before it.
const PREVIOUS: &str = "checkpoint.previous.safetensors";
/// The version of the metadata. Version 2 supported complete epochs only.
const VERSION: &str = "3";

/// Writes the checkpoint of a run that stands at `progress`. A continuation must have the same
/// `settings`. The checkpoint before it is kept beside it.
///
/// # Errors
///
/// If a file cannot be written. Then an earlier checkpoint is still there, and it is complete.
pub(super) fn save(
    disk: &Disk,
    folder: &Path,
    settings: &[Setting],
    storage: &Storage,
    optimizer: &Optimizer,
    progress: &Progress,
) -> Result<()> {
    let metadata = metadata(settings, optimizer, progress);
    let (file, previous) = (folder.join(FILE), folder.join(PREVIOUS));
    let write = |out: &mut (dyn Write + Send)| weights::write(out, storage, optimizer, &metadata);
    disk.replace(&file, Some(&previous), write)
        .map_err(|error| Failure::Run(format!("{}: {error}", file.display())))
}

/// What a checkpoint says about its run, besides the tensors.
pub(crate) fn metadata(
    settings: &[Setting],
    optimizer: &Optimizer,
    progress: &Progress,
) -> BTreeMap<String, String> {
    let Progress { position, steps, samples, epoch } = progress;
    let mut metadata = BTreeMap::from(
        [
            ("version", VERSION.to_owned()),
            ("epochs", position.epoch.to_string()),
            ("batches", position.batch.to_string()),
            ("steps", steps.to_string()),
            ("samples-trained", samples.to_string()),
            // `{:?}` prints as many digits as are needed to read the same number back.
            ("epoch-loss", format!("{:?}", epoch.loss)),
            ("epoch-correct", format!("{:?}", epoch.correct)),
            ("epoch-samples", format!("{:?}", epoch.count)),
            ("optimizer-steps", optimizer.steps().to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    for Setting { key, value, .. } in settings {
        metadata.insert(key.clone(), value.clone());
    }
    metadata
}

/// Removes what a killed run may have left of a checkpoint that it was writing to `folder`.
pub(super) fn remove_partial(disk: &Disk, folder: &Path) -> Result<()> {
    let file = folder.join(FILE);
    disk.remove_partial(&file)
        .map_err(|e| Failure::io(format!("cannot clean up beside {}", file.display()), e))
}

/// Whether `folder` has a checkpoint. A file with the checkpoint's name is complete, because it gets this
/// name by an atomic rename. If the system cannot tell, the answer is yes, so that opening the file
/// reports why.
pub fn is_in(folder: &Path) -> bool {
    [FILE, PREVIOUS].iter().any(|name| folder.join(name).try_exists().unwrap_or(true))
}

/// A checkpoint in memory, whose digest has been verified.
#[derive(Debug)]
pub struct Checkpoint {
    file: WeightFile,
    progress: Progress,
    optimizer_steps: u64,
}

impl Checkpoint {
    /// Reads the last checkpoint in `folder`. Fails if there is none, if it is incomplete, or if another
    /// version of the format wrote it.
    pub fn open(folder: &Path) -> std::result::Result<Self, String> {
        let file = WeightFile::open(&folder.join(FILE)).map_err(|e| {
            let previous = Self::open_named(folder, PREVIOUS);
            let other = previous.map_or_else(|_| String::new(), |previous| {
                format!(
                    "; the checkpoint before it, {PREVIOUS}, is complete (after step {}): --resume auto with \
                     --save goes on from there",
                    previous.progress.steps
                )
            });
            format!("{e}{other}")
        })?;
        Self::of(file)
    }

    /// As [`Checkpoint::open`], but if the last checkpoint cannot be read, opens the one before it, and says so
    /// in a text for the user.
    pub fn open_last_good(folder: &Path) -> std::result::Result<(Self, Option<String>), String> {
        let broken = match WeightFile::open(&folder.join(FILE)) {
            Ok(file) => return Ok((Self::of(file)?, None)),
            Err(error) => error.to_string(),
        };
        match Self::open_named(folder, PREVIOUS) {
            Ok(previous) => {
                let steps = previous.progress.steps;
                let note =
                    format!("{broken}; training goes on from {PREVIOUS}, after step {steps}");
                Ok((previous, Some(note)))
            }
            Err(_) => Err(broken),
        }
    }

    /// Opens the checkpoint in `folder` that has this digest: the last one, or the one before it. Returns `None` if
    /// it is neither, and fails if there is none at all that can be read.
    pub fn open_with_digest(
        folder: &Path,
        digest: &str,
    ) -> std::result::Result<Option<Self>, String> {
        let last = Self::open_named(folder, FILE);
        let previous = || Self::open_named(folder, PREVIOUS);
        match last {
            Ok(last) if last.digest() == digest => Ok(Some(last)),
            Ok(_) => Ok(previous().ok().filter(|previous| previous.digest() == digest)),
            Err(reason) => match previous() {
                Ok(previous) => Ok(Some(previous).filter(|of| of.digest() == digest)),
                Err(_) => Err(reason),
            },
        }
    }

    fn open_named(folder: &Path, name: &str) -> std::result::Result<Self, String> {
        Self::of(WeightFile::open(&folder.join(name)).map_err(|e| e.to_string())?)
    }

    pub(crate) fn of(file: WeightFile) -> std::result::Result<Self, String> {
        match file.metadata().get("version").map_or("none", String::as_str) {
            VERSION => {}
            other => {
                return Err(format!(
                    "{FILE} there is of version {other}, this program reads version {VERSION}: go on with \
                     the program that wrote it, or begin anew in another folder"
                ));
            }
        }
        let epoch = EpochSums {
            loss: number(&file, "epoch-loss")?,
            correct: number(&file, "epoch-correct")?,
            count: number(&file, "epoch-samples")?,
        };
        let position =
            Position { epoch: number(&file, "epochs")?, batch: number(&file, "batches")? };
        let progress = Progress {
            position,
            steps: number(&file, "steps")?,
            samples: number(&file, "samples-trained")?,
            epoch,
        };
        let optimizer_steps = number(&file, "optimizer-steps")?;
        Ok(Self { file, progress, optimizer_steps })
    }

    /// Fails unless the checkpoint has this model's parameters with this optimizer's state and was
    /// written with the same settings.
    pub fn check(
        &self,
        layout: &Layout,
        optimizer: &OptimizerConfig,
        settings: &[Setting],
    ) -> std::result::Result<(), String> {
        self.file.check(layout, DType::F32, optimizer).map_err(|e| e.to_string())?;
        for setting in settings {
            let theirs = self.file.metadata().get(&setting.key);
            if theirs != Some(&setting.value) {
                return Err(setting.refusal(theirs.map(String::as_str)));
            }
        }
        Ok(())
    }

    /// Fails unless the checkpoint has this model's parameters and running statistics. How they were
    /// trained does not matter.
    pub fn check_model(&self, layout: &Layout) -> std::result::Result<(), String> {
        self.file.check_model(layout, DType::F32).map_err(|e| e.to_string())
    }

    /// A setting of the run that wrote the checkpoint, by the flag that set it.
    pub fn setting(&self, flag: &str) -> Option<&str> {
        self.file.metadata().get(flag.trim_start_matches('-')).map(String::as_str)
    }

    /// The progress of the run when it wrote the checkpoint.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Optimizer steps that the optimizer's state has seen.
    pub(crate) fn optimizer_steps(&self) -> u64 {
        self.optimizer_steps
    }

    /// The digest of metadata and tensors.
    pub fn digest(&self) -> &str {
        self.file.digest()
    }

    /// Copies parameters and running statistics into place.
    pub fn restore_model(&self, storage: &Storage) -> Result<()> {
        Ok(self.file.restore_model(storage)?)
    }

    /// Copies parameters, running statistics and optimizer state into place.
    pub fn restore(&self, storage: &Storage, optimizer: &mut Optimizer) -> Result<()> {
        self.file.restore(storage, optimizer)?;
        optimizer.resume_after(self.optimizer_steps);
        Ok(())
    }
}

fn number<T: FromStr>(file: &WeightFile, key: &str) -> std::result::Result<T, String> {
    let text = file.metadata().get(key).ok_or_else(|| format!("it does not say its {key}"))?;
    text.parse().map_err(|_| format!("its {key} ({text}) is not a number"))
}
