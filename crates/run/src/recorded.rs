//! The flags that a checkpoint records, so that they need not be stated to go on from it or evaluate it.
//!
//! These are the settings that decide the weights and the samples. How a run is carried out (ranks, threads, transport), and
//! its outputs, are stated each time. [`crate::resume`] knows which recorded settings a continuation may change.

use std::path::Path;

use paceline_checkpoint::{self as checkpoint, Checkpoint, Setting};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::Registry;
use paceline_choices::strategies::{ALONE, STRATEGIES};
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_host::text::plural;
use paceline_launch::environment::Placement;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{RANKS_PER_CORE, Scope};
use paceline_settings::origin::Resume;
use paceline_settings::spec::RunSpec;
use paceline_settings::spec_file::SpecFile;
use serde_json::Value;

/// The key of the flags in the index of a checkpoint.
pub const KEY: &str = "flags";

/// The reason why a checkpoint of another model is refused.
pub const ANOTHER_MODEL: &str = "it would be another model";
/// The reason why a checkpoint of another optimizer is refused.
pub const NO_STATE: &str = "its state would be of no use";

fn is_recorded(key: &str) -> bool {
    Scope::of_key(key).is_some_and(Scope::is_recorded)
}

/// The flags of a run, as JSON. The batch size is that of all ranks together, so that another number of ranks goes on with
/// the same batches.
pub fn of_run(config: &TrainConfig) -> String {
    let left_out: Vec<&str> = config.spec.keys().filter(|key| !is_recorded(key)).collect();
    let spec = config.spec.without(&left_out).without(&["batch-size", "global-batch-size"]);
    let spec = match &config.rank_samples {
        // Each rank has batches of its own.
        Some(_) => spec.with("batch-size", config.batch_size),
        None => spec.with("global-batch-size", config.global_batch_size),
    };
    Value::Object(spec.to_json()).to_string()
}

fn of_checkpoint(checkpoint: &Checkpoint, refuse: impl Fn(String) -> Failure) -> Result<SpecFile> {
    let path = checkpoint.path().join("index.json");
    let text =
        checkpoint.setting(KEY).ok_or_else(|| refuse(format!("it does not say its {KEY}")))?;
    SpecFile::parse_of_checkpoint(&path, text).map_err(|failure| refuse(failure.to_string()))
}

/// The specification of a run that goes on: the recorded flags, if any, overlaid by the stated ones. Also returns the
/// optimizer steps of the saved run's learning rate schedule.
pub fn under(
    stated: &RunSpec,
    resume: Option<&Resume>,
    placement: Option<&Placement>,
) -> Result<(RunSpec, Option<u64>)> {
    let Some(checkpoint) = resume.map(open).transpose()?.flatten() else {
        return Ok((stated.clone(), None));
    };
    let lr_steps = checkpoint.setting("--lr-steps").and_then(|steps| steps.parse().ok());
    let refuse = |reason: String| {
        Failure::Usage(format!("{}: {reason}", resume.map(Resume::flag).unwrap_or_default()))
    };
    let recorded = of_checkpoint(&checkpoint, refuse)?;
    check_name(&MODELS, stated, &checkpoint, ANOTHER_MODEL).map_err(refuse)?;
    check_name(&DATA_SETS, stated, &checkpoint, "the samples would differ").map_err(refuse)?;
    check_name(&OPTIMIZERS, stated, &checkpoint, NO_STATE).map_err(refuse)?;
    // Without a launcher, as many ranks go on.
    let world_size = checkpoint.index().world_size;
    let cores = resources::num_cores();
    let stated = match placement {
        None if !stated.has("nproc") && world_size > cores * RANKS_PER_CORE => {
            return Err(refuse(format!(
                "{world_size} ranks have written it, and this machine has {}; pass --nproc N",
                plural(cores, "core")
            )));
        }
        None => stated.with_default("nproc", world_size),
        Some(_) => stated.clone(),
    };
    let ranks = placement.map(|placement| placement.place.world_size);
    let is_same = ranks.or(stated.number("nproc")) == Some(world_size);
    let strategy_of = |spec: &RunSpec| {
        let name = spec.get(STRATEGIES.key).and_then(<[String]>::first).cloned();
        name.and_then(|name| STRATEGIES.get(&name).ok()).map(|choice| choice.name)
    };
    let recorded = recorded.with(|spec| {
        let theirs = strategy_of(spec);
        let is_other = strategy_of(&stated).is_some_and(|ours| Some(ours) != theirs);
        let differs = |key| stated.get(key).is_some_and(|ours| Some(ours) != spec.get(key));
        let unfit: &[&str] = if !is_same || is_other || differs("mesh") {
            // A mesh fits its ranks and strategy, and a pipeline fits its mesh.
            &["mesh", "schedule", "stages"]
        } else if differs("schedule") {
            // A schedule decides how many stages there are.
            &["stages"]
        } else {
            &[]
        };
        let spec = without_unfit_products(spec, &stated).without(unfit);
        // A single rank's strategy says nothing about several.
        if !is_same && theirs == Some(ALONE) { spec.without(&[STRATEGIES.key]) } else { spec }
    });
    // The comparison of settings reports differences by name.
    recorded.overlaid(&stated).map(|(spec, _)| (spec, lr_steps))
}

