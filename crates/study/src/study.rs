//! The common parts of all studies: flags, setting, runs and files.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches};
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::outputs::{
    check_file, check_folder, write_charts, write_stated_bytes, write_stated_json,
};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::text::{line_width, plural, say, warn};
use paceline_launch::environment::Placement;
use paceline_model::Layout;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_settings::config::TrainConfig;
use paceline_settings::part::add_later;
use paceline_table::chart::Picture;
use serde::Serialize;

use crate::cases::{self, Case};
use crate::ledger::{self, Ledger};
use crate::noise::Spread;
use crate::outcome::{Origin, Outcome};
use crate::report::Report;
use crate::scene::{self, Scene};
use crate::spec::{self, Spec};
use crate::{execute, refuse_ranks, usage};

/// Steps of a run by default.
const STEPS: usize = 30;

/// A study: its name, its flags, and the function that makes it.
#[derive(Clone, Copy, Debug)]
pub struct Study {
    /// Its name: the word after `paceline bench`.
    pub name: &'static str,
    /// The question that it answers, for the help.
    pub about: &'static str,
    /// Adds its flags to its command, when that is read.
    pub flags: fn(clap::Command) -> clap::Command,
    make: fn(&ArgMatches) -> Result<u8>,
}

impl Study {
    pub(crate) const fn new<A: Args>(
        name: &'static str,
        about: &'static str,
        make: fn(&ArgMatches) -> Result<u8>,
    ) -> Self {
        Self { name, about, flags: add_later::<A>, make }
    }

    /// Makes the study with the typed flags, and gives the exit code.
    ///
    /// # Errors
    ///
    /// If this process is a rank, if the flags do not fit together, and if a run or a file fails.
    pub fn make(&self, typed: &ArgMatches, placement: Option<Placement>) -> Result<u8> {
        refuse_ranks("a study", placement)?;
        (self.make)(typed)
    }
}

/// The typed flags of a study. `clap` has checked them; if it still refuses them, it ends the process, as for every other
/// command.
pub(crate) fn flags_of<A: FromArgMatches>(typed: &ArgMatches) -> A {
    A::from_arg_matches(typed).unwrap_or_else(|error| error.exit())
}

/// Flags that all studies have.
#[derive(Clone, Debug, Args)]
pub struct StudyArgs {
    /// How often each run is made. The runs alternate in rounds, and the medians over the rounds count
    #[arg(long, value_name = "R", default_value_t = 3, help_heading = "Study", value_parser = crate::rounds)]
    pub rounds: usize,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Study", value_parser = crate::seconds)]
    pub run_limit: f64,
    /// Keep a record of each run in this folder. The same command again continues a study that was interrupted
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Write everything that was measured to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Write the rows to this file, as CSV
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub csv: Option<PathBuf>,
    /// Write charts into this folder, as SVG
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub charts: Option<PathBuf>,
}

/// The workload that all runs of a study share.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Setting {
    /// Cores that the ranks share.
    pub cores: usize,
    /// The model.
    pub model: String,
    /// Number of parameters.
    pub params: u64,
    /// How ranks reached each other.
    pub transport: String,
    /// The link that was emulated.
    pub link: Option<String>,
    /// Threads per rank.
    pub threads: usize,
    /// Whether other work took cores from the ranks.
    #[serde(skip)]
    pub is_busy: bool,
}

impl Setting {
    pub(crate) fn new(config: &TrainConfig, params: u64) -> Self {
        Self {
            cores: resources::num_cores(),
            model: config.model.name().to_owned(),
            params,
            transport: config.transport.name().to_owned(),
            link: config.comm.link.map(|link| link.to_string()),
            threads: config.threads,
            is_busy: false,
        }
    }

    /// Whether the runs are of the user's own program, which is in place of the model.
    pub(crate) fn is_program(&self) -> bool {
        self.transport.is_empty()
    }

    /// The first lines of the output, to be printed after the heading.
    pub(crate) fn words(&self, origin: &Origin) -> String {
        let Self { model, transport, .. } = self;
        let (threads, rounds) = (plural(self.threads, "thread"), plural(origin.rounds, "round"));
        let how = format!(" over {transport}{}, {threads} per rank", self.on_link());
        let how = if self.is_program() { "" } else { &how };
        format!("{model}{how}; medians of {rounds}\n{}", origin.machine)
    }

    /// Where and when it was measured, for charts.
    pub(crate) fn place(&self, origin: &Origin) -> String {
        format!("{}{}, {}", origin.machine, self.on_link(), origin.date)
    }

    /// The emulated link in words; empty without one.
    pub(crate) fn on_link(&self) -> String {
        let on = |link: &String| format!(", on an emulated link of {link}");
        self.link.as_ref().map_or(String::new(), on)
    }
}

/// Checks the flags that all studies have, before anything starts.
pub(crate) fn check(study: &StudyArgs) -> Result<()> {
    for (flag, file) in [("--json", &study.json), ("--csv", &study.csv)] {
        file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
    }
    for (flag, folder) in [("--charts", &study.charts), ("--output", &study.output)] {
        let check = |folder| check_folder(flag, folder, "pass a folder that you can write to");
        folder.as_deref().map_or(Ok(()), check)?;
    }
    Ok(())
}

