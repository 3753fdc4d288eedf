//! `paceline check --numerics A B`: two layouts of one training, compared tensor by tensor.
//!
//! Takes two configuration files. Each layout runs as a user would get it, with digests of its passes; if these differ, once more with the
//! values of the first tensor that differs. How folders are compared is in `compare/numerics`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Arg;
use paceline_failure::{Failure, Result, usage};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::{plural, warn};
use paceline_model::Model;
use paceline_observe::views::passes::read;
use paceline_run::resolve::resolve_inputs;
use paceline_run::same_bits;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{self, Scope};
use paceline_settings::spec::RunSpec;
use paceline_settings::spec_file::SpecFile;
use paceline_strategies::AccumulationOrder;
use paceline_study::execute::Runner;

use crate::commands::compare::numerics::{compare, first_place};

/// Settings that a layout may choose, although their headings are those of settings that decide the result.
const OF_LAYOUTS: [&str; 6] = [
    "batch-size",
    "global-batch-size",
    "checkpoint-activations",
    "epochs",
    "steps",
    "warmup-steps",
];

/// Compares two layouts over so many steps. Returns the exit code: 1 if they differ.
pub(super) fn check(files: [&PathBuf; 2], steps: u64) -> Result<u8> {
    let files = files.map(PathBuf::as_path);
    let [a, b] = [spec(files[0], steps)?, spec(files[1], steps)?];
    check_settings(&a, &b)?;
    let in_file = |at: usize| {
        move |failure: Failure| Failure::Usage(format!("{}: {failure}", files[at].printable()))
    };
    check_layouts(&resolved(&a).map_err(in_file(0))?, &resolved(&b).map_err(in_file(1))?)?;
    let way_on = "Stopped: nothing is left of the runs".to_owned();
    let mut runner = Runner::new(&Disk::default(), 4, way_on, None)?;
    let mut both = |round: &str, watched: &str| -> Result<[PathBuf; 2]> {
        let mut one = |name, spec: &RunSpec, file| {
            let folder = format!("{round}-{name}");
            run(&mut runner, &folder, &spec.with("watch-passes", watched), file)
        };
        Ok([one("a", &a, files[0])?, one("b", &b, files[1])?])
    };
    let mut folders = both("digests", "digests")?;
    if let Some(Some(place)) = first_place([&folders[0], &folders[1]])? {
        // A race may show elsewhere the second time, or end the run.
        match both("values", &place) {
            Ok(again) if first_place([&again[0], &again[1]])? == Some(None) => folders = again,
            Ok(_) => warn(
                "the repeated runs differ in another tensor or in none: one of them has other bits each time",
            ),
            Err(failure) => {
                warn(&printable(&format!("the repeated runs have no values: {failure}")))
            }
        }
    }
    compare([&folders[0], &folders[1]], files, false).map(u8::from)
}

/// The settings of a layout, without its output and its checkpoints.
fn spec(file: &Path, steps: u64) -> Result<RunSpec> {
    let read = SpecFile::read(file).map_err(|failure| {
        Failure::Usage(failure.to_string().replacen("--config ", "--numerics ", 1))
    })?;
    if let Some((of, several)) = read.spec.comparison() {
        let (file, key, word) = (file.printable(), of.key(), several.word());
        return usage(format!("{file}: {key} = {word} makes several runs; name one strategy"));
    }
    let is_output = |flag: &Arg| {
        let heading = flag.get_help_heading().unwrap_or_default();
        ["Output", "Observation", "Evaluation", "Comparison", "Checkpoints"].contains(&heading)
            || ["json", "run-dir", "profile-dir", "epochs"].contains(&flags::key(flag))
    };
    let all = flags::all();
    let is_dropped = |key: &str| all.iter().any(|flag| flags::key(flag) == key && is_output(flag));
    let kept = read.keeping(|key| key == "resume" || !is_dropped(key));
    let (spec, notes) = kept.overlaid(&RunSpec::default())?;
    notes.iter().for_each(|note| warn(note));
    Ok(spec.with("steps", steps).with("warmup-steps", 0))
}

/// Fails if a setting that decides the result differs.
fn check_settings(a: &RunSpec, b: &RunSpec) -> Result<()> {
    for flag in flags::all().iter() {
        let (key, heading) = (flags::key(flag), flag.get_help_heading().unwrap_or_default());
        let is_layout = ["Strategy", "Pipeline"].contains(&heading) && key != "sync-batch-norm";
        if Scope::of(flag) != Scope::Result || is_layout || OF_LAYOUTS.contains(&key) {
            continue;
        }
        let value = |spec: &RunSpec| match spec.get(key) {
            Some(values) => values.join(" "),
            None => flag
                .get_default_values()
                .first()
                .map_or(String::new(), |of| of.to_string_lossy().into_owned()),
        };
        let [a, b] = [value(a), value(b)];
        if a != b && a.parse::<f64>().ok().is_none_or(|a| Ok(a) != b.parse()) {
            let [a, b] = [a, b].map(|of| if of.is_empty() { "not set".to_owned() } else { of });
            return usage(printable(&format!(
                "--numerics: {key} is {a} in A and {b} in B, so they are not layouts of one training; set the same in both files"
            )));
        }
    }
    Ok(())
}

