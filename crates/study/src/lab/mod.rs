//! `paceline lab`: experiments that change one option of training at a time.
//!
//! | file | purpose |
//! |---|---|
//! | [`args`] | the flags |
//! | [`measure`] | makes the runs in rounds, until the effects are known |
//! | [`collected`] | all experiments of a folder on one page |
//!
//! The other files are the experiments, one each, with a line in [`EXPERIMENTS`] and a page in docs/lab/.

pub mod args;
pub mod collected;
pub mod measure;

pub mod async_copy;
pub mod buckets;
pub mod grad_accum;
pub mod memory_layout;
pub mod parallelism;
pub mod precision_fusion;
pub mod profiling;

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::check_folder;
use paceline_files::Printable;
use paceline_host::text::{line_width, plural, say};
use paceline_launch::environment::Placement;

use self::args::LabArgs;
use crate::ledger::{self, Ledger};
use crate::outcome::{Outcome, Row};
use crate::report::{Found, Report, SAME_BITS};
use crate::scene::{self, Scene};
use crate::spec::Spec;
use crate::{refuse_ranks, usage};

/// An experiment about one option.
pub struct Experiment {
    /// Its name: the word after `paceline lab`.
    pub name: &'static str,
    /// A line about the setting that it changes.
    pub about: &'static str,
    /// The question that its page answers.
    pub question: &'static str,
    /// The flags that it sets itself, each with advice.
    set_here: &'static [(&'static str, &'static str)],
    /// Figures that it shows beside those of all experiments, by name.
    figures: &'static [&'static str],
    /// The scenes that it runs.
    scenes: fn(&LabArgs, &Path) -> Result<Vec<Scene>>,
    /// Measurements in addition to the runs.
    found: fn(&Made) -> Result<Vec<Found>>,
}

/// A finished experiment.
pub struct Made<'a> {
    /// The flags.
    pub args: &'a LabArgs,
    /// The scenes that were run.
    pub scenes: &'a [Scene],
    /// The rows.
    pub outcome: &'a Outcome,
    /// The folder of the experiment.
    pub folder: &'a Path,
}

impl<'a> Made<'a> {
    /// Each scene with its rows, and the place of the first.
    fn with_rows(&self) -> impl Iterator<Item = ((&'a Scene, &'a [Row]), usize)> {
        let sizes = self.scenes.iter().scan(0, |next, scene| {
            let first = *next;
            *next += scene.variants.len();
            Some(first)
        });
        self.scenes.iter().zip(self.outcome.scenes()).zip(sizes)
    }
}

/// The experiments, in the order of the list.
pub const EXPERIMENTS: &[Experiment] = &[
    async_copy::EXPERIMENT,
    memory_layout::EXPERIMENT,
    precision_fusion::EXPERIMENT,
    parallelism::EXPERIMENT,
    grad_accum::EXPERIMENT,
    profiling::EXPERIMENT,
    buckets::EXPERIMENT,
];

/// The folder in which experiments are made by default.
const FOLDER: &str = "lab";

