//! Checkpoints: everything that a run needs to go on as if it had never stopped, but for what a lossy
//! strategy keeps for itself; a run that saves is warned of that.
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

use crate::cli::ScheduleName;
use crate::config::TrainConfig;
use crate::run::progress::Progress;
use crate::run::resume::Resume;
use crate::{Failure, Result};

/// The file's name in its folder.
const FILE: &str = "checkpoint.safetensors";
/// What metadata of this version look like.
const VERSION: &str = "2";

/// A setting that must be the same for a run to go on as if it had never stopped.
struct Setting {
    /// Its name among the metadata.
    key: &'static str,
    /// The flag that sets it.
    flag: &'static str,
    value: String,
    /// What another value would mean.
    otherwise: &'static str,
}

fn settings(config: &TrainConfig) -> Vec<Setting> {
    let setting = |otherwise| {
        move |flag: &'static str, value: String| {
            let key = flag.trim_start_matches('-');
            Setting { key, flag, value, otherwise }
        }
    };
    let order = setting("the samples would come in another order");
    let shards = config.rank_samples.as_ref().map_or("none".into(), |samples| {
        samples.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
    });
    let course = setting("the learning rate would take another course");
    let schedule = &config.schedule;
    let decays = schedule.name != ScheduleName::Constant;
    let sync = setting("the gradients would be other ones");
    let strategy = &config.strategy;
    let clipped = config.clip_grad_norm.map_or("none".into(), |norm| norm.to_string());
    vec![
        order("--seed", config.seed.to_string()),
        order("--global-batch-size", config.global_batch_size.to_string()),
        order("--steps-per-epoch", config.steps_per_epoch.to_string()),
        order("--data", config.data.kind.name().to_owned()),
        order("--samples", config.data.samples.map_or("all".into(), |samples| samples.to_string())),
        order(
            "--image",
            config.data.image.map_or("of the data".into(), |image| format!("{image:?}")),
        ),
        order("--rank-samples", shards),
        sync("--accumulate", strategy.accumulate.to_string()),
        sync("--strategy", strategy.kind()),
        sync("--sync-batch-norm", strategy.sync_batch_norm.to_string()),
        course("--lr-schedule", schedule.name.name().to_owned()),
        course("--lr-warmup-steps", schedule.warmup_steps.to_string()),
        course("--min-lr", schedule.min_lr.to_string()),
        setting("the steps would be of another size")("--clip-grad-norm", clipped),
        Setting {
            key: "lr-steps",
            ..course(
                "--lr-steps",
                if decays { config.lr_steps().to_string() } else { "any".into() },
            )
        },
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
    for Setting { key, value, .. } in settings(config) {
        metadata.insert(key.to_owned(), value);
    }
    Ok(weights::save(&folder.join(FILE), storage, optimizer, &metadata)?)
}

/// Whether there is a checkpoint in `folder`. What is there under its name is complete: it appears by
/// being renamed. Where the system cannot tell, there is one, so that opening it says why.
pub fn is_in(folder: &Path) -> bool {
    folder.join(FILE).try_exists().unwrap_or(true)
}

/// Opens a checkpoint, having checked that it is whole and belongs to this run.
pub fn open(resume: &Resume, config: &TrainConfig, model: &Model) -> Result<WeightFile> {
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let path = resume.folder().join(FILE);
    let file = WeightFile::open(&path).map_err(|e| refuse(e.to_string()))?;
    file.check(&model.layout, DType::F32, &config.optimizer.config())
        .map_err(|e| refuse(e.to_string()))?;
    if file.metadata().get("version").is_none_or(|version| version != VERSION) {
        return Err(refuse("it was written by another version".into()));
    }
    for Setting { key, flag, value, otherwise } in settings(config) {
        let theirs = file.metadata().get(key);
        if theirs != Some(&value) {
            let theirs = theirs.map_or("nothing", String::as_str);
            return Err(refuse(format!(
                "it was written with {flag} {theirs}, this run has {value}; {otherwise}: pass the \
                 same {flag}"
            )));
        }
    }
    let progress = progress_of(&file).map_err(refuse)?;
    // Where one command starts a run again and again, having nothing left to do is no mistake.
    let must_go_on = matches!(resume, Resume::From(_));
    if must_go_on && progress.epochs >= config.epochs as u64 {
        return Err(refuse(format!(
            "it has {} complete epochs already; pass a larger --epochs than {}",
            progress.epochs, config.epochs
        )));
    }
    Ok(file)
}

/// Copies a checkpoint into place, and says where the run stands.
pub fn restore(
    file: &WeightFile,
    storage: &Storage,
    optimizer: &mut Optimizer,
) -> Result<Progress> {
    file.restore(storage, optimizer)?;
    optimizer.resume_after(number(file, "optimizer_steps").map_err(Failure::Run)?);
    progress_of(file).map_err(Failure::Run)
}

fn progress_of(file: &WeightFile) -> std::result::Result<Progress, String> {
    Ok(Progress { epochs: number(file, "epochs")?, steps: number(file, "steps")? })
}

fn number(file: &WeightFile, key: &str) -> std::result::Result<u64, String> {
    let text = file.metadata().get(key).ok_or_else(|| format!("it does not say its {key}"))?;
    text.parse().map_err(|_| format!("its {key} ({text}) is not a number"))
}
