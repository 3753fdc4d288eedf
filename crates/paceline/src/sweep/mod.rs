//! Sweeps: training runs that are repeated several times, interleaved, and compared.
//!
//! | file | what it does |
//! |---|---|
//! | [`spec`] | changes one setting of a run after the other |
//! | [`plan`] | makes the list of cases, and the order of all runs |
//! | [`execute`] | makes the runs |
//! | [`resume`] | keeps the results of finished runs |
//! | [`summary`] | reads the summary of a run |
//! | [`rank`] | decides which case is better, and what is noise |
//! | [`show`] | shows the result of `paceline sweep` as table, files and chart |
//! | [`presets`] | sweeps with their own reports |
//!
//! All times come from the runs' own summaries; nothing here measures.

pub mod execute;
pub mod plan;
pub mod presets;
pub mod rank;
pub mod resume;
pub mod show;
pub mod spec;
pub mod summary;

use std::time::Duration;

use crate::cli::sweep::SweepArgs;
use crate::disk::Disk;
use crate::environment::Placement;
use crate::outputs::check_folder;
use crate::text::{line_width, say, warn};
use crate::{Failure, Result, resources};

use paceline_files::Printable;
use plan::Vary;
use resume::{Ledger, Settings};

/// The largest number of rounds.
const MAX_ROUNDS: usize = 1000;
/// The largest time limit of a run in seconds: a month.
const MAX_RUN_LIMIT: f64 = 2.6e6;

/// Runs `paceline sweep`.
pub fn sweep(args: &SweepArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a sweep", placement)?;
    let limit = run_limit(args.rounds, args.run_limit)?;
    let ranking = show::ranked_by(&args.rank_by)?;
    let vary = args.vary.iter().map(|text| Vary::parse(text)).collect::<Result<Vec<_>>>()?;
    let (cases, warnings) = plan::cases(&args.train.0, &vary)?;
    check_folder("--output", &args.output, "pass a folder that you can write to")?;
    let disk = Disk::default();
    let mut ledger = Ledger::open(&disk, &args.output, &settings(args, &vary))?;
    for warning in warnings {
        warn(&warning);
    }
    if !ledger.records().is_empty() {
        let (done, all) = (ledger.records().len(), cases.len() * args.rounds);
        say(&format!("Goes on after {done} of {all} runs, from {}", args.output.printable()));
    }
    execute::make(&cases, args.rounds, limit, None, &mut ledger)?;
    let report = show::Report::new(&vary, &cases, args.rounds, ranking, &ledger);
    report.write(&disk, &args.output)?;
    say(&report.text(line_width()));
    say(&format!(
        "Files: {0}/sweep.csv, .json, .svg, .png; run folders: {0}/runs",
        args.output.printable()
    ));
    Ok(u8::from(report.has_failures()))
}

/// The settings that determine the runs. A command with the same settings may continue in the same
/// folder.
fn settings(args: &SweepArgs, vary: &[Vary]) -> Settings {
    let mut settings: Settings = [
        ("--rounds".to_owned(), args.rounds.to_string()),
        ("--run-limit".to_owned(), args.run_limit.to_string()),
        ("version of paceline".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("machine".to_owned(), resources::machine()),
        ("--vary".to_owned(), vary.iter().map(Vary::text).collect::<Vec<_>>().join(" --vary ")),
    ]
    .into();
    settings.extend(spec::settings(&args.train.0));
    settings
}

/// Checks both flags, and returns how long a run may take.
fn run_limit(rounds: usize, run_limit: f64) -> Result<Duration> {
    if !(1..=MAX_ROUNDS).contains(&rounds) {
        return Err(Failure::Usage(format!("--rounds {rounds}: pass 1 to {MAX_ROUNDS} rounds")));
    }
    if !(run_limit > 0.0 && run_limit <= MAX_RUN_LIMIT) {
        return Err(Failure::Usage(format!(
            "--run-limit {run_limit}: pass seconds above zero, at most {MAX_RUN_LIMIT}"
        )));
    }
    Ok(Duration::from_secs_f64(run_limit))
}

/// Fails if this process is a rank: a command that starts runs must not be part of another run.
fn refuse_ranks(what: &str, placement: Option<Placement>) -> Result<()> {
    placement.map_or(Ok(()), |placement| {
        Err(Failure::Usage(format!(
            "{what} starts ranks of its own, but RANK and WORLD_SIZE say that another launcher has started \
             {}; start it by itself, or unset RANK and WORLD_SIZE",
            placement.place.world_size
        )))
    })
}

/// The command line of this process, without the path of the program.
pub(crate) fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    ["paceline".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

fn usage<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure::Usage(reason.into()))
}
