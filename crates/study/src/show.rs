//! Shows the result of `paceline sweep`: a table of the cases in the order of their ranking, files, and a
//! chart.

use std::path::Path;

use paceline_failure::outputs::{write_bytes, write_charts, write_json};
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_observe::figures::figure::{Better, Figure};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::TABLE;
use paceline_table::plot::{Axis, LineChart, Series, Unit};
use paceline_table::table::{Cell, Head, Table};
use serde::Serialize;

use crate::ledger::Ledger;
use crate::plan::{Case, Vary};
use crate::rank::{self, Spread};
use crate::step::STEP_TIMES;

/// The figures that sweeps report, in the order of the table of figures.
fn figures() -> impl Iterator<Item = &'static Figure> {
    TABLE.iter().filter(|figure| figure.swept.is_some())
}

/// What cases are ranked by.
#[derive(Clone, Copy, Debug)]
pub struct RankedBy {
    figure: &'static Figure,
    better: Better,
}

/// A ranking by the figure of this name.
///
/// # Errors
///
/// If sweeps have no such figure.
pub fn ranked_by(name: &str) -> Result<RankedBy> {
    let named = figures().filter(|figure| figure.name == name);
    named.filter_map(|figure| Some(RankedBy { figure, better: figure.swept? })).next().ok_or_else(
        || {
            let names: Vec<&str> = figures().map(|figure| figure.name).collect();
            Failure::Usage(format!("--rank-by {name}: pass one of {}", names.join(", ")))
        },
    )
}

fn spread(figure: &Figure, rounds: &[RunSummary]) -> Option<Spread> {
    Spread::of(rounds.iter().map(|run| run.number(figure.name)))
}

/// A case and its results.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    values: Vec<String>,
    /// Its place in the ranking; `None` if it has failed.
    place: Option<usize>,
    /// How far its median is from the best one, in percent; `None` if the difference is noise.
    difference_pct: Option<f64>,
    /// The message of the run that failed.
    failure: Option<String>,
    /// The spread of each figure over the rounds, in the order of [`figures`].
    #[serde(serialize_with = "by_name")]
    figures: Vec<Option<Spread>>,
}

fn by_name<S: serde::Serializer>(
    figures: &[Option<Spread>],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_map(self::figures().map(|figure| figure.name).zip(figures))
}

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    machine: String,
    date: String,
    command: String,
    rounds: usize,
    ranked_by: &'static str,
    rule: String,
    keys: Vec<String>,
    rows: Vec<Row>,
    #[serde(skip)]
    ranking: RankedBy,
}

impl Report {
    /// Ranks `cases`.
    pub fn new(
        vary: &[Vary],
        cases: &[Case],
        rounds: usize,
        ranking: RankedBy,
        ledger: &Ledger,
    ) -> Self {
        let RankedBy { figure, better } = ranking;
        let found: Vec<_> = (0..cases.len()).map(|case| ledger.of_case(case)).collect();
        let of_case = |(summaries, failure): &(Vec<RunSummary>, Option<&str>)| {
            failure.is_none().then(|| spread(figure, summaries)).flatten()
        };
        let spreads: Vec<Option<Spread>> = found.iter().map(of_case).collect();
        let (places, order) = (rank::places(&spreads, better), rank::order(&spreads, better));
        let best = order.first().and_then(|best| spreads[*best]);
        let row = |case: usize| {
            let (summaries, failure) = &found[case];
            let differs = spreads[case].zip(best).filter(|(of, best)| of.differs_from(best));
            Row {
                name: cases[case].name.clone(),
                values: cases[case].values.clone(),
                place: places[case],
                difference_pct: differs.map(|(of, best)| 100.0 * (of.median / best.median - 1.0)),
                failure: failure.map(str::to_owned),
                figures: figures().map(|figure| spread(figure, summaries)).collect(),
            }
        };
        Self {
            machine: resources::machine(),
            date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
            command: crate::command_line(),
            rounds,
            ranked_by: figure.name,
            rule: rule(rounds),
            keys: vary.iter().map(|of| of.key.clone()).collect(),
            rows: order.into_iter().map(row).collect(),
            ranking,
        }
    }

