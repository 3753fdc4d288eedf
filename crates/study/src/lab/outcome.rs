//! The results of an experiment: a row for each variant, and the measurements beside the runs.
//!
//! Rows are kept as JSON in the folder of the experiment, so that experiments of other days and machines can be put beside each
//! other.

use std::collections::BTreeMap;

use paceline_host::resources;
use paceline_observe::figures::figure::Figure;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::{TABLE, find};
use paceline_table::chart::Picture;
use paceline_table::table::{Column, Columns, Head, Table};
use serde::{Deserialize, Serialize};

use super::effect::Effect;
use super::measure::figures;
use super::scene::Scene;
use crate::command_line;
use crate::ledger::Ledger;
use crate::rank::Spread;

/// The name of the file with the rows.
pub const FILE_NAME: &str = "lab.json";

/// An experiment that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The name of the experiment.
    pub experiment: String,
    /// The version of paceline.
    pub version: String,
    /// The machine, in words.
    pub machine: String,
    /// The date and time of the end.
    pub date: String,
    /// The command line.
    pub command: String,
    /// How many rounds were made.
    pub rounds: usize,
    /// All variants of all scenes.
    pub rows: Vec<Row>,
}

/// A variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The scene; empty if there is only one.
    pub scene: String,
    /// The number of the scene.
    pub at: Option<f64>,
    /// The variant.
    pub variant: String,
    /// Whether it is the base of its scene.
    pub is_base: bool,
    /// Whether its time means something.
    pub is_timed: bool,
    /// The effect on the throughput, compared with the base. `None` for the base, with fewer than three rounds, and if its time
    /// means nothing.
    pub effect: Option<Effect>,
    /// The figures of its runs over the rounds, by name.
    pub figures: BTreeMap<String, Spread>,
    /// Whether its runs end with the bits of the base.
    pub has_bits_of_base: bool,
    /// The digest of the weights.
    pub weights: String,
    /// The message of the run that failed.
    pub failure: Option<String>,
}

impl Row {
    /// The effect on the throughput, in words.
    pub fn verdict(&self) -> String {
        match (&self.failure, &self.effect) {
            (Some(_), _) => "failed".to_owned(),
            (None, Some(effect)) => effect.words(),
            (None, None) if self.is_base => "base".to_owned(),
            (None, None) if !self.is_timed => "numerics only".to_owned(),
            (None, None) => "too few rounds".to_owned(),
        }
    }
}

/// Something that was measured or computed beside the runs.
pub struct Beside {
    /// Its name in files.
    pub id: &'static str,
    /// Its title.
    pub title: &'static str,
    /// The contents, and how they were found.
    pub definition: String,
    /// The rows.
    pub table: Table,
    /// Lines with the conclusions.
    pub lines: Vec<String>,
    /// A chart with the name of its file.
    pub chart: Option<(String, Picture)>,
}

impl Outcome {
    /// The outcome of the runs of these scenes.
    pub fn new(experiment: &str, scenes: &[Scene], rounds: usize, ledger: &Ledger) -> Self {
        let mut rows = Vec::new();
        for scene in scenes {
            let base = rows.len();
            let at_base = figures(ledger, base);
            for variant in &scene.variants {
                let case = rows.len();
                let (runs, failure) = ledger.of_case(case);
                let weights = runs.first().map_or("", |run| run.text("weights_sha256")).to_owned();
                let of_base = ledger.of_case(base).0;
                let bits = of_base.first().map_or("", |run| run.text("weights_sha256"));
                rows.push(Row {
                    scene: scene.name.clone(),
                    at: scene.at,
                    variant: variant.name.clone(),
                    is_base: case == base,
                    is_timed: variant.is_timed,
                    effect: Effect::of(&at_base, &figures(ledger, case))
                        .filter(|_| case != base && variant.is_timed),
                    figures: spreads(&runs),
                    has_bits_of_base: !weights.is_empty() && weights == bits,
                    weights,
                    failure: failure.map(str::to_owned),
                });
            }
        }
        Self {
            experiment: experiment.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: resources::machine(),
            date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
            command: command_line(),
            rounds,
            rows,
        }
    }

