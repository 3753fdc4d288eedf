//! `paceline analyze`: turns the traces of a run into a report.
//!
//! Input: folders or files of traces. Output: the means and the ranks on the console, and a page, CSV, JSON
//! and Markdown in a folder. Nothing is written before all reports are made. `paceline-analysis` defines how
//! traces are read and analyzed, and the form of a report.

mod against;
pub mod args;
mod output;

use std::path::{Path, PathBuf};

use chrono::{DateTime, Local, NaiveDateTime};
use paceline_analysis::doctor;
use paceline_analysis::hta::{self, Analysis, Kind};
use paceline_analysis::ranks::{across_ranks, apart};
use paceline_analysis::read::{self, Select, Window};
use paceline_analysis::report::{self, Note, Report, Weight, panels};
use paceline_analysis::snapshot;
use paceline_analysis::timeline::Timeline;
use paceline_failure::outputs::{check_folder, write_report};
use paceline_failure::{Failure, Result, usage};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say};

use self::args::{AnalyzeArgs, SelectName};
use crate::commands::trace::ANOTHER_RUN;

/// The most rows of a table on the console.
const ROWS: usize = 12;

/// The name of a report's files.
const NAME: &str = "summary";

/// Runs `paceline analyze`.
pub fn analyze(args: &AnalyzeArgs) -> Result<u8> {
    let places = places(args)?;
    if let Some(after) = &args.against {
        return against::against(args, &places, after);
    }
    let snapshot = if let [file] = &places[..] { is_snapshot(file).then_some(file) } else { None };
    let (folder, name) = output::named_after(&places);
    // Without `--output`, the folder depends on the kind, which may be known only from the traces.
    let root = |kind: Kind| -> Result<PathBuf> {
        if let Some(output) = &args.output {
            check_folder("--output", output, "pass a folder that you can write to")?;
            return Ok(output.clone());
        }
        let current = std::env::current_dir()
            .map_err(|e| Failure::io("the current folder is not there", e))?;
        let root = output::root(&folder, &current, kind);
        check_folder("the folder of reports", &root, "pass --output")?;
        Ok(name.as_ref().map_or_else(|| root.clone(), |name| root.join(name)))
    };
    let own_root = root(args.options().kind.unwrap_or(Kind::Ddp))?;
    if let Some(file) = snapshot {
        return memory(args, file, own_root);
    }
    let select = match args.select {
        SelectName::Latest => Select::Latest,
        SelectName::All => Select::All,
    };
    let windows = read::find(&places, select)?;
    let mut made = Vec::new();
    for window in &windows {
        made.push(window_report(args, window, &folder)?);
    }
    let roots: Vec<PathBuf> =
        made.iter().map(|(analysis, _)| root(analysis.kind)).collect::<Result<_>>()?;
    let mut folders = Vec::new();
    for (at, ((window, root), (analysis, report))) in
        windows.iter().zip(roots).zip(made).enumerate()
    {
        let mut folder = match select {
            Select::Latest => root,
            Select::All => root.join(output::of_window(at, window)),
        };
        if args.output.is_none() {
            folder = output::free(folder, NAME, |report| output::is_of(report, &places));
        }
        write_report(&Disk::default(), &folder, NAME, &report::files(&report)?)?;
        say(&console(&analysis, &report));
        folders.push(folder);
    }
    folders.iter().for_each(|folder| say_where(folder));
    Ok(0)
}

fn say_where(folder: &Path) {
    say(&format!("Report: {0}/{NAME}.html, and .csv, .json, .md beside it", folder.printable()));
}

/// Whether a file is one of `torch.cuda.memory._dump_snapshot`, by its name.
fn is_snapshot(file: &Path) -> bool {
    file.extension().is_some_and(|of| of == "pickle" || of == "pkl") && !file.is_dir()
}

