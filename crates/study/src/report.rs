//! The one report of all studies: lines for the console, a page, JSON, CSV and charts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use paceline_analysis::report::{self, Body, Panel, Report as Page, Section, Weight, Width};
use paceline_failure::Result;
use paceline_failure::outputs::{write_charts, write_json, write_report};
use paceline_host::disk::Disk;
use paceline_host::text::plural;
use paceline_observe::figures::table::find;
use paceline_table::chart::{Chart as Marks, Color, Picture, Row as Bar, Rows, Shown};
use paceline_table::stats::noise_words;
use paceline_table::table::{Cell, Column, Columns, Head, Table};
use serde::Serialize;

use crate::noise;
use crate::outcome::{Outcome, Row};
use crate::study::Setting;

/// The definition of the figures of the user's own programs.
const PROGRAMS: &str = "throughput: what the program prints, samples if it takes {batch}, otherwise batches of a rank; median step: \
                        of the slowest rank, over ten stretches of the steps after the first quarter, with the wait for data";

/// A chart with the name of its file.
pub type Chart = (String, Picture);

/// The results of a study.
#[derive(Default)]
pub struct Report {
    /// Its title.
    pub title: String,
    /// The question that it answers.
    pub question: String,
    /// Lines below the title: where and how the runs were made.
    pub notes: Vec<String>,
    /// The rows.
    pub outcome: Outcome,
    /// The figures that people see beside the compared one; files have all.
    pub columns: Vec<&'static str>,
    /// The workload, where all runs share it.
    pub setting: Option<Setting>,
    /// Further results.
    pub found: Vec<Found>,
    /// The charts of the rows.
    pub charts: Vec<Chart>,
    /// Whether the console has all columns.
    pub has_all: bool,
}

/// The most rows of a further table that are printed.
const MOST_ROWS: usize = 20;

/// A further table, its conclusions and its chart.
#[derive(Default)]
pub struct Found {
    /// Its name in files.
    pub id: &'static str,
    /// Its title.
    pub title: &'static str,
    /// The contents, and how they were found.
    pub definition: String,
    /// The rows; none if there are conclusions only.
    pub table: Table,
    /// Lines with the conclusions.
    pub lines: Vec<String>,
    /// The chart.
    pub chart: Option<Chart>,
}

impl Found {
    /// A result without conclusions and without a chart.
    pub fn new(
        id: &'static str,
        title: &'static str,
        definition: impl Into<String>,
        table: Table,
    ) -> Self {
        Self { id, title, definition: definition.into(), table, ..Self::default() }
    }

    fn panels(&self) -> impl Iterator<Item = Panel> {
        let panel = |id: &str, body| Panel::new(id, self.title, "", &self.definition, body);
        let table = Some(&self.table).filter(|table| !table.rows.is_empty());
        let table = table.map(|table| panel(self.id, Body::Table(table.clone())));
        let chart = self.chart.iter();
        chart.map(move |(id, of)| panel(id, Body::Chart(of.chart.clone()))).chain(table)
    }

    fn text(&self, width: Option<usize>) -> String {
        let table = match self.table.rows.len() {
            0 => None,
            1..=MOST_ROWS => Some(format!("\n{}\n{}", self.title, self.table.fitted(width))),
            rows => Some(format!("\n{}: {rows} rows, in the page and the files", self.title)),
        };
        table.into_iter().chain(self.lines.clone()).collect::<Vec<_>>().join("\n")
    }
}

impl Report {
    /// Everything that is printed: the answer, then a table of what differs. Tables fit `width`.
    pub fn text(&self, width: Option<usize>) -> String {
        let of = &self.outcome;
        let mut lines = of.verdicts();
        lines.extend(noise_words(of.waited_pct(), None));
        lines.push(self.title.clone());
        lines.extend(self.notes.clone());
        for rows in of.scenes() {
            let table = self.on_console(rows, width);
            let name = &rows[0].scene;
            lines.push(if name.is_empty() { table } else { format!("\n{name}\n{table}") });
        }
        if of.compared_by == "throughput" {
            lines.push(PROGRAMS.to_owned());
        }
        if of.rows.len() > 1 && of.origin.rounds > 1 {
            lines.push(format!(
                "Compared by {}. {}",
                head(&of.compared_by).words(),
                noise::rule(of.origin.rounds)
            ));
        }
        let found = self.found.iter().map(|found| found.text(width));
        lines.extend(found.filter(|text| !text.is_empty()));
        lines.extend(self.failures());
        lines.join("\n")
    }