    /// Whether a case has failed.
    pub fn has_failures(&self) -> bool {
        self.rows.iter().any(|row| row.failure.is_some())
    }

    fn ranked_at(&self) -> usize {
        figures().position(|figure| figure.name == self.ranked_by).unwrap_or(0)
    }

    /// How a case compares with the best one, in words.
    fn verdict(&self, at: usize, row: &Row) -> String {
        match (row.place, row.difference_pct) {
            _ if row.failure.is_some() => "failed".into(),
            (None, _) => "not measured".into(),
            (Some(_), Some(pct)) => format!("{pct:+.1} %"),
            (Some(_), None) if at == 0 => "best".into(),
            (Some(_), None) => "no difference".into(),
        }
    }

    /// The table for the console.
    fn table(&self) -> Table {
        let ranked = self.ranked_at();
        let is_shown =
            |at: &usize| *at != ranked && self.rows.iter().any(|r| r.figures[*at].is_some());
        let all: Vec<&Figure> = figures().collect();
        let others: Vec<usize> = (0..all.len()).filter(is_shown).collect();
        let mut columns = vec![Head::plain("place")];
        columns.extend(self.keys.iter().cloned().map(Head::plain));
        columns.extend([
            self.ranking.figure.head(),
            Head::plain("min to max"),
            Head::plain("to the best"),
        ]);
        columns.extend(others.iter().map(|at| all[*at].head()));
        let row = |(at, row): (usize, &Row)| {
            let spread = row.figures[ranked];
            let head = self.ranking.figure.head();
            let shown = |value| Cell::Number(value).shown(&head);
            let range = spread
                .map_or(String::new(), |of| format!("{} to {}", shown(of.min), shown(of.max)));
            let median = |of: Option<Spread>| Cell::from(of.map(|of| of.median));
            let mut cells =
                vec![row.place.map_or(Cell::Missing, |place| Cell::Whole(place as u64))];
            cells.extend(row.values.iter().map(|value| Cell::Text(value.clone())));
            cells.extend([median(spread), Cell::Text(range), Cell::Text(self.verdict(at, row))]);
            cells.extend(others.iter().map(|at| median(row.figures[*at])));
            cells
        };
        Table { columns, rows: self.rows.iter().enumerate().map(row).collect(), mean: None }
    }

    /// Everything that is printed. The table fits `width`.
    pub fn text(&self, width: Option<usize>) -> String {
        let failures = self
            .rows
            .iter()
            .filter_map(|row| Some(format!("\nfailed: {}: {}", row.name, row.failure.as_ref()?)));
        format!(
            "Sweep of {}: {} cases, {} rounds; medians over the rounds\n{}\n{}\n{STEP_TIMES}\nRanked by {}, {} is better. {}{}",
            self.keys.join(", "),
            self.rows.len(),
            self.rounds,
            self.machine,
            self.table().fitted(width),
            self.ranking.figure.head().words(),
            if self.ranking.better == Better::Higher { "more" } else { "less" },
            self.rule,
            failures.collect::<String>()
        )
    }

    /// Every figure with its spread.
    fn csv(&self) -> String {
        let mut keys = vec!["place".to_owned()];
        keys.extend(self.keys.iter().cloned());
        keys.extend(["to_the_best", "failure"].map(str::to_owned));
        for figure in figures() {
            keys.extend(["median", "min", "max"].map(|of| format!("{}_{of}", figure.name)));
        }
        let row = |(at, row): (usize, &Row)| {
            let mut cells = vec![row.place.map_or(Cell::Missing, |at| Cell::Whole(at as u64))];
            cells.extend(row.values.iter().map(|value| Cell::Text(value.clone())));
            cells.push(Cell::Text(self.verdict(at, row)));
            cells.push(row.failure.clone().map_or(Cell::Missing, Cell::Text));
            for of in &row.figures {
                let parts = [of.map(|of| of.median), of.map(|of| of.min), of.map(|of| of.max)];
                cells.extend(parts.map(Cell::from));
            }
            cells
        };
        let columns = keys.into_iter().map(Head::plain).collect();
        Table { columns, rows: self.rows.iter().enumerate().map(row).collect(), mean: None }.csv()
    }

