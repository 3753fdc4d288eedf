//! `paceline sweep`: every combination of some settings, ranked by a figure.

pub mod args;

use crate::ledger::Ledger;
use crate::plan::{self, Vary};
use paceline_failure::Result;
use paceline_failure::outputs::check_folder;
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, say, warn};
use paceline_launch::environment::Placement;

use self::args::SweepArgs;
use crate::{execute, refuse_ranks, run_limit, show, spec};

/// Runs `paceline sweep`.
pub fn sweep(args: &SweepArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a sweep", placement)?;
    let limit = run_limit(args.rounds, args.run_limit)?;
    let ranking = show::ranked_by(&args.rank_by)?;
    let vary =
        args.vary.iter().map(|text| Vary::parse("--vary", text)).collect::<Result<Vec<_>>>()?;
    let (cases, warnings) = plan::cases(&args.train.0, &vary)?;
    check_folder("--output", &args.output, "pass a folder that you can write to")?;
    let varied = vary.iter().map(Vary::text).collect::<Vec<_>>().join(" --vary ");
    let shared = spec::settings(&args.train.0);
    let settings = [("--vary".to_owned(), varied)].into_iter().chain(shared.clone());
    let limits = (args.rounds, args.run_limit);
    let mut ledger = Ledger::of_runs(&args.output, &cases, limits, settings)?;
    for warning in warnings {
        warn(&warning);
    }
    execute::make(&cases, args.rounds, limit, None, &mut ledger)?;
    let report = show::Report::new(&vary, &cases, args.rounds, ranking, &ledger, shared);
    report.write(&Disk::default(), &args.output)?;
    say(&report.text(line_width()));
    say(&format!(
        "Files: {0}/sweep.html, .csv, .json, .svg; run folders: {0}/runs",
        args.output.printable()
    ));
    Ok(u8::from(report.has_failures()))
}
