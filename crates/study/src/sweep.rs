//! `paceline sweep`: every combination of some settings, ranked by a figure.

pub mod args;

use crate::ledger::{Ledger, Settings};
use crate::plan::{self, Vary};
use paceline_failure::Result;
use paceline_failure::outputs::check_folder;
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::text::{line_width, say, warn};
use paceline_launch::environment::Placement;

use self::args::SweepArgs;
use crate::{execute, refuse_ranks, run_limit, show, spec};

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