/// Runs `paceline lab`. Returns the exit code.
pub fn lab(args: &LabArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("the lab", placement)?;
    args.check()?;
    if let Some(folder) = &args.report {
        return collected::page(folder);
    }
    let of_name = |name: &String| EXPERIMENTS.iter().find(|of| of.name == name);
    let Some(experiment) = args.experiment.as_ref().and_then(of_name) else {
        if !args.train.0.words().is_empty() || args.output.is_some() {
            return usage(format!("paceline lab: say which experiment: {}", names().join(", ")));
        }
        list();
        return Ok(0);
    };
    crate::study::refuse_flags(&args.train.0, experiment.set_here)?;
    let folder = args.output.clone().unwrap_or_else(|| {
        let time = paceline_host::text::now("%Y%m%d-%H%M%S");
        PathBuf::from(FOLDER).join(format!("{time}-{}", experiment.name))
    });
    check_folder("--output", &folder, "pass a folder that you can write to")?;
    let scenes = (experiment.scenes)(args, &folder)?;
    let (cases, of_variants) = scene::cases(&scenes)?;
    crate::study::warn_of(&cases);
    let named = [("experiment".to_owned(), experiment.name.to_owned())];
    let settings = ledger::settings_of(&cases).chain(named);
    let limits = (args.rounds, args.run_limit);
    let mut ledger = Ledger::of_runs(&folder, &cases, limits, settings)?;
    let outcome =
        measure::measure(args, experiment.name, &scenes, (&cases, &of_variants), &mut ledger)?;
    let found =
        (experiment.found)(&Made { args, scenes: &scenes, outcome: &outcome, folder: &folder })?;
    let chart = outcome.picture(format!("{}: {}", experiment.name, experiment.about));
    let has_failures = outcome.has_failures();
    let mut report = Report {
        title: format!("Lab: {}: {}", experiment.name, experiment.about),
        question: experiment.question.to_owned(),
        notes: vec![format!("{}, {}", outcome.origin.machine, rounds(&outcome))],
        columns: [&SHOWN, experiment.figures, &[SAME_BITS]].concat(),
        charts: chart.map(|chart| (experiment.name.to_owned(), chart)).into_iter().collect(),
        found,
        outcome,
        ..Report::default()
    };
    let text = report.text(line_width());
    let charts = report.write(&folder, REPORT, FILE_NAME)?;
    say(&text);
    say(&format!(
        "\nFiles in {}: {REPORT}.html, .csv, .json, .md; {FILE_NAME}; {charts}; docs/lab/{}.md says what to expect",
        folder.printable(),
        experiment.name
    ));
    Ok(u8::from(has_failures))
}

/// How many rounds were made.
fn rounds(of: &Outcome) -> String {
    let most = of.origin.rounds;
    match of.rows.iter().filter_map(|row| Some(row.effect?.rounds)).min() {
        Some(fewest) if fewest < most => {
            format!("{fewest} to {most} rounds, the most for unclear effects; more with --seconds")
        }
        _ => plural(most, "round"),
    }
}

/// The figures that all experiments show.
const SHOWN: [&str; 4] = ["step_ms_median", "step_ms_p99", "busy_pct", "peak_mb"];
/// The name of the page, without its ending.
const REPORT: &str = "report";
/// The name of the file with the rows.
const FILE_NAME: &str = "lab.json";

/// Prints the experiments.
fn list() {
    let widest = EXPERIMENTS.iter().map(|of| of.name.len()).max().unwrap_or(0);
    for Experiment { name, about, .. } in EXPERIMENTS {
        say(&format!("{name:widest$}  {about}"));
    }
    say("\npaceline lab NAME makes one, in about two minutes; docs/lab/ says what to expect.");
}

fn names() -> Vec<&'static str> {
    EXPERIMENTS.iter().map(|of| of.name).collect()
}

/// The specification of all runs: the user's flags over these defaults.
fn runs(args: &LabArgs, defaults: Flags) -> Spec {
    over(&args.train.0, defaults)
}

/// Flags, and their values with spaces in between.
type Flags<'a> = &'a [(&'a str, &'a str)];

/// The stated settings over these defaults.
fn over(stated: &Spec, defaults: Flags) -> Spec {
    defaults.iter().fold(stated.clone(), |spec, (key, value)| {
        if spec.has(key) { spec } else { spec.with_values(key, value.split_whitespace()) }
    })
}

/// The models of an experiment by their names, or the user's own without a name.
fn models(common: &Spec, has_own: bool, named: &[(&str, Flags)]) -> Vec<(String, Spec)> {
    if has_own {
        return vec![(String::new(), common.clone())];
    }
    named.iter().map(|(name, flags)| ((*name).to_owned(), over(common, flags))).collect()
}