/// A resolved layout, its model, and the number of its training samples.
type Layout = (TrainConfig, Model, usize);

fn resolved(spec: &RunSpec) -> Result<Layout> {
    let (config, data) = resolve_inputs(spec, None)?;
    let model = config.model.build(data.train.as_ref(), config.world_size);
    Ok((config, model.map_err(|error| Failure::Usage(error.to_string()))?, data.train.len()))
}

fn refused(words: String) -> Result<()> {
    usage(format!("--numerics: {words}"))
}

/// Fails if the layouts have other data, or layers in other parts.
fn check_models((own, _, len): &Layout, (other, _, other_len): &Layout) -> Result<()> {
    // New samples come in the order of their numbers, so the number of all matters at the end of an epoch.
    let is_in_first_epoch = |of: &TrainConfig| {
        of.data.is_new_each_epoch()
            && of.total_steps() <= (of.steps_per_epoch / of.strategy.accumulate) as u64
    };
    let is_as_long = len == other_len || is_in_first_epoch(own) && is_in_first_epoch(other);
    if !is_as_long || own.training_data != other.training_data {
        return refused(format!(
            "A has {len} training samples and B has {other_len}, or other ones; pass the same data"
        ));
    }
    let [parts, other_parts] = [own, other].map(|of| of.model.divided().parts);
    if parts == other_parts {
        return Ok(());
    }
    refused(format!(
        "layers have {} in A and {} in B, so they end with other bits; set the same tp-parts in both files",
        plural(parts, "part"),
        plural(other_parts, "part")
    ))
}

/// Fails if the layouts have other samples in their micro-batches, or add these up in another order.
fn check_layouts(a: &Layout, b: &Layout) -> Result<()> {
    let [(own, model, _), (other, other_model, _)] = [a, b];
    check_models(a, b)?;
    let shares = |of: &TrainConfig| of.world_size / of.mesh.num_parts();
    let cut = |of: &TrainConfig| match &of.micro_batches {
        Some(cut) => (true, cut.count(), cut.size),
        None => (false, of.micro_batches_per_step() * shares(of), of.batch_size),
    };
    let [(is_cut, count, size), (is_other_cut, other_count, other_size)] = [cut(own), cut(other)];
    if (is_cut, count, size) != (is_other_cut, other_count, other_size) {
        return refused(format!(
            "a step has {count} micro-batches of {size} samples in A, and {other_count} of {other_size} in B; set the same \
             global-batch-size and micro-batch-size in both files"
        ));
    }
    if is_cut {
        return Ok(());
    }
    let fix = "set global-batch-size and micro-batch-size in both files, instead of batch-size and accumulate";
    let order = |of: &TrainConfig| {
        (of.micro_batches_per_step() > 1).then_some(of.strategy.options.accumulation)
    };
    if (shares(own), order(own)) != (shares(other), order(other)) {
        let obstacle = same_bits::obstacle(own, model);
        if let Some((setting, reason)) =
            obstacle.or_else(|| same_bits::obstacle(other, other_model))
        {
            return refused(format!(
                "{setting} {reason}, so other layouts end with other bits; {fix}"
            ));
        }
        let is_tree = |of| order(of).is_none_or(|order| order == AccumulationOrder::Tree);
        let are_powers = [count, shares(own), shares(other)].iter().all(|of| of.is_power_of_two());
        if !(is_tree(own) && is_tree(other) && are_powers) {
            return refused(format!("A and B add up micro-batches in another order; {fix}"));
        }
    }
    let reduces_each = |(config, model, _): &Layout| {
        same_bits::obstacle(config, model)
            .is_some_and(|(_, reason)| reason == same_bits::RANKS_FIRST)
    };
    if own.strategy.kind() != other.strategy.kind() && !(reduces_each(a) && reduces_each(b)) {
        let [a, b] = [own, other].map(|of| of.strategy.words());
        return refused(format!(
            "{a} in A and {b} in B end with other bits; set the same strategy in both files, or exact ones"
        ));
    }
    Ok(())
}

/// Runs a layout. Returns its run folder. If it fails after some steps, they are there.
fn run(runner: &mut Runner, name: &str, spec: &RunSpec, file: &Path) -> Result<PathBuf> {
    let runs = runner.scratch.path.join(name);
    let outcome = runner.train(&file.printable(), spec, &runs, Duration::MAX)?;
    let made = std::fs::read_dir(&runs).ok().and_then(|mut all| Some(all.next()?.ok()?.path()));
    let last = made.as_deref().and_then(|folder| read(folder).ok()?.map_while(|of| of.ok()).last());
    let last = last.map(|(step, _)| step);
    let (Some(folder), Some(last)) = (made, last) else {
        let no_steps = format!("{}: there are no digests of its passes", file.printable());
        return Err(Failure::Run(outcome.err().unwrap_or(no_steps)));
    };
    match outcome {
        Err(problem) => warn(&printable(&format!("{}: {problem}", file.printable()))),
        Ok(_) if spec.number("steps") == usize::try_from(last).ok() => {}
        Ok(_) => {
            let fix = "make room where temporary files go ($TMPDIR)";
            let file = file.printable();
            return Err(Failure::Run(format!("{file}: its digests end after step {last}; {fix}")));
        }
    }
    Ok(folder)
}