    /// The table of these rows on a console: all columns, or what differs.
    fn on_console(&self, rows: &[Row], width: Option<usize>) -> String {
        let table = self.table(rows);
        if self.has_all {
            return table.fitted(width);
        }
        // Rows are in the order of their places, and effects have their intervals.
        let is_shown = |head: &Head| !head.label.is_empty() && head.key != "place";
        let is_single = self.outcome.origin.rounds < noise::MIN_ROUNDS;
        table.with_columns(is_shown).compact(self.outcome.keys.len().max(1), is_single, width)
    }

    fn failures(&self) -> impl Iterator<Item = String> {
        self.outcome.rows.iter().filter_map(|row| {
            let scene = if row.scene.is_empty() { "" } else { " " };
            Some(format!("failed: {}{scene}{}: {}", row.scene, row.variant, row.failure.as_ref()?))
        })
    }

    /// The table of these rows.
    pub fn table(&self, rows: &[Row]) -> Table {
        let of = &self.outcome;
        let mut columns = self.first_columns(rows);
        let all: BTreeSet<&str> =
            of.rows.iter().flat_map(|row| row.figures.keys()).map(String::as_str).collect();
        let rest = all.iter().filter(|name| !self.columns.contains(name));
        let names = self.columns.iter().filter(|name| all.contains(*name)).chain(rest);
        let label =
            |name: &str, label: &'static str| if self.columns.contains(&name) { label } else { "" };
        let same = "Whether the runs end with the weights of the base, bit for bit.";
        columns = columns.add(SAME_BITS, label(SAME_BITS, "same bits"), ("", 0), same, |row| {
            row.has_bits_of_base
        });
        for name in names.filter(|name| **name != of.compared_by) {
            columns.0.push(median_of(name, self.columns.contains(name)));
        }
        for name in all {
            let varies = |row: &Row| row.figures.get(name).is_some_and(|of| of.min < of.max);
            for is_max in [false, true].into_iter().filter(|_| of.rows.iter().any(varies)) {
                let (own, end) = (name.to_owned(), if is_max { "max" } else { "min" });
                columns = columns.add(format!("{name}_{end}"), "", ("", 0), "", move |row| {
                    row.figures.get(&own).map(|of| if is_max { of.max } else { of.min })
                });
            }
        }
        let weights = |row: &Row| row.weights.chars().take(8).collect::<String>();
        columns
            .add("weights", "", ("", 0), "Begin of the digest of the weights.", weights)
            .table(rows)
    }

    /// The names of the rows, the compared figure, and the effects.
    fn first_columns(&self, rows: &[Row]) -> Columns<Row> {
        let of = &self.outcome;
        let if_any = |is_shown: bool, label: &'static str| if is_shown { label } else { "" };
        let has_scenes = rows.iter().filter(|row| row.is_base).count() > 1;
        let is_ranked = of.rows.iter().any(|row| row.place.is_some());
        let has_rounds = of.origin.rounds > 1;
        let [place, scene, ratio] = [
            "One plus the number of cases that are better by more than noise.",
            "Where variants are compared.",
            "The ratio in the same round: the geometric mean over the rounds, and its 95 % interval. None: the interval contains 1.",
        ];
        let mut columns = Columns::new()
            .add("place", if_any(is_ranked, "place"), ("", 0), place, |row: &Row| row.place)
            .add("scene", if_any(has_scenes, "scene"), ("", 0), scene, |row| row.scene.clone())
            .add("variant", if_any(of.keys.is_empty(), "variant"), ("", 0), "", |row| {
                row.variant.clone()
            });
        for (at, key) in of.keys.iter().enumerate() {
            let value = move |row: &Row| row.values.get(at).cloned();
            columns.0.push(Column::new(Head::plain(key.clone()), value));
        }
        columns.0.push(median_of(&of.compared_by, true));
        let beside = if is_ranked { "to the best" } else { "to the base" };
        columns.add("effect", if_any(has_rounds, beside), ("", 0), ratio, Row::verdict).add(
            "failure",
            "",
            ("", 0),
            "Why a run failed.",
            |row| row.failure.clone(),
        )
    }