/// Reports the memory of a card.
fn memory(args: &AnalyzeArgs, file: &Path, folder: PathBuf) -> Result<u8> {
    let of_traces = [
        ("--step", args.step.is_some()),
        ("--include-last-step", args.include_last_step),
        ("--select", args.select == SelectName::All),
        ("--link", args.link.is_some()),
        ("--kind", args.options().kind.is_some()),
    ];
    if let Some((flag, _)) = of_traces.iter().find(|(_, is_given)| *is_given) {
        return usage(format!(
            "{flag}: a snapshot of a card's memory has no steps of ranks; leave it out"
        ));
    }
    let report = snapshot::report(file)?;
    let is_same = |of: &serde_json::Value| of["title"] == report.title;
    let folder = if args.output.is_some() { folder } else { output::free(folder, NAME, is_same) };
    write_report(&Disk::default(), &folder, NAME, &report::files(&report)?)?;
    let mut out = format!("{}\n{}\n", printable(&report.title), printable(&report.subtitle));
    for section in &report.sections {
        out += &format!("{}\n", section.lead);
    }
    for (panel, table) in report.tables() {
        let (shown, more) = table.head(ROWS);
        out += &format!("\n{}\n{}\n", panel.title, shown.fitted(line_width()));
        if more > 0 {
            out += &format!("... and {more} more in the report\n");
        }
    }
    say(&format!("{}{}", out.trim_end(), notes(&report)));
    say_where(&folder);
    Ok(0)
}

/// The folder or files in which traces are searched.
fn places(args: &AnalyzeArgs) -> Result<Vec<PathBuf>> {
    if !args.trace_files.is_empty() {
        return Ok(args.trace_files.clone());
    }
    let dir = args.dir.as_ref().or(args.trace_dir.as_ref());
    dir.map(|dir| vec![dir.clone()]).ok_or_else(|| {
        Failure::Usage(
            "what is to be analyzed? Pass the folder with the traces of a run, such as profile/ddp, or \
             --trace-files"
                .into(),
        )
    })
}

/// A report that has not been written yet, and its analysis.
fn window_report(args: &AnalyzeArgs, window: &Window, folder: &Path) -> Result<(Analysis, Report)> {
    if args.enable_multiprocessing {
        say(&format!(
            "Reading {} in parallel, {} at a time",
            plural(window.files.len(), "trace"),
            read::at_a_time(window.files.len())
        ));
    }
    let timelines = args.open_all(&window.files)?;
    let options = args.options();
    let analysis = hta::analyze(&timelines, &options)?;
    let across = (timelines.len() > 1).then(|| across_ranks(&timelines, &options));
    let about = about(window, &timelines, &analysis, folder);
    let mut report = panels::of_analysis(&analysis, across.as_ref(), &timelines, about);
    let link = args.link.map(|link| link.bytes_per_s);
    if let Some(examination) = doctor::examine(&timelines, &options, link) {
        panels::add_examination(&mut report, &examination);
    }
    Ok((analysis, report))
}

/// Notes on traces of a run that are missing or odd.
fn doubts(window: &Window, timelines: &[Timeline]) -> Vec<Note> {
    let mut notes = Vec::new();
    if !window.missing.is_empty() {
        let text = format!(
            "There are no traces of {}: means are over the ranks that are here, and what the others did \
             cannot be seen.",
            ranks_in_words(&window.missing)
        );
        notes.push(Note { weight: Weight::Warning, text });
    }
    notes.extend(left_out(window));
    let mut doubts = window.doubts.clone();
    let apart: Vec<String> = apart(timelines).iter().map(ToString::to_string).collect();
    if !apart.is_empty() {
        doubts.push(format!("{} {}.", ANOTHER_RUN, apart.join(", ")));
    }
    notes.extend(doubts.into_iter().map(|text| Note { weight: Weight::Warning, text }));
    notes
}

/// The title, subtitle and notes of the report.
fn about(window: &Window, timelines: &[Timeline], analysis: &Analysis, folder: &Path) -> Report {
    let notes = doubts(window, timelines);
    let steps: Vec<(usize, usize)> =
        analysis.ranks.iter().map(|rank| (rank.steps.chosen.len(), rank.steps.found)).collect();
    let steps = match steps.first() {
        Some(&(0, _)) => "no steps".to_owned(),
        Some(&(chosen, found)) if steps.iter().all(|of| *of == (chosen, found)) => {
            let numbers = analysis.ranks.first().map(|rank| &rank.steps.chosen);
            let ends = numbers.and_then(|all| Some((all.first()?.number, all.last()?.number)));
            let which = ends.map_or(String::new(), |(first, last)| format!(" ({first} to {last})"));
            format!("{chosen} of {}{which}", plural(found, "step"))
        }
        _ => "steps differ by rank".to_owned(),
    };
    let run_facts = |key: &str| timelines.first().and_then(|timeline| timeline.run_facts.get(key));
    let mut facts = vec![plural(timelines.len(), "rank"), steps];
    let backend = timelines.first().and_then(|timeline| timeline.backend.clone());
    facts.extend(run_facts("transport").cloned().map(|name| format!("over {name}")).or(backend));
    facts.extend(run_facts("emulated_link").map(|link| format!("on an emulated link of {link}")));
    facts.extend(timelines.first().and_then(|timeline| timeline.devices.first().cloned()));
    let time = window.stamp.as_deref().and_then(time_in_words);
    facts.extend(time.map(|time| format!("profiled {time}")));
    let (title, subtitle) = (title(folder, window), facts.join(" \u{b7} "));
    Report { title, subtitle, notes, ..Report::default() }
}

