//! `paceline analyze diff`: compares the traces of two runs.

use std::path::{Path, PathBuf};

use paceline_analysis::hta::{self, Options, StepChoice};
use paceline_analysis::read::{self, Select};
use paceline_analysis::report::panels::{self, About};
use paceline_analysis::report::{Note, Report};
use paceline_analysis::timeline::Timeline;
use paceline_failure::Result;
use paceline_failure::outputs::{check_folder, write_report};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say};

use super::output::{free, run_name};
use super::{left_out, notes as note_lines, read_all};
use crate::commands::analyze::args::{DiffArgs, StepsName};

/// The name of the report's files.
const NAME: &str = "diff";
/// The number of rows on the console. The files have all rows.
const ROWS: usize = 20;

/// Runs `paceline analyze diff`.
pub(super) fn diff(args: &DiffArgs) -> Result<u8> {
    let (what, output) = match &args.output {
        Some(output) => ("--output", output.clone()),
        None => ("the folder of reports", default_output(&args.first, &args.second)),
    };
    check_folder(what, &output, "pass --output with a folder that you can write to")?;
    let mut notes = Vec::new();
    let first = timelines(&args.first, &mut notes)?;
    let second = timelines(&args.second, &mut notes)?;
    let steps = match args.steps {
        StepsName::First => StepChoice::First,
        StepsName::All => StepChoice::All,
        StepsName::One(number) => StepChoice::These(vec![number]),
    };
    let options = Options { include_last_step: args.include_last_step, ..Options::default() };
    let diff = hta::diff(&first, &second, &steps, &options)?;
    let about = About {
        title: "Trace difference".into(),
        subtitle: format!("first: {}, second: {}", args.first.printable(), args.second.printable()),
        notes,
    };
    let timelines: Vec<Timeline> = first.into_iter().chain(second).collect();
    let report = panels::of_diff(&diff, &timelines, about);
    let output = match args.output {
        Some(_) => output,
        None => free(output, NAME, |other| other["subtitle"] == report.subtitle.as_str()),
    };
    write_report(&Disk::default(), &output, NAME, &report)?;
    say(&console(&report));
    say(&format!("Report: {0}/{NAME}.html, and .csv, .json, .md beside it", output.printable()));
    Ok(0)
}

fn timelines(place: &Path, notes: &mut Vec<Note>) -> Result<Vec<Timeline>> {
    let windows = read::find(&[place.to_owned()], Select::Latest)?;
    notes.extend(windows.iter().filter_map(left_out));
    // The comparison uses only the lowest rank of each run.
    let files = windows.first().map_or(&[][..], |window| &window.files[..1]);
    read_all(files)
}

/// The default folder of the report, `reports/diff/<A>-<B>`.
fn default_output(first: &Path, second: &Path) -> PathBuf {
    let name = format!("{}-{}", run_name(first), run_name(second));
    Path::new("reports").join("diff").join(name)
}

pub(super) fn console(report: &Report) -> String {
    let mut out = format!("{}\n{}", report.title, printable(&report.subtitle));
    if let Some(table) = report.table("diff") {
        let (head, left_out) = table.head(ROWS);
        out += &format!("\n{}", head.fitted(line_width()));
        if left_out > 0 {
            let (names, are) =
                (plural(left_out, "more name"), if left_out == 1 { "is" } else { "are" });
            out += &format!("\n{names} {are} in the report.");
        }
    }
    out + &note_lines(report)
}