    fn page(&self) -> Page {
        let of = &self.outcome;
        let compared = head(&of.compared_by);
        let bars = |(at, rows): (usize, &[Row])| {
            let title = if rows[0].scene.is_empty() { &*compared.label } else { &rows[0].scene };
            let definition = format!("{} Medians and ranges of the rounds.", compared.definition);
            let body = Body::bars(&compared.unit, of.bars(rows)).or("no run has finished");
            Panel::new(&format!("scene_{at}"), title, &compared.unit, &definition, body)
                .wide(Width::Half)
        };
        let mut panels: Vec<Panel> = of.scenes().enumerate().map(bars).collect();
        let body = Body::Table(self.table(&of.rows)).or("nothing was run");
        let definition = "Medians over the rounds. The effect compares round by round.";
        panels.push(Panel::new("variants", "All variants", "", definition, body));
        let mut sections = vec![Section::new("runs", "Runs", &self.question, panels)];
        let panels: Vec<Panel> = self.found.iter().flat_map(Found::panels).collect();
        if !panels.is_empty() {
            let lead = "Conclusions from the runs, and measurements in addition to them.";
            sections.push(Section::new("found", "Results", lead, panels));
        }
        let place = of.origin.place();
        let mut page = Page {
            title: self.title.clone(),
            subtitle: format!(
                "{place}; {}; {}",
                plural(of.origin.rounds, "round"),
                of.origin.command
            ),
            sections,
            csv_table: "variants".to_owned(),
            ..Page::default()
        };
        self.lines().into_iter().for_each(|line| page.note(Weight::Note, line));
        self.failures().for_each(|line| page.note(Weight::Warning, line));
        page
    }

    fn lines(&self) -> Vec<String> {
        let found = self.found.iter().flat_map(|found| found.lines.clone());
        self.outcome.verdicts().into_iter().chain(found).collect()
    }

    /// The rows, the tables and the conclusions, for a JSON file.
    pub fn json(&self) -> impl Serialize {
        #[derive(Serialize)]
        struct Json<'a> {
            #[serde(flatten)]
            outcome: &'a Outcome,
            #[serde(flatten)]
            setting: &'a Option<Setting>,
            rule: String,
            lines: Vec<String>,
            tables: BTreeMap<&'a str, &'a Table>,
        }
        let tables = self.found.iter().filter(|found| !found.table.rows.is_empty());
        Json {
            outcome: &self.outcome,
            setting: &self.setting,
            rule: noise::rule(self.outcome.origin.rounds),
            lines: self.lines(),
            tables: tables.map(|found| (found.id, &found.table)).collect(),
        }
    }

    /// The charts of the rows and of all further results.
    pub fn take_charts(&mut self) -> Vec<Chart> {
        let found = self.found.iter_mut().filter_map(|found| found.chart.take());
        self.charts.drain(..).chain(found).collect()
    }

    /// Writes the page `page`, the JSON file `rows` and the charts into `folder`. Returns the names of the charts.
    pub fn write(&mut self, folder: &Path, page: &str, rows: &str) -> Result<String> {
        let disk = Disk::default();
        write_report(&disk, folder, page, &report::files(&self.page())?)?;
        let charts = self.take_charts();
        write_json(&disk, &folder.join(rows), &self.json())?;
        write_charts(&disk, folder, &charts)?;
        Ok(charts.iter().map(|(name, _)| format!("{name}.svg")).collect::<Vec<_>>().join(", "))
    }
}

