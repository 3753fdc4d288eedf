//! Shows the result of `paceline sweep`: a table of the cases in the order of their ranking, files, a chart
//! and a page.

mod effects;
mod page;

use std::path::Path;

use paceline_analysis::report;
use paceline_failure::outputs::{write_bytes, write_charts, write_json};
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_observe::figures::figure::{Better, Figure};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::TABLE;
use paceline_table::chart::{Axis, Picture, Series};
use paceline_table::table::{Cell, Column, Columns, Head, Table};
use serde::Serialize;

use self::effects::{Effect, effects};
use crate::ledger::Ledger;
use crate::plan::{Case, Vary};
use crate::rank::{self, Spread};
use crate::step::STEP_TIMES;
use crate::study::spread_of;

/// The figures that sweeps report, in the order of the table of figures.
fn figures() -> impl Iterator<Item = &'static Figure> {
    TABLE.iter().filter(|figure| figure.swept.is_some())
}

/// The figure by which cases are ranked.
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

/// A case and its results.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    values: Vec<String>,
    /// Its place in the ranking; `None` if it has failed.
    place: Option<usize>,
    /// How far its median is from the best one, in percent; `None` if the difference is noise.
    difference_pct: Option<f64>,
    /// How it compares with the best case, in words.
    #[serde(skip)]
    verdict: String,
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
    effects: Vec<Effect>,
    /// The stated settings of all cases.
    #[serde(skip)]
    settings: Vec<(String, String)>,
    #[serde(skip)]
    ranking: RankedBy,
}