/// Refuses the flags that a command sets itself. Each comes with advice.
pub(crate) fn refuse_flags(given: &Spec, flags: &[(&str, &str)]) -> Result<()> {
    match flags.iter().find(|(flag, _)| given.has(flag)) {
        Some((flag, instead)) => usage(format!("--{flag}: {instead}")),
        None => Ok(()),
    }
}

/// Prints the warnings of all cases, each once.
pub(crate) fn warn_of(cases: &[Case]) {
    let all: BTreeSet<&String> = cases.iter().flat_map(|case| &case.warnings).collect();
    all.into_iter().for_each(|warning| warn(warning));
}

/// The layout of the model on `ranks` ranks, which may be more than fit on this host.
pub(crate) fn layout_of(config: &TrainConfig, ranks: usize) -> Result<Arc<Layout>> {
    let dataset = config.data.open_train(config.seed)?;
    Ok(config.model.build(dataset.as_ref(), ranks)?.layout)
}

/// The flags of a run that only measures, and their checked configuration. By default it has [`STEPS`] steps, or those of
/// `--steps-per-epoch`, in as many epochs as that takes.
pub(crate) fn measuring(flags: &Spec) -> Result<(Spec, TrainConfig)> {
    let accumulate = flags.number("accumulate").unwrap_or(1).max(1);
    let batches = flags.number("steps-per-epoch").unwrap_or(STEPS.saturating_mul(accumulate));
    let flags = if flags.has("epochs") {
        flags.with_default("steps-per-epoch", batches)
    } else {
        flags.without(&["steps-per-epoch"]).with("steps", batches.div_ceil(accumulate))
    };
    let config = spec::resolve(&flags)?;
    Ok((flags, config))
}

/// The flags of a run with this strategy, without those that only others read.
pub(crate) fn with_strategy(flags: &Spec, name: &str) -> Result<Spec> {
    let foreign = STRATEGIES.foreign_to(STRATEGIES.get(name)?);
    let foreign: Vec<&str> = foreign.iter().map(String::as_str).collect();
    Ok(flags.without(&foreign).with("strategy", name))
}

/// Runs every case once in every round, unless the folder of `--output` has its record. Fails if a run has failed or measured no
/// step.
pub(crate) fn run_cases(study: &StudyArgs, cases: &[Case]) -> Result<Ledger> {
    let limits = (study.rounds, study.run_limit);
    let mut ledger = match &study.output {
        Some(folder) => Ledger::of_runs(folder, cases, limits, ledger::settings_of(cases))?,
        None => Ledger::default(),
    };
    let limit = Duration::from_secs_f64(study.run_limit);
    execute::make(cases, cases::order(cases.len(), study.rounds), limit, None, &mut ledger)?;
    for (at, case) in cases.iter().enumerate() {
        let (rounds, failure) = ledger.of_case(at, study.rounds);
        if let Some(message) = failure {
            return Err(Failure::Run(message.to_owned()));
        }
        let is_timed =
            |run: &RunSummary| run.number("step_ms_median").or(run.number("throughput")).is_some();
        if !rounds.iter().all(is_timed) {
            return Err(Failure::Run(format!(
                "{}: no step was measured; pass more --steps-per-epoch or --epochs, or fewer \
                 --warmup-steps",
                case.name
            )));
        }
    }
    Ok(ledger)
}

/// Makes the runs of these scenes, and compares them.
pub(crate) fn run_scenes(study: &StudyArgs, name: &str, scenes: &[Scene]) -> Result<Outcome> {
    let (cases, of_variants) = scene::cases(scenes)?;
    warn_of(&cases);
    let ledger = run_cases(study, &cases)?;
    Ok(Outcome::new(name, scenes, &of_variants, study.rounds, &ledger))
}

/// Prints a report and writes the files that the user asked for. Returns the exit code.
pub(crate) fn publish(study: &StudyArgs, mut report: Report) -> Result<u8> {
    say(&report.text(line_width()));
    let charts = report.take_charts();
    write_files(study, &report.json(), &report.table(&report.outcome.rows).csv(), &charts)?;
    Ok(0)
}

/// A figure over the rounds; `None` if a summary lacks it.
pub(crate) fn spread_of(rounds: &[RunSummary], name: &str) -> Option<Spread> {
    Spread::of(rounds.iter().map(|run| run.number(name)))
}

/// The median of a figure over the rounds. Fails if a summary lacks it.
pub(crate) fn median_of(rounds: &[RunSummary], name: &str) -> Result<f64> {
    let spread = spread_of(rounds, name).map(|of| of.median);
    spread.ok_or_else(|| Failure::Run(format!("a summary lacks {name}")))
}

/// Writes the files that the user asked for.
pub(crate) fn write_files(
    study: &StudyArgs,
    report: &impl Serialize,
    csv: &str,
    charts: &[(String, Picture)],
) -> Result<()> {
    let disk = Disk::default();
    if let Some(file) = &study.json {
        write_stated_json(&disk, file, report)?;
    }
    if let Some(file) = &study.csv {
        write_stated_bytes(&disk, file, csv.as_bytes())?;
    }
    if let Some(folder) = &study.charts {
        for file in write_charts(&disk, folder, charts)? {
            say(&format!("Chart: {}", file.printable()));
        }
    }
    Ok(())
}