    /// Writes all files into `folder`.
    pub fn write(&self, disk: &Disk, folder: &Path) -> Result<()> {
        write_json(disk, &folder.join("sweep.json"), self)?;
        write_bytes(disk, &folder.join("sweep.csv"), self.csv().as_bytes())?;
        // If no run has finished, there is nothing to draw, and the table says so.
        if self.rows.iter().any(|row| row.place.is_some()) {
            write_charts(disk, folder, &[("sweep".to_owned(), self.chart())])?;
        }
        Ok(())
    }

    /// The chart of the figure that ranks the cases. Its x-axis is the first key whose values are
    /// numbers, with a line for each combination of the other keys. If no key has numbers, the cases
    /// stand side by side. Each point has its range.
    fn chart(&self) -> LineChart {
        let (ranked, factor) =
            (self.ranked_at(), if self.ranking.figure.unit == "ms" { 1e3 } else { 1.0 });
        let number = |row: &Row, at: usize| row.values.get(at)?.parse::<f64>().ok();
        let all_numbers = |at: &usize| self.rows.iter().all(|row| number(row, *at).is_some());
        let axis = (0..self.keys.len()).find(all_numbers);
        let mut lines: Vec<(String, Vec<(f64, Spread)>)> = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let Some(spread) = row.figures[ranked].filter(|_| row.failure.is_none()) else {
                continue;
            };
            let named = |(key, value): (&String, &String)| format!("{key}={value}");
            let others = self.keys.iter().zip(&row.values).enumerate();
            let others: Vec<String> =
                others.filter(|(at, _)| Some(*at) != axis).map(|(_, of)| named(of)).collect();
            let name = if others.is_empty() {
                self.ranking.figure.label.into()
            } else {
                others.join(", ")
            };
            let x = axis.and_then(|axis| number(row, axis)).unwrap_or((at + 1) as f64);
            match lines.iter_mut().find(|(other, _)| *other == name) {
                Some((_, points)) => points.push((x, spread)),
                None => lines.push((name, vec![(x, spread)])),
            }
        }
        let series = lines.into_iter().enumerate().map(|(look, (name, mut points))| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let range = |(x, of): &(f64, Spread)| (*x, of.min * factor, of.max * factor);
            let medians = points.iter().map(|(x, of)| (*x, of.median * factor));
            Series::line(name, medians).ranges(points.iter().map(range)).look(look)
        });
        let unit = if self.ranking.figure.unit == "ms" { Unit::Microseconds } else { Unit::Count };
        let label = match self.ranking.figure.unit {
            "ms" => self.ranking.figure.label.to_owned(),
            _ => self.ranking.figure.head().words(),
        };
        LineChart {
            title: format!("{} by {}", self.ranking.figure.label, self.keys.join(", ")),
            subtitle: format!(
                "{}, {}; medians and ranges of {} rounds",
                self.machine, self.date, self.rounds
            ),
            x: Axis::linear(
                axis.map_or("cases, in the order of their places", |at| &self.keys[at]),
                Unit::Count,
            ),
            y: Axis::linear(label, unit),
            series: series.collect(),
        }
    }
}

/// The rule for when cases differ, and what follows for their places, in words.
fn rule(rounds: usize) -> String {
    match rounds < rank::MIN_ROUNDS {
        true => rank::rule(rounds),
        false => format!(
            "{} A place is one after as many cases as are better by that rule.",
            rank::rule(rounds)
        ),
    }
}