impl Report {
    /// Ranks `cases`, whose runs share these settings.
    pub fn new(
        vary: &[Vary],
        cases: &[Case],
        rounds: usize,
        ranking: RankedBy,
        ledger: &Ledger,
        settings: Vec<(String, String)>,
    ) -> Self {
        let RankedBy { figure, better } = ranking;
        let found: Vec<_> = (0..cases.len()).map(|case| ledger.of_case(case)).collect();
        let of_case = |(summaries, failure): &(Vec<RunSummary>, Option<&str>)| {
            failure.is_none().then(|| spread_of(summaries, figure.name)).flatten()
        };
        let spreads: Vec<Option<Spread>> = found.iter().map(of_case).collect();
        let (places, order) = (rank::places(&spreads, better), rank::order(&spreads, better));
        let best = order.first().and_then(|best| spreads[*best]);
        let row = |(at, case): (usize, usize)| {
            let (summaries, failure) = &found[case];
            let differs = spreads[case].zip(best).filter(|(of, best)| of.differs_from(best));
            let difference_pct = differs.map(|(of, best)| 100.0 * (of.median / best.median - 1.0));
            let verdict = match (places[case], difference_pct) {
                _ if failure.is_some() => "failed".to_owned(),
                (None, _) => "not measured".to_owned(),
                (Some(_), Some(pct)) => format!("{pct:+.1} %"),
                (Some(_), None) if at == 0 => "best".to_owned(),
                (Some(_), None) => "no difference".to_owned(),
            };
            Row {
                name: cases[case].name.clone(),
                values: cases[case].values.clone(),
                place: places[case],
                difference_pct,
                verdict,
                failure: failure.map(str::to_owned),
                figures: figures().map(|figure| spread_of(summaries, figure.name)).collect(),
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
            rows: order.into_iter().enumerate().map(row).collect(),
            effects: effects(vary, cases, &spreads),
            settings,
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

    /// All columns. People see the medians, and the range of the figure that ranks the cases. Files have the spread of
    /// every figure.
    fn table(&self) -> Table {
        let (ranked, head) = (self.ranked_at(), self.ranking.figure.head());
        let mut columns = Columns::new().add("place", "place", ("", 0), "", |row: &Row| row.place);
        for (at, key) in self.keys.iter().enumerate() {
            let head = Head::plain(key.clone());
            columns.0.push(Column::new(head, move |row: &Row| row.values[at].clone()));
        }
        let median = |at: usize| move |row: &Row| row.figures[at].map(|of| of.median);
        columns.0.push(Column::new(Head { key: "".into(), ..head.clone() }, median(ranked)));
        columns = columns
            .add("", "min to max", ("", 0), "", move |row| {
                let shown = |value| Cell::Number(value).shown(&head);
                let of = row.figures[ranked];
                of.map_or(String::new(), |of| format!("{} to {}", shown(of.min), shown(of.max)))
            })
            .add("to_the_best", "to the best", ("", 0), "", |row| row.verdict.clone())
            .add("failure", "", ("", 0), "", |row| row.failure.clone());
        for (at, figure) in figures().enumerate() {
            let name = figure.name;
            let is_shown = at != ranked && self.rows.iter().any(|row| row.figures[at].is_some());
            let label = if is_shown { figure.label } else { "" };
            let head =
                Head { key: format!("{name}_median").into(), label: label.into(), ..figure.head() };
            columns.0.push(Column::new(head, median(at)));
            columns = columns
                .add(format!("{name}_min"), "", ("", 0), "", move |row| {
                    row.figures[at].map(|of| of.min)
                })
                .add(format!("{name}_max"), "", ("", 0), "", move |row| {
                    row.figures[at].map(|of| of.max)
                });
        }
        columns.table(&self.rows)
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

    /// Writes all files into `folder`.
    pub fn write(&self, disk: &Disk, folder: &Path) -> Result<()> {
        write_json(disk, &folder.join("sweep.json"), self)?;
        write_bytes(disk, &folder.join("sweep.csv"), self.table().csv().as_bytes())?;
        let files = report::files(&page::page(self))?;
        for (_, page) in files.iter().filter(|(ending, _)| *ending == "html") {
            write_bytes(disk, &folder.join("sweep.html"), page.as_bytes())?;
        }
        // If no run has finished, there is nothing to draw, and the table says so.
        if self.rows.iter().any(|row| row.place.is_some()) {
            write_charts(disk, folder, &[("sweep".to_owned(), self.chart())])?;
        }
        Ok(())
    }

    /// The chart of the figure that ranks the cases. Its x-axis is the first key whose values are
    /// numbers, with a line for each combination of the other keys. If no key has numbers, the cases
    /// stand side by side. Each point has its range.
    fn chart(&self) -> Picture {
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
            Series::line(name, medians).intervals(points.iter().map(range)).look(look)
        });
        let unit = if self.ranking.figure.unit == "ms" { "us" } else { "" };
        let label = match self.ranking.figure.unit {
            "ms" => self.ranking.figure.label.to_owned(),
            _ => self.ranking.figure.head().words(),
        };
        let x = axis.map_or("cases, in the order of their places", |at| &self.keys[at]);
        Picture::lines(
            format!("{} by {}", self.ranking.figure.label, self.keys.join(", ")),
            format!(
                "{}, {}; medians and ranges of {} rounds",
                self.machine, self.date, self.rounds
            ),
            [Axis::linear(x, ""), Axis::linear(label, unit)],
            series.collect(),
        )
    }
}

/// The rule for when cases differ, and the consequences for their places, in words.
fn rule(rounds: usize) -> String {
    if rounds < rank::MIN_ROUNDS {
        rank::rule(rounds)
    } else {
        format!(
            "{} A place is one after as many cases as are better by that rule.",
            rank::rule(rounds)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_medians_and_files_have_every_spread() {
        let row = |name: &str, step_ms: Option<f64>, place: Option<usize>, verdict: &str| {
            let run =
                |ms: f64| -> RunSummary { serde_json::json!({ "step_ms_median": ms }).into() };
            let rounds: Vec<RunSummary> =
                step_ms.iter().flat_map(|ms| [ms - 1.0, *ms, ms + 2.0]).map(run).collect();
            Row {
                name: format!("strategy={name}"),
                values: vec![name.to_owned()],
                place,
                difference_pct: None,
                verdict: verdict.to_owned(),
                failure: place.is_none().then(|| "it ended early".to_owned()),
                figures: figures().map(|figure| spread_of(&rounds, figure.name)).collect(),
            }
        };
        let ranking = ranked_by("step_ms_median").unwrap();
        let rows = vec![row("ddp", Some(20.0), Some(1), "best"), row("bf16", None, None, "failed")];
        let report = Report {
            machine: "a machine".to_owned(),
            date: String::new(),
            command: String::new(),
            rounds: 3,
            ranked_by: "step_ms_median",
            rule: "The rule.".to_owned(),
            keys: vec!["strategy".to_owned()],
            rows,
            effects: Vec::new(),
            settings: Vec::new(),
            ranking,
        };
        insta::assert_snapshot!(report.text(None), @r"
        Sweep of strategy: 2 cases, 3 rounds; medians over the rounds
        a machine
        place  strategy  median step ms  min to max      to the best
        -----  --------  --------------  --------------  -----------
            1  ddp                20.00  19.00 to 22.00  best
            –  bf16                   –                  failed
        median step: median over the steps, each as long as on its slowest rank; other times of a step: means over ranks and steps
        Ranked by median step ms, less is better. The rule.
        failed: strategy=bf16: it ended early
        ");
        let page = report::files(&page::page(&report)).unwrap();
        let html = &page.iter().find(|(ending, _)| *ending == "html").unwrap().1;
        for shown in
            ["Sweep of strategy", "strategy=bf16 has failed: it ended early", "19.00 to 22.00"]
        {
            assert!(html.contains(shown), "{shown}");
        }
        let csv = report.table().csv();
        assert!(csv.starts_with("place,strategy,to_the_best,failure,train_loss_median,"), "{csv}");
        assert!(csv.contains("\n1,ddp,best,,") && csv.contains(",20,19,22,"), "{csv}");
        assert!(csv.contains("\n,bf16,failed,it ended early,,"), "{csv}");
    }
}
