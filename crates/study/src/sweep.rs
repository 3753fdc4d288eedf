//! `paceline sweep`: every combination of some settings, ranked by a figure.

pub mod args;

use std::time::Duration;

use paceline_failure::outputs::check_folder;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{line_width, plural, say};
use paceline_launch::environment::Placement;
use paceline_observe::figures::figure::{Better, Compared, Figure};
use paceline_observe::figures::table::TABLE;
use paceline_table::chart::{Axis, Picture, Series};

use self::args::SweepArgs;
use crate::cases::{self, Vary};
use crate::grid;
use crate::ledger::Ledger;
use crate::noise::Spread;
use crate::outcome::{Outcome, Row};
use crate::report::{Report, head};
use crate::study::warn_of;
use crate::{execute, refuse_ranks, scene, spec};

/// The figures that sweeps report, in the order of the table of figures.
fn figures() -> impl Iterator<Item = (&'static Figure, Better)> {
    TABLE.iter().filter_map(|figure| Some((figure, figure.swept?)))
}

/// The figure of this name, by which cases are ranked. Fails if sweeps have no such figure.
fn ranked_by(name: &str) -> Result<(&'static Figure, Better)> {
    figures().find(|(figure, _)| figure.name == name).ok_or_else(|| {
        let names: Vec<&str> = figures().map(|(figure, _)| figure.name).collect();
        Failure::Usage(format!("--rank-by {name}: pass one of {}", names.join(", ")))
    })
}

/// Runs `paceline sweep`.
pub fn sweep(args: &SweepArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a sweep", placement)?;
    let limit = Duration::from_secs_f64(args.run_limit);
    let (figure, better) = ranked_by(&args.rank_by)?;
    let vary =
        args.vary.iter().map(|text| Vary::parse("--vary", text)).collect::<Result<Vec<_>>>()?;
    let scenes = [cases::combinations(&args.train.0, &vary, args.one_at_a_time)?];
    let (cases, of_variants) = scene::cases(&scenes)?;
    check_folder("--output", &args.output, "pass a folder that you can write to")?;
    let varied = vary.iter().map(Vary::text).collect::<Vec<_>>().join(" --vary ");
    let shared = spec::settings(&args.train.0);
    let alone = args.one_at_a_time.then(|| ("--one-at-a-time".to_owned(), String::new()));
    let settings = [("--vary".to_owned(), varied)].into_iter().chain(alone).chain(shared);
    let limits = (args.rounds, args.run_limit);
    let mut ledger = Ledger::of_runs(&args.output, &cases, limits, settings)?;
    warn_of(&cases);
    execute::make(&cases, cases::order(cases.len(), args.rounds), limit, None, &mut ledger)?;
    let mut outcome = Outcome::new("sweep", &scenes, &of_variants, args.rounds, &ledger);
    outcome.keys = vary.iter().map(|of| of.key.clone()).collect();
    let mut found = vec![grid::effects(&vary, &outcome, figure.name)];
    if vary.len() > 1 && !args.one_at_a_time {
        found.extend(grid::interactions(&vary, &outcome, figure.name, better));
    }
    outcome.rank(figure.name, better);
    let (cases, rounds) = (plural(outcome.rows.len(), "case"), plural(args.rounds, "round"));
    let keys = outcome.keys.join(", ");
    let is_better = if better == Better::Higher { "more" } else { "less" };
    let mut columns: Vec<&Figure> = figures().map(|(figure, _)| figure).collect();
    columns.sort_by_key(|figure| figure.compared != Compared::First);
    let mut report = Report {
        title: format!("Sweep of {keys}: {cases}, {rounds}; medians over the rounds"),
        question: "Which case is best, and by how much?".to_owned(),
        notes: vec![
            outcome.origin.machine.clone(),
            format!("Ranked by {}: {is_better} is better", figure.head().words()),
        ],
        columns: columns.into_iter().map(|figure| figure.name).collect(),
        found,
        charts: chart(&outcome).map(|of| ("sweep".to_owned(), of)).into_iter().collect(),
        outcome,
        ..Report::default()
    };
    report.write(&args.output, "sweep", "sweep.json")?;
    say(&report.text(line_width()));
    say(&format!(
        "Files: {0}/sweep.html, .csv, .json, .md, .svg; run folders: {0}/runs",
        args.output.printable()
    ));
    Ok(u8::from(report.outcome.has_failures()))
}

/// The chart of the figure that ranks the cases, unless no run has it. Its x-axis is the first key whose values are
/// numbers, with a line for each combination of the other keys; each point has its range. If no key has numbers, the cases
/// are bars, in the order of their places.
fn chart(of: &Outcome) -> Option<Picture> {
    let figure = head(&of.compared_by);
    let (factor, unit) = if figure.unit == "ms" { (1e3, "us") } else { (1.0, "") };
    let number = |row: &Row, at: usize| row.values.get(at)?.parse::<f64>().ok();
    let has_numbers = |at: &usize| of.rows.iter().all(|row| number(row, *at).is_some());
    let title = format!("{} by {}", figure.label, of.keys.join(", "));
    let Some(axis) = (0..of.keys.len()).find(has_numbers) else { return of.picture(title) };
    let mut lines: Vec<(String, Vec<(f64, Spread)>)> = Vec::new();
    for row in of.rows.iter().filter(|row| row.place.is_some()) {
        let (Some(spread), Some(x)) = (row.figures.get(&of.compared_by), number(row, axis)) else {
            continue;
        };
        let others = of.keys.iter().zip(&row.values).enumerate();
        let others = others.filter(|(at, _)| *at != axis);
        let others: Vec<String> =
            others.map(|(_, (key, value))| format!("{key}={value}")).collect();
        let name = if others.is_empty() { figure.label.to_string() } else { others.join(", ") };
        match lines.iter_mut().find(|(other, _)| *other == name) {
            Some((_, points)) => points.push((x, *spread)),
            None => lines.push((name, vec![(x, *spread)])),
        }
    }
    let series = lines.into_iter().enumerate().map(|(look, (name, mut points))| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let range = |(x, of): &(f64, Spread)| (*x, of.min * factor, of.max * factor);
        let medians = points.iter().map(|(x, of)| (*x, of.median * factor));
        Series::line(name, medians).intervals(points.iter().map(range)).look(look)
    });
    let series: Vec<Series> = series.collect();
    let rounds = plural(of.origin.rounds, "round");
    (!series.is_empty()).then(|| {
        Picture::lines(
            title,
            format!("{}; medians and ranges of {rounds}", of.origin.place()),
            [Axis::linear(&*of.keys[axis], ""), Axis::linear(figure.label, unit)],
            series,
        )
    })
}
