//! `paceline train --ddp-choice all` and `--shard-choice all`: run one strategy after the other with the same seed and data,
//! and compare all in one table. `published` in place of `all` runs the strategies of a published comparison, with its accumulation.

use std::path::PathBuf;
use std::time::Duration;

use paceline_choices::registry::read;
use paceline_choices::strategies::Synchronizes;
use paceline_failure::outputs::{check_file, write_stated_json};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, say, warn};
use paceline_launch::environment::Placement;
use paceline_run::folder;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{BASELINE, Comparison, RunFlags, Several};
use paceline_settings::spec::RunSpec;

use crate::answer::STRATEGIES;
use crate::ledger::Ledger;
use crate::outcome::Outcome;
use crate::report::{Found, Report, SAME_BITS, tabled};
use crate::scene::{self, Scene};
use crate::study::Setting;
use crate::{cases, execute, refuse_ranks, spec, usage};

/// The strategy whose bits the others are compared with.
const REFERENCE: &str = "simple_ddp";
/// Figures of both comparisons, which stand before the others.
const FIRST: [&str; 8] = [
    "accumulate",
    "step_ms_median",
    "comm_exposed_ms",
    "peak_mb",
    "eval_loss",
    "eval_accuracy_pct",
    SAME_BITS,
    "cost",
];
/// Figures of the comparison of strategies that keep replicas.
const SPEED: [&str; 8] = [
    "train_loss",
    "comm_hidden_ms",
    "overlap_pct",
    "comm_wait_ms",
    "comm_ops_per_step",
    "comm_mb_per_step",
    "compute_ms",
    "step_ms",
];
/// Figures of the comparison of strategies that shard.
const MEMORY: [&str; 7] = [
    "parameters_mb",
    "gradients_mb",
    "optimizer_mb",
    "unsharded_mb",
    "comm_mb_per_step",
    "comm_hidden_ms",
    "overlap_pct",
];

/// The strategies of two published comparisons by their names there, and the batches that each accumulated for a step.
const PUBLISHED: [(&str, usize); 13] = [
    ("simple_ddp", 1),
    ("simple_ddp_ga", 4),
    ("simple_ddp_hook", 4),
    ("simple_ddp_async", 4),
    ("bucket_ddp_async", 4),
    ("ddp", 1),
    (BASELINE, 1),
    ("zero1", 4),
    ("zero2", 4),
    ("zero3", 4),
    ("sharded1", 4),
    ("sharded2", 4),
    ("sharded3", 4),
];

/// The strategies to run.
struct Planned {
    scene: Scene,
    /// The warnings of each.
    warnings: Vec<Vec<String>>,
    /// Strategies that these flags do not fit, and why.
    left_out: Vec<(String, String)>,
}

impl Planned {
    /// The strategies of a comparison that these flags fit.
    fn of(
        flags: &RunSpec,
        (comparison, several): (Comparison, Several),
        world_size: usize,
    ) -> Result<Self> {
        let asked = flags.number("accumulate");
        let mut planned =
            Self { scene: Scene::new(""), warnings: Vec::new(), left_out: Vec::new() };
        for (choice, strategy) in comparison.strategies() {
            let published = PUBLISHED.iter().find(|(name, _)| *name == choice);
            let accumulate = match (several, published) {
                (Several::All, _) => asked.unwrap_or(1),
                (Several::Published, Some((_, 1))) => 1,
                (Several::Published, Some((_, batches))) => asked.unwrap_or(*batches),
                (Several::Published, None) => continue,
            };
            if strategy.of.synchronizes == Synchronizes::Alone && world_size > 1 {
                continue;
            }
            let flags = flags.with("strategy", strategy.name);
            // Micro-batches follow from the ranks.
            let accumulate = Some(accumulate).filter(|_| !flags.has("micro-batch-size"));
            let flags = accumulate.iter().fold(flags, |of, n| of.with("accumulate", n));
            match spec::resolve(&flags) {
                Ok(config) => {
                    planned.scene = planned.scene.with(choice, flags);
                    planned.warnings.push(config.warnings);
                }
                // The flags were found to be valid before; they only do not fit this strategy.
                Err(Failure::Usage(reason)) => planned.left_out.push((choice.to_owned(), reason)),
                Err(other) => return Err(other),
            }
        }
        Ok(planned)
    }

    /// Prints the warnings about all strategies. Those about some of them are in their run folders.
    fn warn(&self) {
        let everywhere =
            |warning: &&String| self.warnings.iter().all(|others| others.contains(warning));
        self.warnings.iter().take(1).flatten().filter(everywhere).for_each(|text| warn(text));
    }

