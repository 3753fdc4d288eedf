//! Presets of a sweep: studies of training with a report of their own.
//!
//! | file | what it does |
//! |---|---|
//! | [`scaling`] | `paceline bench scaling`: more and more ranks |
//! | [`buckets`] | `paceline bench buckets`: larger and larger buckets |
//! | [`predict`] | `paceline predict`: links that were never run on |
//!
//! All times come from the runs' own summaries; nothing here looks at a clock.

pub mod buckets;
pub mod predict;
pub mod scaling;
pub mod strategies;

use std::time::Duration;

use paceline_analysis::plot::LineChart;
use serde::Serialize;

use crate::bench::screen::say;
use crate::cli::{Given, StudyArgs, StudyCommand};
use crate::config::TrainConfig;
use crate::environment::Placement;
use crate::outputs::{check_file, check_folder, write_charts};
use crate::run::folder;
use crate::sweep::execute::{self, RunSummary, Runs};
use crate::{Failure, Result, resources};

/// Rounds at most.
const MAX_ROUNDS: usize = 1000;
/// Seconds that a run may take at most: a month.
const MAX_RUN_LIMIT: f64 = 2.6e6;
/// Steps of a run, unless the user says otherwise.
const STEPS: usize = 30;

/// Makes the study of `command`.
pub fn study(command: &StudyCommand, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks(placement)?;
    match command {
        StudyCommand::Scaling(args) => scaling::scaling(args),
        StudyCommand::Buckets(args) => buckets::buckets(args),
    }
}

/// A study is no rank of somebody else's run.
fn refuse_ranks(placement: Option<Placement>) -> Result<()> {
    placement.map_or(Ok(()), |placement| {
        Err(Failure::Usage(format!(
            "a study starts ranks of its own, but RANK and WORLD_SIZE say that another launcher has \
             started {}; start it by itself, or unset RANK and WORLD_SIZE",
            placement.place.world_size
        )))
    })
}

/// Where and how a study was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The machine, in words.
    pub machine: String,
    /// When.
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
    fn new(study: &StudyArgs, config: &TrainConfig, params: u64) -> Self {
        Self {
            machine: resources::machine(),
            date: jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string(),
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

    /// The head of what is printed, after what was compared.
    fn words(&self) -> String {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        format!(
            "{} over {}{}, {} thread{} per rank; medians of {} round{}\n{}",
            self.model,
            self.transport,
            self.on_link(),
            self.threads,
            plural(self.threads),
            self.rounds,
            plural(self.rounds),
            self.machine
        )
    }

    /// Where and when it was measured, for charts.
    fn place(&self) -> String {
        format!("{}{}, {}", self.machine, self.on_link(), self.date)
    }

    /// The emulated link in words; empty without one.
    fn on_link(&self) -> String {
        let on = |link: &String| format!(", on an emulated link of {link}");
        self.link.as_ref().map_or(String::new(), on)
    }
}

/// The command line of this process; where the program lies is no matter of it.
pub(crate) fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    ["paceline".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

/// Checks what all studies have, before anything starts.
fn check(study: &StudyArgs) -> Result<()> {
    if !(1..=MAX_ROUNDS).contains(&study.rounds) {
        return Err(Failure::Usage(format!(
            "--rounds {}: pass 1 to {MAX_ROUNDS} rounds",
            study.rounds
        )));
    }
    if !(study.run_limit > 0.0 && study.run_limit <= MAX_RUN_LIMIT) {
        return Err(Failure::Usage(format!(
            "--run-limit {}: pass seconds above zero, at most {MAX_RUN_LIMIT}",
            study.run_limit
        )));
    }
    for (flag, file) in [("--json", &study.json), ("--csv", &study.csv)] {
        file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
    }
    study.charts.as_deref().map_or(Ok(()), |folder| {
        check_folder("--charts", folder, "pass a folder that you can write to")
    })
}

/// The flags of a run that only measures: as many steps as are to be made, in as many epochs as that
/// takes, unless the user has said how many. Checked as a whole.
fn measuring(flags: &Given) -> Result<(Given, TrainConfig)> {
    // Of so many batches one step is made.
    let accumulate = flags.number("accumulate").unwrap_or(1).max(1);
    let flags = flags.with_default("steps-per-epoch", STEPS.saturating_mul(accumulate));
    let config = execute::resolve(&flags.with_default("epochs", 1))?;
    if flags.has("epochs") {
        return Ok((flags, config));
    }
    // The data may have fewer steps than that.
    let natural = config.steps_per_epoch;
    let wanted = flags.number("steps-per-epoch").unwrap_or(STEPS);
    let flags = flags.with("steps-per-epoch", natural).with("epochs", wanted.div_ceil(natural));
    let config = execute::resolve(&flags)?;
    Ok((flags, config))
}

/// A run of a study: what it is in words, and its flags.
#[derive(Clone, Debug)]
struct Case {
    what: String,
    flags: Given,
}

/// Makes every case once in every round, there and back again, so that what drifts on a noisy machine
/// meets all alike. Gives the summaries by case, each with one of every round.
fn run_all(study: &StudyArgs, cases: &[Case]) -> Result<Vec<Vec<RunSummary>>> {
    let limit = Duration::from_secs_f64(study.run_limit);
    let runs = Runs::new(cases.len() * study.rounds, limit, None)?;
    let mut all = vec![Vec::new(); cases.len()];
    for round in 0..study.rounds {
        let mut order: Vec<usize> = (0..cases.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let case = &cases[at];
            let summary = runs.train(&case.what, &case.flags)?;
            if summary.step_ms_median.is_none() {
                return Err(Failure::Run(format!(
                    "{}: no step was measured; pass more --steps-per-epoch or --epochs, or fewer \
                     --warmup-steps",
                    case.what
                )));
            }
            all[at].push(summary);
        }
    }
    runs.finish();
    Ok(all)
}

/// The median over the rounds of what `part` takes from each.
fn median_of(rounds: &[RunSummary], part: impl Fn(&RunSummary) -> Option<f64>) -> Option<f64> {
    execute::median(rounds.iter().map(part))
}

/// Writes what the user asked for.
fn write_files(
    study: &StudyArgs,
    report: &impl Serialize,
    rows: &[impl Serialize],
    charts: &[(String, LineChart)],
) -> Result<()> {
    if let Some(file) = &study.json {
        folder::write_json(file, report)?;
    }
    if let Some(file) = &study.csv {
        let failed =
            |e: &dyn std::fmt::Display| Failure::io(format!("cannot write {}", file.display()), e);
        let mut writer = csv::Writer::from_path(file).map_err(|e| failed(&e))?;
        for row in rows {
            writer.serialize(row).map_err(|e| failed(&e))?;
        }
        writer.flush().map_err(|e| failed(&e))?;
    }
    if let Some(folder) = &study.charts {
        for file in write_charts(folder, charts)? {
            say(&format!("Chart: {}", file.display()));
        }
    }
    Ok(())
}
