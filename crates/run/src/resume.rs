//! Determines where a run begins: at the start, or at a checkpoint, the same one on all ranks.

use std::path::PathBuf;

use paceline_checkpoint::hugging_face::CLASS_NAMES;
use paceline_checkpoint::pieces::Ranges;
use paceline_checkpoint::progress::Progress;
use paceline_checkpoint::{
    self as checkpoint, Checkpoint, Folder, Previous, RankOfRun, Restart, SAVE_LIMIT, Setting,
};
use paceline_choices::data::DataConfig;
use paceline_choices::registry::spaced;
use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::streams;
use paceline_model::pretrained::CONFIG_FILE;
use paceline_model::{Layout, Model, Optimizer};
use paceline_settings::config::TrainConfig;
use paceline_settings::named::Course;
use paceline_settings::origin::Resume;
use paceline_strategies::{AccumulationOrder, Replica, Strategy};
use serde::{Deserialize, Serialize};

use crate::saving::BEST;
use crate::together::together;
use crate::{precision, recorded};

/// The most samples and steps of an optimizer with which a run goes on, so that no sum overflows. No run has as many.
const MOST_COUNTED: u64 = 1 << 62;

/// Checks, before ranks start, that a run can begin where the flags say. Returns notes for the user, for example that the last
/// checkpoint is broken.
pub fn check(config: &TrainConfig, model: &Model, num_samples: usize) -> Result<Vec<String>> {
    let Some(resume) = &config.resume else { return Ok(Vec::new()) };
    if !is_given(resume) {
        // A run may have failed too often before its first checkpoint.
        let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
        checkpoint::restart(resume.folder(), Vec::new()).map_err(refuse)?;
        return Ok(Vec::new());
    }
    let Restart { found, note } = find(resume)?;
    let Opened { checkpoint, mut notes, .. } =
        open(resume, &found, config, &model.layout, num_samples)?;
    notes.extend(note);
    notes.extend(checkpoint.dropped(config.world_size, config.strategy.kind()));
    Ok(notes.iter().map(|note| format!("{}: {note}", resume.flag())).collect())
}

/// Fails if the run would replace files of another run. They are its own if it begins at a checkpoint in the folder of
/// `--save`.
pub fn check_save(config: &TrainConfig) -> Result<()> {
    let Some(save) = &config.checkpoints.save else { return Ok(()) };
    let (goes_on, steps) = match &config.resume {
        None => (false, 0),
        Some(resume) if !is_given(resume) => (true, 0),
        Some(resume) => {
            let (_, checkpoint, _) = first(resume, &find(resume)?.found)?;
            (checkpoint.as_previous(save).is_some(), checkpoint.progress().steps)
        }
    };
    let best = config.checkpoints.save_best.then(|| save.join(BEST));
    for folder in std::iter::once(save).chain(&best) {
        let refuse =
            |reason: String| Err(Failure::Usage(format!("--save {}: {reason}", save.printable())));
        if checkpoint::is_in(folder) && !goes_on {
            return refuse(format!(
                "{} holds a checkpoint already, which this run would replace by its own: pass --resume auto to go on from \
                 there, or another folder",
                folder.printable()
            ));
        }
        if let Some(other) = checkpoint::in_the_way(folder, steps) {
            return refuse(format!(
                "{} lies where this run would write or replace a checkpoint, and no run has written it: move it away, or \
                 pass another folder",
                other.printable()
            ));
        }
    }
    Ok(())
}

/// Gives the folder of `--save` to a run that goes back there before it is launched, so that a restart does so too, even if
/// the first attempt ends before its ranks have met.
pub fn go_back(config: &TrainConfig) -> Result<()> {
    let (Some(resume @ Resume::From(_)), Some(save)) = (&config.resume, &config.checkpoints.save)
    else {
        return Ok(());
    };
    let (_, checkpoint, _) = first(resume, &[])?;
    let Some(previous) = checkpoint.as_previous(save) else { return Ok(()) };
    Folder::take(save, Disk::default(), "another run")?.go_back(previous.steps)
}

/// Where a run begins.
#[derive(Debug, Default)]
pub struct Begin {
    /// The progress at that point.
    pub progress: Progress,
    /// The checkpoint, if it lies in the folder of `--save`.
    pub previous: Option<Previous>,
}