    fn found(&self) -> Found {
        let heads = [("strategy", "strategy", ("", 0)), ("reason", "reason", ("", 0))];
        let row = |(name, reason): &(String, String)| [name.clone().into(), reason.clone().into()];
        let table = tabled(heads, self.left_out.iter().map(row));
        Found::new("left_out", "Left out", "Strategies that these flags do not fit.", table)
    }
}

/// Makes all runs, prints the table, and writes the report.
pub fn compare(
    given: &RunSpec,
    comparison: Comparison,
    several: Several,
    placement: Option<Placement>,
) -> Result<u8> {
    let flag = format!("--{} {}", comparison.key(), several.word());
    refuse_ranks(&flag, placement)?;
    if several == Several::Published && !given.has("nproc") {
        return usage(format!(
            "{flag} needs the number of ranks: pass --nproc 2, as in the published runs"
        ));
    }
    let args: RunFlags = read(&given.parse()?)?;
    check(given, &args, &flag)?;
    let own = [
        comparison.key(),
        "price-per-hour",
        "json",
        "quiet",
        // The folder with the folders of all runs.
        "name",
        "run-dir",
    ];
    let config = spec::resolve(&given.without(&own[..own.len() - 2]))?;
    let silent: &[&str] = if args.output.quiet { &["log-every"] } else { &[] };
    let flags = given.without(&own).without(silent);
    let planned = Planned::of(&flags, (comparison, several), config.world_size)?;
    if planned.scene.variants.is_empty() {
        let reason = planned.left_out.first().map_or("", |(_, reason)| reason);
        return usage(format!("{flag}: no strategy fits these flags: {reason}"));
    }
    folder::check_runs(config.output.run_dir.as_deref())?;
    args.output.json.as_deref().map_or(Ok(()), |file| check_file("--json", file))?;
    planned.warn();
    let (folder, outcome) = run(&planned.scene, &config, several, args.compare.price_per_hour)?;
    let figures = if comparison == Comparison::Sharding { &MEMORY[..] } else { &SPEED };
    let setting = Setting::new(&config, outcome.runs[0][0].count("params"));
    let mut report = Report {
        title: format!("{flag}, {} ranks: {}", config.world_size, setting.words(&outcome.origin)),
        notes: vec![format!("same bits: the weights of {REFERENCE}, which the best has too")],
        question: "What does each strategy cost and bring?".to_owned(),
        columns: [&FIRST, figures].concat(),
        has_all: args.output.verbose,
        setting: Some(setting),
        found: vec![planned.found()],
        outcome,
        ..Report::default()
    };
    report.write(&folder, "comparison", "comparison.json")?;
    if let Some(file) = &args.output.json {
        write_stated_json(&Disk::default(), file, &report.json())?;
    }
    if !args.output.quiet {
        let (text, folder) = (report.text(line_width()), folder.printable());
        say(&format!("{text}\nAll figures: {folder}/comparison.html\nRun folders: {folder}/"));
    }
    Ok(0)
}

/// Refuses flags that a comparison does not have.
fn check(given: &RunSpec, args: &RunFlags, flag: &str) -> Result<()> {
    if given.has("strategy") {
        return usage(format!("{flag} runs several strategies; leave --strategy out"));
    }
    if args.checkpoints.save.is_some() {
        return usage(format!(
            "--save: with {flag}, every run would write the same checkpoint; leave it out"
        ));
    }
    Ok(())
}

/// Runs each strategy once, with its run folder in the folder that is returned.
fn run(
    scene: &Scene,
    config: &TrainConfig,
    several: Several,
    price_per_hour: Option<f64>,
) -> Result<(PathBuf, Outcome)> {
    let runs = folder::runs(config.output.run_dir.as_deref());
    let name = folder::name_of(config, several.word());
    let folder = folder::create_named(&Disk::default(), &runs, &name)?;
    let absolute = std::path::absolute(&folder)
        .map_err(|e| Failure::io("the run folder has no absolute path", e))?;
    let scenes = [scene.clone()];
    let (cases, of_variants) = scene::cases(&scenes)?;
    let mut ledger = Ledger::default();
    execute::make(
        &cases,
        cases::order(cases.len(), 1),
        Duration::MAX,
        Some(&absolute),
        &mut ledger,
    )?;
    let mut outcome = Outcome::new(STRATEGIES, &scenes, &of_variants, 1, &ledger);
    let reference = outcome.runs.iter().position(|runs| runs[0].text("strategy") == REFERENCE);
    let reference = reference.map(|at| outcome.rows[at].weights.clone());
    for row in &mut outcome.rows {
        row.has_bits_of_base = Some(&row.weights) == reference.as_ref();
        let cost = price_per_hour.zip(row.median("seconds"));
        cost.into_iter().for_each(|(price, seconds)| row.add("cost", price * seconds / 3600.0));
    }
    Ok((folder, outcome))
}