/// The recorded flags, without those that do not fit the stated precision or device.
fn without_unfit_products(recorded: &RunSpec, stated: &RunSpec) -> RunSpec {
    let first = |spec: &RunSpec, key| spec.get(key).and_then(<[String]>::first).cloned();
    let theirs = first(recorded, "precision").unwrap_or_else(|| "f32".into());
    let is_other = first(stated, "precision").is_some_and(|ours| ours != theirs);
    let device = first(stated, "device").unwrap_or_else(|| "cpu".into());
    let products: &[&str] = match (is_other, device.starts_with("cuda")) {
        (true, _) => &["emulate-fp16", "tf32"],
        (false, true) => &["emulate-fp16"],
        (false, false) => &["tf32"],
    };
    recorded.without(products)
}

/// Fails if another choice is stated than recorded, before their flags are compared.
fn check_name<K>(
    registry: &Registry<K>,
    stated: &RunSpec,
    checkpoint: &Checkpoint,
    otherwise: &'static str,
) -> std::result::Result<(), String> {
    let name = stated.get(registry.key).and_then(<[String]>::first);
    // Unknown names are refused elsewhere.
    let name = name.and_then(|name| registry.get(name).ok()).map(|choice| choice.name);
    match (checkpoint.setting(registry.key), name) {
        (Some(theirs), Some(ours)) if theirs != ours => {
            let flag = format!("--{}", registry.key);
            Err(Setting::of_flag(&flag, ours, otherwise).refusal(Some(theirs)))
        }
        _ => Ok(()),
    }
}