/// Restores this rank's parameters and optimizer, and returns where the run begins. Collective.
///
/// Ranks may look at different moments, or see a shared folder differently, so rank 0 looks for a checkpoint and sends its
/// name and digest to the others. A rank that finds another one fails. If any rank's part is damaged, all learn of it, and
/// with `--resume auto` they go on from an earlier checkpoint.
pub fn begin(
    config: &TrainConfig,
    replica: &Replica,
    strategy: &dyn Strategy,
    optimizer: &mut Optimizer,
    num_samples: usize,
) -> Result<Begin> {
    let Some(resume) = &config.resume else { return Ok(Begin::default()) };
    let Replica { world, .. } = replica;
    let is_first = world.rank() == 0;
    let mut left = if is_first && is_given(resume) { find(resume)?.found } else { Vec::new() };
    loop {
        let first = if left.is_empty() {
            None
        } else {
            Some(open(resume, &left, config, &replica.whole_layout(), num_samples)?)
        };
        let found = first.as_ref().map(|first| {
            let is_whole_folder = first.checkpoint.path() == resume.folder();
            let name = (!is_whole_folder).then(|| first.checkpoint.name());
            (name, first.checkpoint.digest())
        });
        let Some((name, digest)) = world.broadcast_object(Some(&found), 0)? else {
            return Ok(Begin::default());
        };
        let place = first.as_ref().map_or(0, |first| first.place);
        let opened = match first {
            Some(first) => Ok(first.checkpoint),
            None => open_same(world, resume, name.as_deref(), &digest),
        };
        // Ranks whose disk is slower take longer. They exchange the outcomes below.
        let restored = together(world, "read the checkpoint", SAVE_LIMIT, || {
            Ok(opened.map(|checkpoint| {
                (restore(config, replica, strategy, optimizer, &checkpoint), checkpoint)
            }))
        })?;
        let outcome = match &restored {
            Ok((Ok(()), _)) => Outcome::Good,
            Ok((Err(failure), _)) => Outcome::Damaged(failure.to_string()),
            Err(_) => Outcome::Failed,
        };
        let outcomes = world.all_gather_object(&outcome)?;
        let (_, checkpoint) = restored?;
        let Some((rank, problem)) = first_problem(&outcomes) else {
            let previous =
                config.checkpoints.save.as_ref().and_then(|save| checkpoint.as_previous(save));
            return Ok(Begin { progress: checkpoint.progress(), previous });
        };
        let Some(problem) = problem else {
            return Err(Failure::Consequence(format!(
                "rank {rank} cannot go on from the checkpoint"
            )));
        };
        left.drain(..(place + 1).min(left.len()));
        let before: Option<String> = world.broadcast_object(
            Some(
                &Checkpoint::open_last_good(&left)
                    .ok()
                    .map(|(_, before, _)| before.instead_of(problem)),
            ),
            0,
        )?;
        let is_auto = matches!(resume, Resume::IfThere(_));
        match (before, is_first) {
            (Some(note), true) if is_auto => {
                streams::stderr().line(&format!("warning: {}: {note}", resume.flag()));
            }
            (Some(_), false) if is_auto => {}
            (_, true) => return Err(Failure::Run(format!("{}: {problem}", resume.flag()))),
            (_, false) => {
                let problem = format!("rank {rank} cannot read its part of the checkpoint");
                return Err(Failure::Consequence(problem));
            }
        }
    }
}

/// How a rank has restored its part of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Good,
    /// The rank's part is damaged, or cannot be read.
    Damaged(String),
    /// The rank fails for another reason, which it reports itself.
    Failed,
}

/// The first rank that could not restore its part, and why if it is damaged. A rank that fails anyway comes first.
fn first_problem(outcomes: &[Outcome]) -> Option<(usize, Option<&str>)> {
    let failed = outcomes.iter().position(|outcome| matches!(outcome, Outcome::Failed));
    let damaged = outcomes.iter().enumerate().find_map(|(rank, outcome)| match outcome {
        Outcome::Damaged(problem) => Some((rank, Some(&problem[..]))),
        _ => None,
    });
    failed.map(|rank| (rank, None)).or(damaged)
}

fn restore(
    config: &TrainConfig,
    replica: &Replica,
    strategy: &dyn Strategy,
    optimizer: &mut Optimizer,
    checkpoint: &Checkpoint,
) -> Result<()> {
    let Replica { world, storage, .. } = replica;
    let (rank, world_size) = (world.rank(), world.world_size());
    let place = RankOfRun { rank, world_size, strategy: config.strategy.kind() };
    // A rank may hold values that other ranks own.
    let values = storage.values().ranges().to_vec();
    let held = Ranges { values, ..Ranges::from(&replica.owned) };
    checkpoint.restore(place, &held, storage, optimizer, strategy.state())
}

fn open_same(
    world: &Group,
    resume: &Resume,
    name: Option<&str>,
    digest: &str,
) -> Result<Checkpoint> {
    let folder = resume.folder();
    let path = name.map_or_else(|| folder.to_owned(), |name| folder.join(name));
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let checkpoint = Checkpoint::open_at(&path).map_err(refuse)?;
    if checkpoint.digest() == digest {
        return Ok(checkpoint);
    }
    Err(another(world, &resume.flag()))
}

