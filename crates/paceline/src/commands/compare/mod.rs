//! `paceline compare RUN...`: runs side by side, from the contents of their folders.
//!
//! Takes run folders; prints a table on the console and writes a report. Figures of the step are the
//! runs' own, from `summary.json`. Runs that were profiled add the figures of their traces. This module
//! starts no run and measures nothing.

pub mod args;
mod load;
pub(super) mod numerics;
mod settings;
mod table;

use load::Run;
pub(super) use load::folders;
use paceline_analysis::report::{self, Report, Weight};
use paceline_failure::outputs::{check_folder, write_report};
use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say, warn};
use paceline_table::stats::noise_words;

use self::args::CompareRunsArgs;

/// The name of the report's files.
const NAME: &str = "compare";
/// The name of the panel with the settings that differ.
const SETTINGS: &str = "settings";

/// Runs `paceline compare`.
pub fn compare(args: &CompareRunsArgs) -> Result<u8> {
    let price_per_hour = args.price_per_hour;
    if args.numerics {
        let [a, b] = args.runs.as_slice() else {
            let count = args.runs.len();
            return Err(Failure::Usage(format!(
                "--numerics compares two folders, not {count}: pass A and B"
            )));
        };
        return numerics::compare([a, b], [a, b], args.verbose).map(|_| 0);
    }
    check_folder("--output", &args.output, "pass a folder that you can write to")?;
    let (mut runs, mut left_out) = (Vec::new(), Vec::new());
    let folders = folders(&args.runs)?;
    for (folder, name) in folders.iter().zip(load::names(&folders)) {
        match load::run(folder, name) {
            Ok(run) => runs.push(run),
            Err(why) => left_out.push(format!("left out {}: {why}", folder.printable())),
        }
    }
    if runs.is_empty() {
        return Err(Failure::Usage(format!("no run can be compared; {}", left_out.join("; "))));
    }
    let mut report = Report {
        title: format!("Comparison of {}", plural(runs.len(), "run")),
        subtitle: "Means over ranks and measured steps, as each run found them itself".into(),
        figures: Vec::new(),
        notes: Vec::new(),
        sections: table::sections(&runs, price_per_hour),
        csv_table: NAME.to_owned(),
    };
    for warning in left_out.into_iter().chain(warnings(&runs, price_per_hour)) {
        warn(&printable(&warning));
        report.note(Weight::Warning, warning);
    }
    let waited = runs.iter().filter_map(|run| run.summary.number("cpu_wait_pct"));
    let noise = noise_words(waited.reduce(f64::max), None);
    noise.iter().for_each(|words| report.note(Weight::Warning, words.clone()));
    write_report(&Disk::default(), &args.output, NAME, &report::files(&report)?)?;
    say(&console(&runs, &report, noise, args));
    let folder = args.output.printable();
    say(&format!("All figures: {folder}/{NAME}.html, and .csv, .json, .md beside it"));
    Ok(0)
}

/// Warnings about differences that make the runs' numbers hard to compare.
fn warnings(runs: &[Run], price_per_hour: Option<f64>) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut differ = |what: &str, of: &dyn Fn(&Run) -> String| {
        let mut values: Vec<String> = runs.iter().map(of).collect();
        values.sort();
        values.dedup();
        if values.len() > 1 {
            warnings.push(format!("the runs have different {what}: {}", values.join(", ")));
        }
    };
    differ("models", &|run| {
        let params = paceline_host::text::thousands(run.summary.count("params"));
        format!("{} of {params} parameters", run.summary.text("model"))
    });
    differ("batch sizes per rank", &|run| run.summary.count("batch_size").to_string());
    let untimed = runs.iter().filter(|run| run.summary.number("total_s").is_none());
    let untimed: Vec<&str> = untimed.map(|run| run.name.as_str()).collect();
    if price_per_hour.is_some() && !untimed.is_empty() {
        warnings.push(format!(
            "no cost of {}: the summary does not say how long the run took",
            untimed.join(", ")
        ));
    }
    for (run, steps) in
        runs.iter().filter_map(|run| Some((run, run.summary.number("stopped_after")?)))
    {
        warnings
            .push(format!("{} was stopped after step {steps}: its figures end there", run.name));
    }
    for run in runs.iter().filter(|run| !run.untraced.is_empty()) {
        warnings.push(format!(
            "the columns of traces stay empty for {}: {}",
            run.name,
            run.untraced.join("; ")
        ));
    }
    warnings
}

/// The answer, and the table of what differs, or all tables.
fn console(runs: &[Run], report: &Report, noise: Option<String>, args: &CompareRunsArgs) -> String {
    let width = line_width();
    let mut lines: Vec<String> = table::best(runs).into_iter().chain(noise).collect();
    lines.push(report.title.clone());
    if args.verbose {
        let tables = [NAME, SETTINGS].into_iter().filter_map(|name| report.table(name));
        lines.extend(tables.map(|table| table.fitted(width)));
    } else {
        lines.push(table::for_console(runs, args.price_per_hour, width));
    }
    lines.join("\n")
}
