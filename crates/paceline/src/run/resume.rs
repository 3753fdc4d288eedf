//! Determines where a run begins: at the start, or where a checkpoint stands. All ranks begin at the same
//! place.
//!
//! This file knows what the flags ask for, and which settings a continuation must share. [`checkpoint`]
//! knows what a checkpoint is.

use paceline_collectives::Group;
use paceline_model::{Layout, Model, Optimizer, Storage};
use paceline_strategies::{AccumulationOrder, Replica};

use super::named::Course;
use crate::checkpoint::{self, Checkpoint, Folder, Setting};
use crate::choices::data::DataConfig;
use crate::run::config::TrainConfig;
use crate::run::origin::Resume;
use crate::run::progress::Progress;
use crate::{Failure, Result};

/// Checks, before ranks start, that a run with `num_samples` training samples can begin where the flags
/// say. Changes nothing. Returns what the user has to know: that the last checkpoint is broken, for example.
pub fn check(config: &TrainConfig, model: &Model, num_samples: usize) -> Result<Option<String>> {
    match &config.resume {
        Some(resume) if is_given(resume) => Ok(open(resume, config, &model.layout, num_samples)?.1),
        _ => Ok(None),
    }
}

/// Restores parameters and optimizer, and returns the progress at which the run begins. All ranks call
/// this together.
///
/// Ranks may look at different moments, or see a shared folder differently. So rank 0 looks for a
/// checkpoint and tells the others its digest. A rank that finds another checkpoint fails.
pub fn begin(
    config: &TrainConfig,
    replica: &Replica,
    optimizer: &mut Optimizer,
    num_samples: usize,
) -> Result<Progress> {
    let Some(resume) = &config.resume else { return Ok(Progress::default()) };
    let Replica { group, model, storage, .. } = replica;
    let is_first = group.rank() == 0;
    let first = match is_first && is_given(resume) {
        true => Some(open(resume, config, &model.layout, num_samples)?.0),
        false => None,
    };
    let found = first.as_ref().map(|checkpoint| checkpoint.digest().to_owned());
    let Some(digest) = group.broadcast_object(Some(&found), 0)? else {
        return Ok(Progress::default());
    };
    let checkpoint = match first {
        Some(checkpoint) => checkpoint,
        None => Checkpoint::open_with_digest(resume.folder(), &digest)
            .map_err(|reason| Failure::Usage(format!("{}: {reason}", resume.flag())))?
            .ok_or_else(|| another(group, &resume.flag()))?,
    };
    checkpoint.restore(storage, optimizer)?;
    Ok(checkpoint.progress())
}

/// Fails unless all ranks have found the checkpoint with this digest. `flag` is for the error message.
/// All ranks call this together.
pub fn check_same(group: &Group, digest: &str, flag: &str) -> Result<()> {
    let first: String = group.broadcast_object(Some(&digest.to_owned()), 0)?;
    if first == digest { Ok(()) } else { Err(another(group, flag)) }
}

fn another(group: &Group, flag: &str) -> Failure {
    Failure::Run(format!(
        "{flag}: rank {} finds another checkpoint there than rank 0; all ranks must see the same folder",
        group.rank()
    ))
}

/// The settings that determine the samples, by flag.
pub fn identity_of_data(data: &DataConfig, seed: u64) -> Vec<(String, String)> {
    let mut identity = data.identity();
    identity.push(("--seed".to_owned(), seed.to_string()));
    identity
}

/// Whether there is a checkpoint to continue from, as far as this process sees.
fn is_given(resume: &Resume) -> bool {
    match resume {
        Resume::From(_) => true,
        Resume::IfThere(folder) => checkpoint::is_in(folder),
    }
}