/// The note about traces that were left out because they are empty.
fn left_out(window: &Window) -> Option<Note> {
    let all = &window.left_out;
    let names: Vec<String> =
        all.iter().take(SHOWN).map(|path| path.printable().to_string()).collect();
    let text = format!(
        "Left out: {}{}, later than what is shown, because no step in it has work. PyTorch's profiler writes such a \
         trace when its schedule has no `repeat` and the program ends after another cycle has begun.",
        names.join(", "),
        and_more(all.len())
    );
    (!all.is_empty()).then_some(Note { weight: Weight::Note, text })
}

/// The title of the report: the folder, or the files if they are in the current folder, which has no name.
fn title(folder: &Path, window: &Window) -> String {
    if !folder.as_os_str().is_empty() {
        return folder.printable().to_string();
    }
    let names: Vec<String> =
        window.files.iter().take(SHOWN).map(|file| file.path.printable().to_string()).collect();
    names.join(", ") + &and_more(window.files.len())
}

/// The time in a trace's name: seconds since 1970 or thousandths, millionths or billionths of them, or date and time of day.
/// `None` for other numbers.
fn time_in_words(stamp: &str) -> Option<String> {
    const FORMAT: &str = "%Y-%m-%d %H:%M:%S";
    // For a moment of these decades, the number has 10 digits as seconds.
    let per_s = match stamp.len() {
        10 => 1,
        13 => 1_000,
        16 => 1_000_000,
        19 => 1_000_000_000,
        _ => {
            let forms = ["%Y%m%dT%H%M%S", "%Y%m%d-%H%M%S", "%Y%m%d_%H%M%S", "%Y-%m-%dT%H-%M-%S"];
            let time = |form| NaiveDateTime::parse_from_str(stamp, form).ok();
            return Some(forms.into_iter().find_map(time)?.format(FORMAT).to_string());
        }
    };
    let time = DateTime::from_timestamp(stamp.parse::<i64>().ok()? / per_s, 0)?;
    Some(time.with_timezone(&Local).format(FORMAT).to_string())
}

/// The largest number of ranks or files that are listed.
const SHOWN: usize = 8;

/// The number of further entries, in words.
fn and_more(count: usize) -> String {
    match count.saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

/// The numbers of ranks, in words. Only the first ones are listed if there are many.
pub(super) fn ranks_in_words(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().take(SHOWN).map(ToString::to_string).collect();
    let what = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{what} {}{}", numbers.join(", "), and_more(ranks.len()))
}

/// The console output: title, figures and notes.
fn console(analysis: &Analysis, report: &Report) -> String {
    let mut out = format!("{}\n{}\n", printable(&report.title), printable(&report.subtitle));
    out += &panels::console(analysis, line_width());
    if let Some(section) = report.sections.iter().find(|of| of.id == "pipeline")
        && let Some(table) = report.table("bubble")
    {
        out += &format!("\n\n{}\n{}", section.lead, table.with_mean().fitted(line_width()));
    }
    out + &notes(report)
}

/// A line for each note.
fn notes(report: &Report) -> String {
    let line = |note: &Note| format!("\n{}: {}", note.weight.name(), printable(&note.text));
    report.notes.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_words() {
        assert_eq!(ranks_in_words(&[3]), "rank 3");
        assert_eq!(ranks_in_words(&[1, 2]), "ranks 1, 2");
        let many: Vec<usize> = (0..20).collect();
        assert_eq!(ranks_in_words(&many), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }

    #[test]
    fn times_are_shown_as_such() {
        for digits in ["1769860800000000000", "1769860800000", "1769860800"] {
            assert!(time_in_words(digits).unwrap().starts_with("2026-01-31 "), "{digits}");
        }
        assert_eq!(time_in_words("20260131T235959").unwrap(), "2026-01-31 23:59:59");
        assert_eq!(
            ["7", "1700", "20260131T", "2026-01-31T1"].map(time_in_words),
            [const { None }; 4]
        );
    }
}
