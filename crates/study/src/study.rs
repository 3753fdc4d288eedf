//! What all studies share: their flags, the setting in which they were made, their runs and their files.
//!
//! Knows no study.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches};
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::outputs::{check_file, check_folder, write_bytes, write_charts, write_json};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::text::{plural, say};
use paceline_launch::environment::Placement;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_settings::config::TrainConfig;
use paceline_table::plot::LineChart;
use paceline_table::table::{Cell, Head, Table};
use serde::Serialize;

use crate::ledger::{Ledger, Settings};
use crate::plan::Case;
use crate::spec::{self, Spec};
use crate::{command_line, execute, rank, refuse_ranks, run_limit};

/// Steps of a run by default.
const STEPS: usize = 30;

/// A study: its name, its flags, and what makes it.
#[derive(Clone, Copy, Debug)]
pub struct Study {
    /// Its name: the word after `paceline bench`.
    pub name: &'static str,
    /// What it finds out, for the help.
    pub about: &'static str,
    /// Adds its flags to its command.
    pub flags: fn(clap::Command) -> clap::Command,
    make: fn(&ArgMatches) -> Result<u8>,
}

impl Study {
    /// A study with the flags of `A`.
    pub(crate) const fn new<A: Args>(
        name: &'static str,
        about: &'static str,
        make: fn(&ArgMatches) -> Result<u8>,
    ) -> Self {
        Self { name, about, flags: A::augment_args, make }
    }

    /// Makes the study with the flags that were typed, and gives the exit code.
    ///
    /// # Errors
    ///
    /// If this process is a rank, if the flags do not fit together, and if a run or a file fails.
    pub fn make(&self, typed: &ArgMatches, placement: Option<Placement>) -> Result<u8> {
        refuse_ranks("a study", placement)?;
        (self.make)(typed)
    }
}

/// The flags of a study, from what was typed. `clap` has checked it; should a group of flags still refuse it, `clap`
/// says so and ends the process, as it does for every other command.
pub(crate) fn flags_of<A: FromArgMatches>(typed: &ArgMatches) -> A {
    A::from_arg_matches(typed).unwrap_or_else(|error| error.exit())
}

/// Flags that all studies have.
#[derive(Clone, Debug, Args)]
pub struct StudyArgs {
    /// How often each run is made. The runs alternate in rounds, and the medians over the rounds count
    #[arg(long, value_name = "R", default_value_t = 3, help_heading = "Study")]
    pub rounds: usize,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Study")]
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
    /// Write charts into this folder, as PNG and SVG
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub charts: Option<PathBuf>,
}

/// The machine and the settings with which a study was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The machine, in words.
    pub machine: String,
    /// The date and time of the start.
    pub date: String,
    /// The command line.
    pub command: String,
    /// Cores that the ranks share.
    pub cores: usize,
    /// How often each run was made.
    pub rounds: usize,
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
}

impl Setting {
    pub(crate) fn new(study: &StudyArgs, config: &TrainConfig, params: u64) -> Self {
        Self {
            machine: resources::machine(),
            date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
            command: command_line(),
            cores: resources::num_cores(),
            rounds: study.rounds,
            model: config.model.name().to_owned(),
            params,
            transport: config.transport.name().to_owned(),
            link: config.comm.link.map(|link| link.to_string()),
            threads: config.threads,
        }
    }

    /// The first lines of the output, to be printed after what was compared.
    pub(crate) fn words(&self) -> String {
        format!(
            "{} over {}{}, {} per rank; medians of {}\n{}",
            self.model,
            self.transport,
            self.on_link(),
            plural(self.threads, "thread"),
            plural(self.rounds, "round"),
            self.machine
        )
    }

    /// Where and when it was measured, for charts.
    pub(crate) fn place(&self) -> String {
        format!("{}{}, {}", self.machine, self.on_link(), self.date)
    }

    /// The emulated link in words; empty without one.
    pub(crate) fn on_link(&self) -> String {
        let on = |link: &String| format!(", on an emulated link of {link}");
        self.link.as_ref().map_or(String::new(), on)
    }
}

/// Checks the flags that all studies have, before anything starts.
pub(crate) fn check(study: &StudyArgs) -> Result<()> {
    run_limit(study.rounds, study.run_limit)?;
    for (flag, file) in [("--json", &study.json), ("--csv", &study.csv)] {
        file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
    }
    for (flag, folder) in [("--charts", &study.charts), ("--output", &study.output)] {
        let check = |folder| check_folder(flag, folder, "pass a folder that you can write to");
        folder.as_deref().map_or(Ok(()), check)?;
    }
    Ok(())
}

/// The flags of a run that only measures, and their configuration, checked as a whole. By default the run
/// has enough batches for [`STEPS`] steps, in as many epochs as the data need for them.
pub(crate) fn measuring(flags: &Spec) -> Result<(Spec, TrainConfig)> {
    // A step is made of this many batches.
    let accumulate = flags.number("accumulate").unwrap_or(1).max(1);
    let flags = flags.with_default("steps-per-epoch", STEPS.saturating_mul(accumulate));
    let config = spec::resolve(&flags.with_default("epochs", 1))?;
    if flags.has("epochs") {
        return Ok((flags, config));
    }
    // An epoch of the data may have fewer steps than that.
    let natural = config.steps_per_epoch;
    let wanted = flags.number("steps-per-epoch").unwrap_or(STEPS);
    let flags = flags.with("steps-per-epoch", natural).with("epochs", wanted.div_ceil(natural));
    let config = spec::resolve(&flags)?;
    Ok((flags, config))
}