/// The specification of an evaluation, which takes flags for which `is_taken` holds, and perhaps other data.
pub fn under_evaluation(
    stated: &RunSpec,
    checkpoint: &Checkpoint,
    is_taken: impl Fn(&str) -> bool,
    refuse: impl Fn(String) -> Failure,
) -> Result<RunSpec> {
    let recorded = of_checkpoint(checkpoint, &refuse)?;
    check_name(&MODELS, stated, checkpoint, ANOTHER_MODEL).map_err(refuse)?;
    let recorded = recorded.keeping(|key| is_taken(key) && key != "mesh");
    // Each rank takes batches as large as one that trained.
    let world_size = checkpoint.index().world_size.max(1);
    let recorded = recorded.with(|spec| {
        let spec = without_unfit_products(spec, stated);
        match spec.number("global-batch-size") {
            Some(global) => {
                let batch_size = global.div_ceil(world_size);
                spec.without(&["global-batch-size"]).with("batch-size", batch_size)
            }
            None => spec,
        }
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

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Arg;
    use paceline_checkpoint::index::ShardFile;
    use paceline_checkpoint::progress::Progress;
    use paceline_settings::flags;
    use serde_json::json;

    use super::*;

    /// A checkpoint without tensors that records these flags.
    fn checkpoint(num_ranks: usize, flags: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut index = checkpoint::head(num_ranks, "exact", &[], 0, &Progress::default());
        index.run.insert(KEY.into(), flags.into());
        for rank in 0..num_ranks {
            let name = format!("rank-{rank}.shard");
            fs::write(folder.path().join(&name), b"").unwrap();
            index.files.push(ShardFile { name, ..Default::default() });
        }
        fs::write(folder.path().join("index.json"), index.to_json()).unwrap();
        folder
    }

    fn read(folder: &Path, stated: &RunSpec) -> [Result<RunSpec>; 2] {
        let resume = Resume::From(folder.to_owned());
        let opened = Checkpoint::open(folder).unwrap();
        [
            under(stated, Some(&resume), None).map(|(spec, _)| spec),
            under_evaluation(stated, &opened, |_| true, Failure::Usage),
        ]
    }

    /// The flag with a value that it takes, as a checkpoint would state it.
    fn entry(flag: &Arg) -> String {
        let name = flags::key(flag);
        let possible = flag.get_possible_values().into_iter();
        let possible = possible.map(|value| json!(value.get_name()));
        let values = possible.chain([
            json!(true),
            json!("1"),
            json!("2"),
            json!("0.5"),
            json!("cpu"),
            json!("dp=2"),
            json!([1, 1, 1]),
        ]);
        let all: Vec<String> = values.map(|value| json!({ name: value }).to_string()).collect();
        let is_taken = |text: &&String| SpecFile::parse(Path::new("a.json"), text).is_ok();
        // A flag that requires another one is taken with no value.
        all.iter().find(is_taken).unwrap_or(&all[0]).clone()
    }

    #[test]
    fn a_checkpoint_states_the_flags_that_it_records_and_no_other() {
        for flag in flags::all().iter() {
            let name = flags::key(flag);
            // Keys may have underscores, as in files of settings.
            for entry in [entry(flag), entry(flag).replace(name, &name.replace('-', "_"))] {
                let folder = checkpoint(2, &entry);
                for outcome in read(folder.path(), &RunSpec::default()) {
                    match outcome {
                        // Earlier versions recorded flags of a host, which are left out.
                        Ok(spec) if Scope::of(flag) == Scope::Host => assert!(!spec.has(name)),
                        Ok(_) => assert!(is_recorded(name), "{entry} was read"),
                        Err(failure) => {
                            assert!(matches!(failure, Failure::Usage(_)), "{entry}: {failure}");
                            let words = format!("states --{name}, which is not for a checkpoint");
                            let text = failure.to_string();
                            assert!(!is_recorded(name) && text.contains(&words), "{entry}: {text}");
                        }
                    }
                }
            }
        }
        for hidden in [r#"{"stated": {"json": "a"}}"#, r#"{"lr": 1, "stated": {"nproc": 9}}"#] {
            for outcome in read(checkpoint(1, hidden).path(), &RunSpec::default()) {
                assert!(outcome.unwrap_err().to_string().contains("not for a checkpoint"));
            }
        }
    }

    #[test]
    fn a_checkpoint_starts_as_many_ranks_as_this_machine_can_run() {
        let most = resources::num_cores() * RANKS_PER_CORE;
        let spec = |num_ranks: usize, stated: &RunSpec| {
            let [resumed, _] = read(checkpoint(num_ranks, "{}").path(), stated);
            resumed.map(|spec| spec.number("nproc"))
        };
        assert_eq!(spec(most, &RunSpec::default()).unwrap(), Some(most));
        let text = spec(most + 1, &RunSpec::default()).unwrap_err().to_string();
        assert!(text.contains(&format!("{} ranks have written it", most + 1)), "{text}");
        assert!(text.contains("pass --nproc N"), "{text}");
        assert_eq!(spec(most + 1, &RunSpec::default().with("nproc", 3)).unwrap(), Some(3));
    }

    #[test]
    fn flags_about_products_are_recorded_and_follow_precision_and_device() {
        let of = |recorded: &str, stated: &[(&str, &str)]| {
            let stated =
                stated.iter().fold(RunSpec::default(), |spec, (key, value)| spec.with(key, value));
            read(checkpoint(1, recorded).path(), &stated).map(|spec| {
                let spec = spec.unwrap();
                ["emulate-fp16", "tf32"].map(|key| spec.has(key))
            })
        };
        let fp16 = r#"{"precision": "fp16", "emulate-fp16": true}"#;
        assert_eq!(of(fp16, &[]), [[true, false]; 2]);
        assert_eq!(of(fp16, &[("precision", "bf16")]), [[false; 2]; 2]);
        assert_eq!(of(fp16, &[("device", "cuda")]), [[false; 2]; 2]);
        let tf32 = r#"{"tf32": true}"#;
        let on_card = [("device", "cuda"), ("precision", "f32")];
        assert_eq!(of(tf32, &on_card), [[false, true]; 2]);
        assert_eq!(of(tf32, &[]), [[false; 2]; 2]);
    }
}