/// A column of [`tabled`]: its key, its label, its unit and its decimals.
pub type Labeled = (&'static str, &'static str, (&'static str, usize));

/// A table of these cells.
pub fn tabled<const N: usize>(
    heads: [Labeled; N],
    rows: impl IntoIterator<Item = [Cell; N]>,
) -> Table {
    let columns = heads.map(|(key, label, unit)| Head::new(key, label, unit, "")).to_vec();
    Table { columns, rows: rows.into_iter().map(Vec::from).collect(), mean: None }
}

/// The column of whether runs end with the bits of the base.
pub const SAME_BITS: &str = "same_bits";

/// The column of a figure's median.
fn median_of(name: &str, is_shown: bool) -> Column<Row> {
    let (own, mut head) = (name.to_owned(), head(name));
    if !is_shown {
        head.label = "".into();
    }
    Column::new(head, move |row: &Row| row.median(&own))
}

/// Figures of a case in addition to those that a run reports.
#[rustfmt::skip]
const DERIVED: [Head; 15] = [
    Head::new("throughput", "throughput", ("/s", 1), "Of all ranks of a program together."),
    Head::new("in_backward_ms", "in backward", ("ms", 2), "The part of a step in backward passes."),
    Head::new("busy_pct", "busy", ("%", 1), "The part of the step, with the wait for its data, in which a rank computes."),
    Head::new("seconds", "time", ("s", 2), "Wall-clock time of the run, from its start to its end."),
    Head::new("num_buckets", "all-reduces", ("", 0), "All-reduces of gradients of a step."),
    Head::new("init_peak_mb", "peak: init", ("MB", 2), "The most memory of a rank at once in initialization."),
    Head::new("before_step_peak_mb", "before step", ("MB", 2), "The most memory of a rank at once in the passes."),
    Head::new("step_peak_mb", "step", ("MB", 2), "The most memory of a rank from the end of the passes to that of the step."),
    Head::new("init_mb", "after: init", ("MB", 2), "Memory of a rank in use after initialization."),
    Head::new("before_step_mb", "before step", ("MB", 2), "Memory of a rank in use before the step."),
    Head::new("after_step_mb", "step", ("MB", 2), "Memory of a rank in use after the step."),
    Head::new("speedup", "speed-up", ("", 2), "Samples per second, without the wait for data, over those of one rank."),
    Head::new("efficiency_pct", "efficiency", ("%", 1), "Speed-up per rank."),
    Head::new("t_comm_ms", "T_comm", ("ms", 2), "The step minus the ideal one."),
    Head::new("serial_pct", "serial", ("%", 1), "The serial fraction that follows from this row alone."),
];

/// The head of a figure's column.
pub fn head(name: &str) -> Head {
    if let Some(figure) = find(name) {
        return Head { key: name.to_owned().into(), ..figure.head() };
    }
    if let Some(head) = DERIVED.iter().find(|head| head.key == name) {
        return head.clone();
    }
    Head {
        key: name.to_owned().into(),
        label: name.trim_end_matches("_mb").replace('_', " ").into(),
        unit: "MB".into(),
        decimals: 2,
        definition: "The most bytes of this category in tensors of a rank, in MB of 1e6 bytes."
            .into(),
    }
}

impl Outcome {
    /// The compared figure as bars with ranges.
    fn bars(&self, rows: &[Row]) -> impl Iterator<Item = Bar> {
        rows.iter().filter(|row| row.is_timed).enumerate().map(|(place, row)| {
            let color = Color::Series(place);
            let spread = row.figures.get(&self.compared_by).filter(|_| row.failure.is_none());
            let Some(of) = spread else { return Bar::bar(&row.variant, None, color) };
            let effect = row.effect.map_or(String::new(), |effect| format!(", {}", effect.words()));
            let words =
                format!("{}{effect}", Cell::Number(of.median).shown(&head(&self.compared_by)));
            let bar = Bar::bar(&row.variant, Some(of.median), color).interval(of.min, of.max);
            Bar { words, ..bar }
        })
    }

    /// The bars of all scenes as a picture; `None` if no run has the figure.
    pub fn picture(&self, title: String) -> Option<Picture> {
        let compared = head(&self.compared_by);
        let bars = |rows: &[Row]| {
            let mut bars: Vec<Bar> = self.bars(rows).collect();
            if let Some(first) = bars.first_mut() {
                let scene = &rows[0].scene;
                let scene = if scene.is_empty() { scene.clone() } else { format!("{scene}: ") };
                first.heading = format!("{scene}{}, and the ratio to the base", compared.words());
            }
            bars
        };
        let rows = Rows::new(Shown::Bars, &compared.unit, self.scenes().flat_map(bars));
        let chart = Marks::Rows(rows);
        let rounds = plural(self.origin.rounds, "round");
        let subtitle = format!("{}; medians and ranges of {rounds}", self.origin.place());
        (!chart.is_empty()).then_some(Picture { title, subtitle, chart })
    }
}