/// The flags of a run with the strategy of this name, without those that only other strategies read.
pub(crate) fn with_strategy(flags: &Spec, name: &str) -> Result<Spec> {
    let foreign = STRATEGIES.foreign_to(STRATEGIES.get(name)?);
    let foreign: Vec<&str> = foreign.iter().map(String::as_str).collect();
    Ok(flags.without(&foreign).with("strategy", name))
}

/// Runs every case once in every round. Returns the summaries by case, each with one per round.
pub(crate) fn run_all(study: &StudyArgs, cases: &[Case]) -> Result<Vec<Vec<RunSummary>>> {
    run_in(study, study.output.as_deref(), cases)
}

/// The same, with the records in `folder`, if there is one. Runs that have a record there are not made again.
pub(crate) fn run_in(
    study: &StudyArgs,
    folder: Option<&Path>,
    cases: &[Case],
) -> Result<Vec<Vec<RunSummary>>> {
    let mut ledger = match folder {
        Some(folder) => Ledger::open(&Disk::default(), folder, &settings(study, cases))?,
        None => Ledger::default(),
    };
    if let Some(folder) = folder.filter(|_| !ledger.records().is_empty()) {
        let (done, all) = (ledger.records().len(), cases.len() * study.rounds);
        say(&format!("Goes on after {done} of {all} runs, from {}", folder.printable()));
    }
    let limit = run_limit(study.rounds, study.run_limit)?;
    execute::make(cases, study.rounds, limit, None, &mut ledger)?;
    let mut found = Vec::new();
    for (at, case) in cases.iter().enumerate() {
        let (rounds, failure) = ledger.of_case(at);
        if let Some(message) = failure {
            return Err(Failure::Run(message.to_owned()));
        }
        if rounds.iter().any(|run| run.number("step_ms_median").is_none()) {
            return Err(Failure::Run(format!(
                "{}: no step was measured; pass more --steps-per-epoch or --epochs, or fewer \
                 --warmup-steps",
                case.name
            )));
        }
        found.push(rounds);
    }
    Ok(found)
}

/// The settings that determine the runs of a study. A command with the same settings may continue in the same folder.
fn settings(study: &StudyArgs, cases: &[Case]) -> Settings {
    let case = |(at, case): (usize, &Case)| {
        (format!("case {at}"), format!("{} ({})", case.name, spec::shown(&case.spec)))
    };
    let all = [
        ("--rounds".to_owned(), study.rounds.to_string()),
        ("--run-limit".to_owned(), study.run_limit.to_string()),
        ("version of paceline".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("machine".to_owned(), resources::machine()),
    ];
    all.into_iter().chain(cases.iter().enumerate().map(case)).collect()
}

/// The median over the rounds of a figure. Fails if a summary lacks it.
pub(crate) fn median_of(rounds: &[RunSummary], name: &str) -> Result<f64> {
    rank::median(rounds.iter().map(|run| run.number(name)))
        .ok_or_else(|| Failure::Run(format!("a summary lacks {name}")))
}

/// A column: its key in files, its heading on the console, its decimals there, and the function that
/// makes its cell.
pub(crate) type Shown<R> = (&'static str, &'static str, usize, fn(&R) -> Cell);

/// Makes a table of `rows`.
pub(crate) fn table_of<R>(rows: &[R], columns: &[Shown<R>]) -> Table {
    let cells = |row: &R| columns.iter().map(|(.., cell)| cell(row)).collect();
    let rows = rows.iter().map(cells).collect();
    let columns = columns.iter();
    let columns = columns.map(|(key, head, decimals, _)| Head::new(key, head, ("", *decimals), ""));
    Table { columns: columns.collect(), rows, mean: None }
}

/// The rows with all their fields, as CSV.
pub(crate) fn csv_of(rows: &[impl Serialize]) -> Result<String> {
    let failed = |e: &dyn std::fmt::Display| Failure::Run(format!("cannot write CSV: {e}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    rows.iter().try_for_each(|row| writer.serialize(row)).map_err(|e| failed(&e))?;
    String::from_utf8(writer.into_inner().map_err(|e| failed(&e))?).map_err(|e| failed(&e))
}

/// Writes the files that the user asked for.
pub(crate) fn write_files(
    study: &StudyArgs,
    report: &impl Serialize,
    csv: &str,
    charts: &[(String, LineChart)],
) -> Result<()> {
    let disk = Disk::default();
    if let Some(file) = &study.json {
        write_json(&disk, file, report)?;
    }
    if let Some(file) = &study.csv {
        write_bytes(&disk, file, csv.as_bytes())?;
    }
    if let Some(folder) = &study.charts {
        for file in write_charts(&disk, folder, charts)? {
            say(&format!("Chart: {}", file.printable()));
        }
    }
    Ok(())
}
