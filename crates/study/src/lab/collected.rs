//! `paceline lab --report DIR`: all experiments of a folder on one page.

use std::path::{Path, PathBuf};

use paceline_analysis::report::{Body, Panel, Report, Section, Weight};
use paceline_failure::outputs::write_report;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say};
use paceline_table::table::{Cell, Table};

use super::{FILE_NAME, SHOWN};
use crate::outcome::{Origin, Outcome};
use crate::report::{Report as Rows, tabled};
use crate::usage;

/// The most bytes of the rows of an experiment.
const MAX_BYTES: u64 = 64 << 20;
/// How deep experiments are looked for.
const DEPTH: usize = 4;
/// The name of the page, without its ending. Its JSON must not have the name of an experiment's ([`FILE_NAME`]).
const PAGE: &str = "experiments";

/// Makes the page, and prints its table. Returns the exit code.
pub fn page(folder: &Path) -> Result<u8> {
    let mut files = Vec::new();
    find(folder, DEPTH, &mut files)
        .map_err(|e| Failure::Usage(format!("--report {}: {e}", folder.printable())))?;
    files.sort();
    let mut all: Vec<(PathBuf, Outcome)> = Vec::new();
    for file in files {
        let read = paceline_files::read(&file, MAX_BYTES)
            .map_err(|e| e.to_string())
            .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|e| e.to_string()));
        let outcome = read.map_err(|e| {
            Failure::Usage(format!("--report: {} cannot be read: {e}", file.printable()))
        })?;
        all.push((file, outcome));
    }
    if all.is_empty() {
        return usage(format!(
            "--report {}: there is no experiment in it; make one with paceline lab NAME --output {}",
            folder.printable(),
            folder.join("NAME").printable()
        ));
    }
    let report = report(&all);
    write_report(&Disk::default(), folder, PAGE, &paceline_analysis::report::files(&report)?)?;
    say(&format!("{}\n\n{}", plural(all.len(), "experiment"), overview(&all).fitted(line_width())));
    say(&format!("Files in {}: {PAGE}.html, .csv, .json, .md", folder.printable()));
    Ok(0)
}

/// The files with the rows of experiments, in a folder and those inside it. Links to folders are not followed.
fn find(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && depth > 0 {
            find(&entry.path(), depth - 1, found)?;
        } else if entry.file_name() == FILE_NAME {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// The variants of all experiments, without the bases.
fn overview(all: &[(PathBuf, Outcome)]) -> Table {
    let heads = ["experiment", "scene", "variant", "effect", "date", "machine", "version"]
        .map(|name| (name, if name == "effect" { "to the base" } else { name }, ("", 0)));
    let rows = all.iter().flat_map(|(_, outcome)| {
        let others = outcome.rows.iter().filter(|row| !row.is_base);
        others.map(move |row| {
            let Origin { date, machine, version, .. } = &outcome.origin;
            let [scene, variant] = [&row.scene, &row.variant];
            let verdict = &row.verdict();
            [&outcome.experiment, scene, variant, verdict, date, machine, version]
                .map(|words| Cell::Text(words.clone()))
        })
    });
    tabled(heads, rows)
}

fn report(all: &[(PathBuf, Outcome)]) -> Report {
    let definition = "The throughput over the base of the same scene, with its 95 % interval.";
    let body = Body::Table(overview(all));
    let table = Section::new(
        "all",
        "All variants",
        "The effect of each option on the throughput, by experiment, date and machine.",
        vec![Panel::new("overview", "Variants", "", definition, body)],
    );
    let section = |(at, (_, outcome)): (usize, &(PathBuf, Outcome))| {
        let definition = "Medians over the rounds. The effect compares throughput round by round.";
        let outcome = outcome.clone();
        let rows = Rows { columns: SHOWN.to_vec(), outcome, ..Rows::default() };
        let outcome = &rows.outcome;
        let body = Body::Table(rows.table(&outcome.rows)).or("nothing was run");
        let panel = Panel::new(&format!("table_{at}"), "All variants", "", definition, body);
        let lead = format!("{}; {}", outcome.origin.place(), outcome.origin.command);
        Section::new(&format!("experiment_{at}"), &outcome.experiment, &lead, vec![panel])
    };
    let mut report = Report {
        title: "Lab".to_owned(),
        subtitle: plural(all.len(), "experiment"),
        sections: std::iter::once(table).chain(all.iter().enumerate().map(section)).collect(),
        csv_table: "overview".to_owned(),
        ..Report::default()
    };
    for (file, outcome) in all.iter().filter(|(_, outcome)| outcome.has_failures()) {
        let text = format!("{}: some runs have failed ({})", outcome.experiment, file.printable());
        report.note(Weight::Warning, text);
    }
    report
}