    /// The rows, scene by scene.
    pub fn scenes(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|_, next| !next.is_base)
    }

    /// Whether a run has failed.
    pub fn has_failures(&self) -> bool {
        self.rows.iter().any(|row| row.failure.is_some())
    }

    /// A table of some rows.
    pub fn table_of(&self, rows: &[Row], extra: &[&str]) -> Table {
        let mut columns = Columns::new();
        let has_scenes = rows.iter().filter(|row| row.is_base).count() > 1;
        let scene = if has_scenes { "scene" } else { "" };
        columns = columns
            .add("scene", scene, ("", 0), "The setting in which the knob is turned.", |row: &Row| {
                if row.is_base { row.scene.clone() } else { String::new() }
            })
            .add("variant", "variant", ("", 0), "How the knob is set.", |row: &Row| row.variant.clone())
            .add(
                "effect",
                "to the base",
                ("", 0),
                "Samples per second over those of the base in the same round: the geometric mean over the rounds, and its \
                 95 % interval. None: the interval contains 1.",
                Row::verdict,
            );
        let shown = ["samples_per_s", "step_ms_median", "step_ms_p99", BUSY.0, "peak_mb"];
        let all = self.rows.iter().flat_map(|row| row.figures.keys());
        let all: std::collections::BTreeSet<&String> = all.collect();
        let listed = shown.iter().chain(extra).copied();
        let rest = all.iter().map(|name| name.as_str());
        let rest = rest.filter(|name| !shown.contains(name) && !extra.contains(name));
        for (name, is_shown) in
            listed.map(|name| (name, true)).chain(rest.map(|name| (name, false)))
        {
            let head = head(name);
            let label = if is_shown { head.label.clone() } else { "".into() };
            let own = name.to_owned();
            let median = move |row: &Row| row.figures.get(&own).map(|of| of.median);
            columns.0.push(Column::new(Head { label, ..head }, median));
        }
        columns = columns.add(
            "same_bits",
            "same bits",
            ("", 0),
            "Whether the runs end with the weights of the base, bit for bit.",
            |row| if row.has_bits_of_base { "yes" } else { "no" }.to_owned(),
        );
        columns.table(rows)
    }
}

/// The share of the step, with the wait for its data, in which a rank computes.
const BUSY: (&str, &str) = ("busy_pct", "busy");

/// The head of a figure's column.
fn head(name: &str) -> Head {
    if let Some(figure) = find(name) {
        return Head { key: name.to_owned().into(), ..figure.head() };
    }
    let definition = "The part of the step, with the wait for its data, in which a rank computes.";
    if name == BUSY.0 {
        Head::new(BUSY.0, BUSY.1, ("%", 1), definition)
    } else {
        Head {
            key: name.to_owned().into(),
            label: name.trim_end_matches("_mb").replace('_', " ").into(),
            unit: "MB".into(),
            decimals: 2,
            definition: "The most bytes of this category in tensors of a rank, in MB of 1e6 bytes."
                .into(),
        }
    }
}

/// All figures of the runs of a variant.
fn spreads(runs: &[RunSummary]) -> BTreeMap<String, Spread> {
    let mut all = BTreeMap::new();
    let mut add = |name: String, values: &dyn Fn(&RunSummary) -> Option<f64>| {
        if let Some(spread) = Spread::of(runs.iter().map(values)) {
            all.insert(name, spread);
        }
    };
    let is_wanted = |figure: &&Figure| figure.swept.is_some() || figure.unit == "ms";
    for figure in TABLE.iter().filter(is_wanted) {
        add(figure.name.to_owned(), &|run| run.number(figure.name));
    }
    add(BUSY.0.to_owned(), &|run| Some(100.0 * run.number("compute_ms")? / run.number("wall_ms")?));
    let bytes = |run: &RunSummary| run.part::<BTreeMap<String, f64>>("peak_bytes");
    let categories: Vec<String> =
        runs.first().map_or_else(Vec::new, |run| bytes(run).into_keys().collect());
    for category in categories.into_iter().filter(|name| name != "total") {
        add(format!("{category}_mb"), &|run| Some(bytes(run).get(&category)? / 1e6));
    }
    all
}
