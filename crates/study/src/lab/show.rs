//! Shows an experiment: lines for the console, a chart, and a page.

use std::path::Path;

use paceline_analysis::report::{Body, Panel, Report, Section, Weight, Width, files};
use paceline_failure::Result;
use paceline_failure::outputs::{write_charts, write_json, write_report};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say};
use paceline_table::chart::{Axis, Chart, Color, Picture, Row as Bar, Rows, Series, Shown};

use super::Experiment;
use super::measure::FIGURE;
use super::outcome::{Beside, FILE_NAME, Outcome, Row};

/// The name of the page, without its ending.
pub const REPORT: &str = "report";

/// Prints everything and writes all files into `folder`.
pub fn publish(
    experiment: &Experiment,
    outcome: &Outcome,
    beside: Vec<Beside>,
    folder: &Path,
) -> Result<()> {
    let disk = Disk::default();
    say(&format!(
        "{}: {}\n{}, {}",
        experiment.name,
        experiment.about,
        outcome.machine,
        plural(outcome.rounds, "round")
    ));
    for rows in outcome.scenes() {
        let table = outcome.table_of(rows, experiment.figures).fitted(line_width());
        let name = &rows[0].scene;
        say(&if name.is_empty() { format!("\n{table}") } else { format!("\n{name}\n{table}") });
    }
    say(&format!(
        "\nThroughput beside the base of each scene, with the 95 % interval:\n{}",
        verdicts(outcome).join("\n")
    ));
    beside.iter().for_each(say_beside);
    for row in &outcome.rows {
        if let Some(failure) = &row.failure {
            say(&format!("failed: {} {}: {failure}", row.scene, row.variant));
        }
    }
    write_json(&disk, &folder.join(FILE_NAME), outcome)?;
    write_report(&disk, folder, REPORT, &files(&report(experiment, outcome, &beside))?)?;
    let own = chart(experiment, outcome).map(|chart| (experiment.name.to_owned(), chart));
    let charts: Vec<_> =
        own.into_iter().chain(beside.into_iter().filter_map(|of| of.chart)).collect();
    write_charts(&disk, folder, &charts)?;
    let names = charts.iter().map(|(name, _)| format!("{name}.svg")).collect::<Vec<_>>().join(", ");
    say(&format!(
        "\nFiles in {}: {REPORT}.html, .csv, .json, .md; {FILE_NAME}; {names}; docs/lab/{}.md says what to expect",
        folder.printable(),
        experiment.name
    ));
    Ok(())
}

/// Prints results that needed no runs, and writes their files into `folder`, under their name.
pub fn publish_alone(title: &str, subtitle: String, of: Beside, folder: &Path) -> Result<()> {
    let (disk, name) = (Disk::default(), of.id);
    say(&subtitle);
    say_beside(&of);
    let mut report = Report {
        title: title.to_owned(),
        subtitle,
        sections: vec![Section::new("found", title, "", vec![panel_of(&of)])],
        csv_table: of.id.to_owned(),
        ..Report::default()
    };
    of.lines.iter().for_each(|line| report.note(Weight::Note, line));
    write_report(&disk, folder, name, &files(&report)?)?;
    let charts: Vec<_> = of.chart.into_iter().collect();
    write_charts(&disk, folder, &charts)?;
    say(&format!("\nFiles in {}: {name}.html, .csv, .json, .md, .svg", folder.printable()));
    Ok(())
}

fn say_beside(of: &Beside) {
    say(&format!("\n{}\n{}", of.title, of.table.fitted(line_width())));
    of.lines.iter().for_each(|line| say(line));
}

fn panel_of(of: &Beside) -> Panel {
    Panel::new(of.id, of.title, "", &of.definition, Body::Table(of.table.clone()))
}

/// The conclusions from the rows, a line for each scene.
pub fn verdicts(outcome: &Outcome) -> Vec<String> {
    let verdict = |rows: &[Row]| {
        let [base, others @ ..] = rows else { return None };
        let mut pays = Vec::new();
        let (mut costs, mut none) = (Vec::new(), Vec::new());
        for row in others {
            let Some(effect) = row.effect else { continue };
            match (effect.is_none(), effect.ratio > 1.0) {
                (true, _) => none.push(row),
                (false, true) => pays.push(row),
                (false, false) => costs.push(row),
            }
        }
        let ratio = |row: &Row| row.effect.map_or(1.0, |effect| effect.ratio);
        pays.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
        costs.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
        let named = |what: &str, rows: Vec<&Row>| {
            let words = rows
                .iter()
                .filter_map(|row| Some(format!("{} {}", row.variant, row.effect?.words())));
            let words: Vec<String> = words.collect();
            (!words.is_empty()).then(|| format!("{what} {}", words.join(", ")))
        };
        let parts = [named("pays:", pays), named("costs:", costs), named("no difference:", none)];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let scene = if base.scene.is_empty() { String::new() } else { format!("{}: ", base.scene) };
        (!parts.is_empty()).then(|| format!("{scene}beside {}, {}", base.variant, parts.join("; ")))
    };
    outcome.scenes().filter_map(verdict).collect()
}