/// Fails unless all ranks have found the checkpoint with this digest. Collective; `flag` is for the message.
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

/// The names of the classes that a checkpoint was trained with, if it records any.
pub fn class_names(checkpoint: &Checkpoint) -> Vec<String> {
    let recorded = checkpoint.setting(CLASS_NAMES);
    recorded.and_then(|names| serde_json::from_str(names).ok()).unwrap_or_default()
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

/// The checkpoints of the flags, the one to go on from first. A folder that the user names is taken as it is; a restarted run
/// begins at the last good checkpoint.
fn find(resume: &Resume) -> Result<Restart> {
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let found = checkpoint::find(resume.folder()).map_err(refuse)?;
    match resume {
        Resume::From(_) => Ok(Restart { found, note: None }),
        Resume::IfThere(folder) => checkpoint::restart(folder, found).map_err(refuse),
    }
}

/// A checkpoint of this run.
struct Opened {
    checkpoint: Checkpoint,
    /// Its index among those found.
    place: usize,
    /// Notes for the user: why it is not the first one, and which settings differ.
    notes: Vec<String>,
}

/// Opens the first checkpoint that can be opened, or only the first one if the flags name it. Returns it with its index, and
/// why it is not the first one.
fn first(resume: &Resume, found: &[PathBuf]) -> Result<(usize, Checkpoint, Option<String>)> {
    let opened = match resume {
        Resume::From(folder) => Checkpoint::open(folder).map(|checkpoint| (0, checkpoint, None)),
        Resume::IfThere(_) => Checkpoint::open_last_good(found),
    };
    opened.map_err(|reason| Failure::Usage(format!("{}: {reason}", resume.flag())))
}

/// Opens the first checkpoint, and checks that it belongs to this run.
fn open(
    resume: &Resume,
    found: &[PathBuf],
    config: &TrainConfig,
    layout: &Layout,
    num_samples: usize,
) -> Result<Opened> {
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let (place, checkpoint, note) = first(resume, found)?;
    let settings = settings(config, num_samples);
    let differs =
        checkpoint.check(layout, &config.optimizer.config(), &settings).map_err(refuse)?;
    let Progress { position, steps, best, samples, .. } = checkpoint.progress();
    // With --resume auto, the same command restarts a run, so a complete run is no error.
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
    if let Some(patience) = config.evaluation.early_stop.filter(|_| must_go_on)
        && best.no_longer_falls(Some(patience)).is_some()
    {
        return Err(refuse(format!(
            "its evaluation loss was not lower in {} evaluations, so a run with --early-stop {patience} ends there; pass a larger \
             --early-stop",
            best.since
        )));
    }
    let is_in_data =
        position.epoch < config.epochs as u64 && position.batch < config.steps_per_epoch;
    let is_countable = samples.max(checkpoint.optimizer_steps) <= MOST_COUNTED;
    if steps < config.total_steps() && !(is_in_data && is_countable) {
        return Err(refuse(format!(
            "{} is corrupt: after {steps} optimizer steps ({} of the optimizer) it has {} complete epochs, {} batches and \
             {samples} samples; an epoch of this run has {} batches",
            checkpoint.path().printable(),
            checkpoint.optimizer_steps,
            position.epoch,
            position.batch,
            config.steps_per_epoch
        )));
    }
    let notes = note.into_iter().chain(differs).collect();
    Ok(Opened { checkpoint, place, notes })
}

/// The settings that must be the same for a run to continue as if it had never stopped.
pub fn settings(config: &TrainConfig, num_samples: usize) -> Vec<Setting> {
    let order = "the samples would come in another order";
    let course = "the learning rate would take another course";
    let sync = "the gradients would differ";
    let other = "it goes on, but ends with other weights than a run that was not interrupted";
    let TrainConfig { model, data, strategy, schedule, .. } = config;
    let data = identity_of_data(data, config.seed).into_iter();
    let mut settings: Vec<Setting> =
        data.map(|(flag, value)| Setting::of_flag(&flag, value, order)).collect();
    // Most of them show in the shapes of parameters, which are compared first. Settings of a program's own model may not.
    // Activations are the same whether they are kept or computed again.
    let of_model = model.flags().into_iter().filter(|(flag, _)| flag != "--checkpoint-activations");
    settings.extend(
        of_model.map(|(flag, value)| Setting::of_flag(&flag, value, recorded::ANOTHER_MODEL)),
    );
    // Settings that other programs need in order to load the weights.
    settings.extend(model.hugging_face_config().map(|config| Setting {
        key: CONFIG_FILE.into(),
        name: CONFIG_FILE.into(),
        value: config.to_string(),
        otherwise: recorded::ANOTHER_MODEL,
        fix: "state the same model".into(),
        may_differ: false,
    }));
    let shards = config.rank_samples.as_ref().map_or("none".into(), |samples| spaced(samples));
    let clipped = config.clip_grad_norm.map_or("none".into(), |norm| norm.to_string());
    let scale = config.loss_scale.map_or("none".into(), |scale| scale.words());
    let window = config.loss_scale.and_then(|scale| scale.window);
    let window = window.map_or("none".into(), |window| window.to_string());
    // A constant rate does not depend on the length of the run.
    let decays = schedule.course != Course::Constant;
    let lr_steps = if decays { config.lr_steps().to_string() } else { "any".into() };
    let fix_of_lr_steps = match (schedule.lr_steps, config.steps) {
        (Some(_), _) => "pass the same --lr-steps",
        (None, Some(_)) => "pass a smaller --steps, or its --lr-steps too",
        (None, None) => "pass fewer --epochs, or its --lr-steps too",
    };
    let micro_batch = config.micro_batches.as_ref().map_or("none".into(), |of| of.size.to_string());
    let parts = Some(model.divided().parts).filter(|parts| *parts > 1);
    let parts = parts.map_or("none".into(), |parts| parts.to_string());
    let accumulation = match strategy.options.accumulation {
        _ if !strategy.options.no_sync => format!("{} --no-sync=false", strategy.accumulate),
        AccumulationOrder::Sequential => strategy.accumulate.to_string(),
        AccumulationOrder::Tree => format!("{} --accumulation-order tree", strategy.accumulate),
        // It follows from the ranks.
        AccumulationOrder::OneTree => "none".to_owned(),
    };
    settings.extend([
        Setting::of_flag("--global-batch-size", config.global_batch_size, order),
        Setting::of_flag("--micro-batch-size", micro_batch, sync),
        Setting::of_flag("--steps-per-epoch", config.steps_per_epoch, order),
        Setting::of_flag("--rank-samples", shards, order),
        Setting {
            // Files in a folder may change between two runs.
            key: "training-samples".into(),
            name: String::new(),
            value: format!("{num_samples} training samples"),
            otherwise: order,
            fix: "pass a --data-dir with the same files".into(),
            may_differ: false,
        },
        Setting {
            key: "training-data".into(),
            name: String::new(),
            value: match &config.training_data {
                Some(digest) => {
                    format!("data of the digest {}", digest.get(..16).unwrap_or(digest))
                }
                None => "data without a digest".into(),
            },
            otherwise: "the samples would differ",
            fix: "pass a --data-dir with the same files, and the same --tokenizer".into(),
            may_differ: false,
        },
        Setting {
            key: CLASS_NAMES.into(),
            name: "the classes".into(),
            value: serde_json::json!(config.class_names).to_string(),
            otherwise: "the labels would mean other classes",
            fix: "pass a --data-dir with the same labels".into(),
            may_differ: false,
        },
        Setting::of_flag("--model", model.name(), recorded::ANOTHER_MODEL),
        Setting::of_flag("--optimizer", config.optimizer.name(), recorded::NO_STATE),
        Setting::of_flag("--lr", config.optimizer.lr(), other).that_may_differ(),
        Setting::of_flag("--accumulate", accumulation, sync),
        Setting::of_flag("--tp-parts", parts, other).that_may_differ(),
        Setting::of_flag("--strategy", strategy.kind(), other).that_may_differ(),
        // Weights and optimizer state are f32 in any case, so either can go on from the other.
        Setting::of_flag(precision::FLAG, config.precision.name(), other).that_may_differ(),
        Setting::of_flag("--loss-scale", scale, other).that_may_differ(),
        Setting::of_flag("--loss-scale-window", window, other).that_may_differ(),
        Setting::of_flag("--sync-batch-norm", strategy.options.sync_batch_norm, sync),
        Setting::of_flag("--lr-schedule", schedule.course.name(), course),
        Setting::of_flag("--lr-warmup-steps", schedule.warmup, course),
        Setting::of_flag("--min-lr", schedule.min_lr.unwrap_or(0.0), course),
        Setting { fix: fix_of_lr_steps.into(), ..Setting::of_flag("--lr-steps", lr_steps, course) },
        Setting::of_flag("--clip-grad-norm", clipped, "the steps would be of another size"),
    ]);
    settings.extend(
        config
            .optimizer
            .others()
            .into_iter()
            .map(|(flag, value)| Setting::of_flag(&flag, value, other).that_may_differ()),
    );
    settings
}
