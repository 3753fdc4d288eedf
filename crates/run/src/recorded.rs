//! The flags that a checkpoint records, so that a run goes on from it, and is evaluated, without them.
//!
//! Input: the configuration of the run that saves, or a checkpoint. Output: a specification of what decides the weights and
//! the samples. How a run is carried out (ranks, threads, transport) and what it writes is stated each time. This file
//! does not know which recorded settings a continuation may change ([`crate::resume`]).

use std::path::Path;

use paceline_checkpoint::{self as checkpoint, Checkpoint, Setting};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::{Choice, Registry};
use paceline_choices::strategies::{ALONE, STRATEGIES};
use paceline_failure::{Failure, Result};
use paceline_launch::environment::Placement;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags;
use paceline_settings::origin::Resume;
use paceline_settings::spec::RunSpec;
use paceline_settings::spec_file::SpecFile;
use serde_json::Value;

/// The key of the flags in the index of a checkpoint.
pub const KEY: &str = "flags";

/// What would go wrong with another model, and with another optimizer.
pub const ANOTHER_MODEL: &str = "it would be another model";
/// Why a checkpoint of another optimizer is refused.
pub const NO_STATE: &str = "its state would be of no use";

/// The groups of flags that are recorded, by their headings in the help.
const HEADINGS: [&str; 4] = ["Model", "Strategy", "Training", "Data"];
/// Other flags that are recorded.
const ALSO: [&str; 4] = ["mesh", "schedule", "stages", "precision"];
/// Flags of these groups that are not: how files get to a host, and what is measured.
const NOT: [&str; 4] = ["download", "mirror", "token-cache", "warmup-steps"];

/// The flags of a run, as JSON. Samples of a batch are recorded for all ranks together, so that another number of ranks
/// goes on with the same batches.
pub fn of_run(config: &TrainConfig) -> String {
    let recorded: Vec<String> = flags::all()
        .iter()
        .filter(|flag| {
            let is_in = flag.get_help_heading().is_some_and(|group| HEADINGS.contains(&group));
            (is_in || ALSO.contains(&flags::key(flag))) && !NOT.contains(&flags::key(flag))
        })
        .map(|flag| flags::key(flag).to_owned())
        .collect();
    let left_out = |key: &&str| !recorded.iter().any(|known| known == key);
    let left_out: Vec<&str> = config.spec.keys().filter(left_out).collect();
    let spec = config.spec.without(&left_out).without(&["batch-size", "global-batch-size"]);
    let spec = match &config.rank_samples {
        // Each rank has batches of its own.
        Some(_) => spec.with("batch-size", config.batch_size),
        None => spec.with("global-batch-size", config.global_batch_size),
    };
    Value::Object(spec.to_json()).to_string()
}

/// The flags that a checkpoint records. `None` if an earlier version wrote it, which recorded none.
pub fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Option<SpecFile>> {
    let Some(text) = checkpoint.setting(KEY) else { return Ok(None) };
    let path = checkpoint.path().join("index.json");
    SpecFile::parse(&path, text).map(Some)
}