/// The chart: lines over the scenes if these have numbers, otherwise bars.
fn chart(experiment: &Experiment, outcome: &Outcome) -> Option<Picture> {
    let subtitle =
        format!("{}, {}; {}", outcome.machine, outcome.date, plural(outcome.rounds, "round"));
    let of = |row: &Row| row.figures.get(FIGURE).copied();
    if !outcome.rows.iter().any(|row| of(row).is_some_and(|spread| spread.median > 0.0)) {
        return None;
    }
    let has_numbers = outcome.rows.iter().all(|row| row.at.is_some());
    let is_line = has_numbers && outcome.scenes().count() > 2;
    if let Some(label) = experiment.scene_label.filter(|_| is_line) {
        let mut series: Vec<Series> = Vec::new();
        for row in outcome.rows.iter().filter(|row| !row.is_base) {
            let (Some(at), Some(effect)) = (row.at, row.effect) else { continue };
            if !series.iter().any(|line| line.name == row.variant) {
                let look = series.len();
                series.push(Series::line(row.variant.clone(), []).look(look));
            }
            for line in series.iter_mut().filter(|line| line.name == row.variant) {
                line.points.push((at, effect.ratio));
                line.intervals.push((at, effect.low, effect.high));
            }
        }
        if !series.is_empty() {
            let title = format!("{}: what each variant brings", experiment.name);
            let axes = [Axis::linear(label, ""), Axis::linear("throughput, to the base", "")];
            return Some(Picture::lines(title, subtitle, axes, series));
        }
    }
    let bars = |rows: &[Row]| {
        let mut bars: Vec<Bar> = bars(rows).filter(|bar| !bar.segments.is_empty()).collect();
        if let Some(first) = bars.first_mut() {
            first.heading.clone_from(&rows[0].scene);
        }
        bars
    };
    let rows = outcome.scenes().flat_map(bars);
    Some(Picture {
        title: format!("{}: {}", experiment.name, experiment.about),
        subtitle: format!(
            "{subtitle}; samples/s, the ratio to the base, and from the slowest to the fastest round"
        ),
        chart: Chart::Rows(Rows::new(Shown::Bars, "", rows)),
    })
}

/// The throughput of each variant as a bar.
fn bars(rows: &[Row]) -> impl Iterator<Item = Bar> {
    rows.iter().filter(|row| row.is_timed).enumerate().map(|(place, row)| {
        let color = Color::Series(place);
        let Some(of) = row.figures.get(FIGURE) else { return Bar::bar(&row.variant, None, color) };
        let effect = row.effect.map_or(String::new(), |effect| format!(", {}", effect.words()));
        let words = format!("{:.0}{effect}", of.median);
        let bar = Bar::bar(&row.variant, Some(of.median), color).interval(of.min, of.max);
        Bar { words, ..bar }
    })
}

/// The page.
fn report(experiment: &Experiment, outcome: &Outcome, beside: &[Beside]) -> Report {
    let bars = |(at, rows): (usize, &[Row])| {
        let title = if rows[0].scene.is_empty() { "Throughput" } else { &rows[0].scene };
        let definition = "Samples of the measured steps of all ranks, divided by the time of these steps with the wait for \
            their data; medians over the rounds, from the slowest to the fastest one.";
        let body = Body::bars("samples/s", self::bars(rows)).or("no run has finished");
        Panel::new(&format!("scene_{at}"), title, "samples/s", definition, body).wide(Width::Half)
    };
    let mut panels: Vec<Panel> = outcome.scenes().enumerate().map(bars).collect();
    let table = outcome.table_of(&outcome.rows, experiment.figures);
    let definition = "Medians over the rounds. The effect compares throughput round by round.";
    let body = Body::Table(table).or("nothing was run");
    panels.push(Panel::new("variants", "All variants", "", definition, body));
    let mut sections = vec![Section::new("runs", "Runs", experiment.question, panels)];
    if !beside.is_empty() {
        let panels = beside.iter().map(panel_of).collect();
        let lead = "What was measured or computed beside them.";
        sections.push(Section::new("beside", "Beside the runs", lead, panels));
    }
    let mut report = Report {
        title: format!("Lab: {}", experiment.name),
        subtitle: format!(
            "{}, {}; {}; {}",
            outcome.machine,
            outcome.date,
            plural(outcome.rounds, "round"),
            outcome.command
        ),
        sections,
        csv_table: "variants".to_owned(),
        ..Report::default()
    };
    let lines = verdicts(outcome).into_iter().chain(beside.iter().flat_map(|of| of.lines.clone()));
    lines.for_each(|line| report.note(Weight::Note, line));
    for row in &outcome.rows {
        if let Some(failure) = &row.failure {
            let text = format!("failed: {} {}: {failure}", row.scene, row.variant);
            report.note(Weight::Warning, text);
        }
    }
    report
}