/// Opens a checkpoint, and checks that it is complete and belongs to this run. Returns it with what the user has to
/// know about it.
fn open(
    resume: &Resume,
    config: &TrainConfig,
    layout: &Layout,
    num_samples: usize,
) -> Result<(Checkpoint, Option<String>)> {
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let opened = match resume {
        Resume::From(folder) => Checkpoint::open(folder).map(|checkpoint| (checkpoint, None)),
        Resume::IfThere(folder) => Checkpoint::open_last_good(folder),
    };
    let (checkpoint, note) = opened.map_err(refuse)?;
    let settings = settings(config, num_samples);
    checkpoint.check(layout, &config.optimizer.config(), &settings).map_err(refuse)?;
    let Progress { position, steps, .. } = checkpoint.progress();
    // With --resume auto, one command may start a run again and again, so it is not an error if the run
    // is complete.
    let must_go_on = matches!(resume, Resume::From(_));
    if must_go_on && steps >= config.total_steps() {
        return Err(refuse(match config.steps {
            Some(total) => format!(
                "it has {steps} optimizer steps already; pass a larger --steps than {total}"
            ),
            None => format!(
                "it has {} complete epochs already; pass a larger --epochs than {}",
                position.epoch, config.epochs
            ),
        }));
    }
    Ok((checkpoint, note.map(|note| format!("{}: {note}", resume.flag()))))
}

/// The settings that must be the same for a run, with `num_samples` training samples, to continue as if
/// it had never stopped.
fn settings(config: &TrainConfig, num_samples: usize) -> Vec<Setting> {
    let order = "the samples would come in another order";
    let course = "the learning rate would take another course";
    let sync = "the gradients would be other ones";
    let TrainConfig { model, data, strategy, schedule, .. } = config;
    let data = identity_of_data(data, config.seed).into_iter();
    let mut settings: Vec<Setting> =
        data.map(|(flag, value)| Setting::of_flag(&flag, value, order)).collect();
    // Most of them show in the shapes of parameters, which are compared first. Those of a program's own model may not.
    let of_model = model.flags().into_iter();
    settings.extend(
        of_model.map(|(flag, value)| Setting::of_flag(&flag, value, "it would be another model")),
    );
    let shards = config.rank_samples.as_ref().map_or("none".into(), |samples| {
        samples.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
    });
    let clipped = config.clip_grad_norm.map_or("none".into(), |norm| norm.to_string());
    // A constant rate does not depend on the length of the run.
    let decays = schedule.name != Course::Constant;
    let lr_steps = if decays { config.lr_steps().to_string() } else { "any".into() };
    let accumulation = match strategy.options.accumulation {
        AccumulationOrder::Sequential => strategy.accumulate.to_string(),
        AccumulationOrder::Tree => format!("{} --accumulation-order tree", strategy.accumulate),
    };
    settings.extend([
        Setting::of_flag("--global-batch-size", config.global_batch_size, order),
        Setting::of_flag("--steps-per-epoch", config.steps_per_epoch, order),
        Setting::of_flag("--rank-samples", shards, order),
        Setting {
            // Files in a folder may change between two runs.
            key: "training-samples".into(),
            name: String::new(),
            value: format!("{num_samples} training samples"),
            otherwise: order,
            fix: "pass a --data-dir with the same files".into(),
        },
        Setting::of_flag("--accumulate", accumulation, sync),
        Setting::of_flag("--strategy", strategy.kind(), sync),
        Setting::of_flag("--sync-batch-norm", strategy.options.sync_batch_norm, sync),
        Setting::of_flag("--lr-schedule", schedule.name.name(), course),
        Setting::of_flag("--lr-warmup-steps", schedule.warmup_steps, course),
        Setting::of_flag("--min-lr", schedule.min_lr, course),
        Setting::of_flag("--lr-steps", lr_steps, course),
        Setting::of_flag("--clip-grad-norm", clipped, "the steps would be of another size"),
    ]);
    settings
}

/// Writes the checkpoint of a run that stands at `progress`, with so many training samples.
pub fn save(
    folder: &Folder,
    config: &TrainConfig,
    num_samples: usize,
    storage: &Storage,
    optimizer: &Optimizer,
    progress: &Progress,
) -> Result<()> {
    folder.save(&settings(config, num_samples), storage, optimizer, progress)
}