/// The specification of a run that goes on from a checkpoint: what the checkpoint records, and over it what is stated.
/// Returns `stated` if there is no checkpoint to go on from, or none that records flags.
pub fn under(
    stated: &RunSpec,
    resume: Option<&Resume>,
    placement: Option<&Placement>,
) -> Result<RunSpec> {
    let Some(checkpoint) = resume.map(open).transpose()?.flatten() else {
        return Ok(stated.clone());
    };
    let Some(recorded) = of_checkpoint(&checkpoint)? else { return Ok(stated.clone()) };
    let refuse = |reason: String| {
        Failure::Usage(format!("{}: {reason}", resume.map(Resume::flag).unwrap_or_default()))
    };
    check_name(&MODELS, stated, &checkpoint, ANOTHER_MODEL).map_err(refuse)?;
    check_name(&DATA_SETS, stated, &checkpoint, "the samples would differ").map_err(refuse)?;
    check_name(&OPTIMIZERS, stated, &checkpoint, NO_STATE).map_err(refuse)?;
    // Without a launcher, as many ranks go on as have saved.
    let world_size = checkpoint.index().world_size;
    let stated = match placement {
        None => stated.with_default("nproc", world_size),
        Some(_) => stated.clone(),
    };
    let ranks = placement.map(|placement| placement.place.world_size);
    let is_same = ranks.or(stated.number("nproc")) == Some(world_size);
    let strategy_of = |spec: &RunSpec| {
        let name = spec.get(STRATEGIES.key).and_then(<[String]>::first).cloned();
        name.and_then(|name| STRATEGIES.get(&name).ok()).map(|choice| choice.name())
    };
    let recorded = recorded.with(|spec| {
        let theirs = strategy_of(spec);
        let is_other = strategy_of(&stated).is_some_and(|ours| Some(ours) != theirs);
        let differs = |key| stated.get(key).is_some_and(|ours| Some(ours) != spec.get(key));
        let unfit: &[&str] = if !is_same || is_other || differs("mesh") {
            // A mesh fits the ranks and the strategy that it was stated for, and a pipeline fits its mesh.
            &["mesh", "schedule", "stages"]
        } else if differs("schedule") {
            // A schedule decides how many stages there are.
            &["stages"]
        } else {
            &[]
        };
        let spec = spec.without(unfit);
        // The strategy of one rank says nothing about several.
        if !is_same && theirs == Some(ALONE) { spec.without(&[STRATEGIES.key]) } else { spec }
    });
    // What differs is said by name when the settings are compared, whether it was typed or follows from other flags.
    recorded.overlaid(&stated).map(|(spec, _)| spec)
}

/// Fails if another choice is stated than the checkpoint was written with, before flags of either choice are compared.
fn check_name<C: Choice + ?Sized>(
    registry: &Registry<C>,
    stated: &RunSpec,
    checkpoint: &Checkpoint,
    otherwise: &'static str,
) -> std::result::Result<(), String> {
    let name = stated.get(registry.key).and_then(<[String]>::first);
    // Unknown names are refused elsewhere.
    let name = name.and_then(|name| registry.get(name).ok()).map(|choice| choice.name());
    match (checkpoint.setting(registry.key), name) {
        (Some(theirs), Some(ours)) if theirs != ours => {
            let flag = format!("--{}", registry.key);
            Err(Setting::of_flag(&flag, ours, otherwise).refusal(Some(theirs)))
        }
        _ => Ok(()),
    }
}

/// The specification of an evaluation of a checkpoint, which takes flags for which `is_taken` holds. It may have other data.
/// An error says what is wrong with the checkpoint.
pub fn under_evaluation(
    stated: &RunSpec,
    checkpoint: &Checkpoint,
    is_taken: impl Fn(&str) -> bool,
    refuse: impl Fn(String) -> Failure,
) -> Result<RunSpec> {
    let Some(recorded) = of_checkpoint(checkpoint)? else { return Ok(stated.clone()) };
    check_name(&MODELS, stated, checkpoint, ANOTHER_MODEL).map_err(refuse)?;
    let recorded = recorded.keeping(|key| is_taken(key) && key != "mesh");
    // Any number of ranks evaluates, so each takes batches as large as one that trained.
    let world_size = checkpoint.index().world_size.max(1);
    let recorded = recorded.with(|spec| match spec.number("global-batch-size") {
        Some(global) => {
            let batch_size = global.div_ceil(world_size);
            spec.without(&["global-batch-size"]).with("batch-size", batch_size)
        }
        None => spec.clone(),
    });
    recorded.overlaid(stated).map(|(spec, _)| spec)
}

/// The checkpoint from which a run goes on, as far as this process sees.
fn open(resume: &Resume) -> Result<Option<Checkpoint>> {
    let refuse = |reason: String| Failure::Usage(format!("{}: {reason}", resume.flag()));
    let folder: &Path = resume.folder();
    match resume {
        Resume::From(_) => Checkpoint::open(folder).map(Some).map_err(refuse),
        Resume::IfThere(_) if !checkpoint::is_in(folder) => Ok(None),
        Resume::IfThere(_) => {
            let found = checkpoint::find(folder).map_err(refuse)?;
            Checkpoint::open_last_good(&found).map(|(_, found, _)| Some(found)).map_err(refuse)
        }
    }
}
