//! `paceline analyze A --against B`: the same job before and after a change.
//!
//! Input: the traces of both. Output: the faster parts, by cause and by operator, and whether the gain that was promised before
//! came. Both are examined as `analyze` does. Runs of paceline are examined by their critical path.

use std::path::{Path, PathBuf};

use paceline_analysis::doctor;
use paceline_analysis::hta;
use paceline_analysis::read::{self, Select};
use paceline_analysis::report::{self, Note, Report, Weight, panels};
use paceline_analysis::timeline::Timeline;
use paceline_failure::Result;
use paceline_failure::outputs::{check_folder, write_report};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say};
use paceline_table::table::Cell;

use super::args::AnalyzeArgs;
use super::output::{free, run_name};
use super::{doubts, notes as note_lines};

/// The name of the report's files.
const NAME: &str = "against";
/// The number of causes and of notes on the console. The files have all.
const ROWS: usize = 5;

/// Compares the traces at `places` with those of `after`.
pub(super) fn against(args: &AnalyzeArgs, places: &[PathBuf], after: &Path) -> Result<u8> {
    let first = places.first().map_or(Path::new(""), PathBuf::as_path);
    let (what, output) = match &args.output {
        Some(output) => ("--output", output.clone()),
        None => {
            let name = format!("{}-{}", run_name(first), run_name(after));
            ("the folder of reports", Path::new("reports").join(NAME).join(name))
        }
    };
    check_folder(what, &output, "pass --output with a folder that you can write to")?;
    let mut notes = Vec::new();
    let options = args.options();
    let [before, then] = [places.to_vec(), vec![after.to_owned()]];
    let (before, then) =
        (timelines(args, &before, &mut notes)?, timelines(args, &then, &mut notes)?);
    notes.extend(other_hardware(&before, &then));
    let diff = hta::diff(&before, &then, &args.steps, &options)?;
    let [was, is] = [&before, &then].map(|of| doctor::diagnosis(of, &options));
    let about = Report {
        title: "Before and after a change".into(),
        subtitle: format!("before: {}, after: {}", first.printable(), after.printable()),
        notes,
        ..Report::default()
    };
    let is_one_program = is_own(&before) == is_own(&then);
    let all: Vec<Timeline> = before.into_iter().chain(then).collect();
    let mut report = panels::of_diff(&diff, &all, about);
    match doctor::against::against(&was, &is).filter(|_| is_one_program) {
        Some(against) => panels::add_against(&mut report, &against),
        None => {
            let lacking = [(&was, first), (&is, after)];
            let lacking = lacking.into_iter().find(|(of, _)| of.lengths_ms.is_empty());
            let why = match lacking.filter(|_| is_one_program) {
                _ if !is_one_program => "Only one side is of paceline.".to_owned(),
                Some((of, place)) => {
                    let why =
                        of.unseen.first().map_or("Its steps cannot be replayed.", String::as_str);
                    format!("{}: {why}", place.printable())
                }
                None => "They cannot be replayed.".to_owned(),
            };
            let steps = step_times(&report).unwrap_or_default();
            let text = format!("{steps}Steps cannot be compared by cause. {why}");
            report.notes.insert(0, Note { weight: Weight::Warning, text });
        }
    }
    let output = match args.output {
        Some(_) => output,
        None => free(output, NAME, |other| other["subtitle"] == report.subtitle.as_str()),
    };
    write_report(&Disk::default(), &output, NAME, &report::files(&report)?)?;
    say(&console(&mut report));
    let folder = output.printable();
    say(&format!(
        "Report: {folder}/{NAME}.html, and .csv, .json, .md beside it, with every operator"
    ));
    Ok(0)
}

/// The warning that the traces are of different cards or numbers of ranks, so that the difference is not of a change alone.
fn other_hardware(before: &[Timeline], after: &[Timeline]) -> Option<Note> {
    let card = |of: &[Timeline]| of.first()?.devices.first().cloned();
    let world = |of: &[Timeline]| Some(plural(of.first()?.world_size.unwrap_or(of.len()), "rank"));
    let differ = [card(before).zip(card(after)), world(before).zip(world(after))];
    let differ = differ.into_iter().flatten().filter(|(before, after)| before != after);
    let words: Vec<String> =
        differ.map(|(before, after)| format!("{before} before and {after} after")).collect();
    let text = format!("Not only the program differs: {}.", words.join("; "));
    (!words.is_empty()).then_some(Note { weight: Weight::Warning, text })
}

/// Whether these are traces of paceline.
fn is_own(timelines: &[Timeline]) -> bool {
    timelines.iter().any(doctor::is_of_paceline)
}

/// The traces of all ranks, of the latest time that the run was profiled.
fn timelines(
    args: &AnalyzeArgs,
    places: &[PathBuf],
    notes: &mut Vec<Note>,
) -> Result<Vec<Timeline>> {
    let windows = read::find(places, Select::Latest)?;
    let files = windows.first().map_or(&[][..], |window| &window.files);
    let timelines = args.open_all(files)?;
    notes.extend(windows.iter().flat_map(|window| doubts(window, &timelines)));
    Ok(timelines)
}

/// The lengths of the steps that the traces mark.
fn step_times(report: &Report) -> Option<String> {
    let table = report.table("diff")?;
    let row = table.rows.iter().find(|row| row[0] == Cell::from("ProfilerStep"))?;
    let mut ms = table.columns.iter().zip(row).filter(|(head, _)| head.key.ends_with("_ms"));
    let [before, after] = [ms.next()?.1.number()?, ms.next()?.1.number()?];
    (before.min(after) > 0.0)
        .then(|| format!("A step took {before:.2} ms before and {after:.2} ms after. "))
}

/// The console output: the answer first, which is the first note.
fn console(report: &mut Report) -> String {
    let answer = report.notes.remove(0).text;
    let mut out = format!("{}\n{}", printable(&answer), printable(&report.subtitle));
    if let Some(causes) = report.table("causes").filter(|table| !table.rows.is_empty()) {
        let causes = causes.with_columns(|column| column.key != "title");
        out += &format!("\n{}", causes.head(ROWS).0.compact(1, false, line_width()));
    }
    report.notes.sort_by_key(|note| note.weight == Weight::Note);
    let left_out = report.notes.len().saturating_sub(ROWS);
    report.notes.truncate(ROWS);
    out += &note_lines(report);
    if left_out > 0 {
        out += &format!("\n{} in the report", plural(left_out, "more note"));
    }
    out
}
