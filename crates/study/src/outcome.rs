//! The results of a study: a row for each variant, with all figures of its runs and its effect beside the base.
//!
//! Rows are kept as JSON, to compare experiments of other days and machines.

use std::collections::BTreeMap;

use paceline_host::resources;
use paceline_observe::figures::figure::{Better, Figure};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::TABLE;
use paceline_observe::insight::anatomy::Anatomy;
use paceline_observe::record::memory::{INITIALIZATION, RankMemory, STEP, TOTAL};
use serde::{Deserialize, Serialize};

use crate::command_line;
use crate::ledger::{Ending, Ledger};
use crate::noise::{self, Effect, Spread};
use crate::scene::Scene;

/// The figure that effects are about, unless the user names another one.
pub const FIGURE: &str = "samples_per_s";

/// When, where and with which command a study was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The version of paceline.
    pub version: String,
    /// The machine, in words.
    pub machine: String,
    /// The date and time.
    pub date: String,
    /// The command line.
    pub command: String,
    /// How many rounds were made.
    pub rounds: usize,
}

impl Origin {
    /// This command, now and here.
    pub fn of(rounds: usize) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: resources::machine(),
            date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
            command: command_line(),
            rounds,
        }
    }

    /// Where and when, for charts and pages.
    pub fn place(&self) -> String {
        format!("{}, {}", self.machine, self.date)
    }
}

/// A finished study.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The name of the study.
    pub experiment: String,
    /// When and where it was made.
    #[serde(flatten)]
    pub origin: Origin,
    /// The flags that are varied, if each case is a combination of values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// The figure that effects are about.
    #[serde(default = "samples_per_s")]
    pub compared_by: String,
    /// All variants of all scenes.
    pub rows: Vec<Row>,
    /// The summaries of the runs of each row, one per round.
    #[serde(skip)]
    pub runs: Vec<Vec<RunSummary>>,
}

fn samples_per_s() -> String {
    FIGURE.to_owned()
}

/// A variant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// The scene; empty if there is only one.
    pub scene: String,
    /// The number of the scene.
    pub at: Option<f64>,
    /// The variant.
    pub variant: String,
    /// Its value of each varied flag.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
    /// Its place, if the rows are ranked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<usize>,
    /// Whether it is the base of its scene.
    pub is_base: bool,
    /// Whether its time means something.
    pub is_timed: bool,
    /// The effect beside the base; `None` for the base, with fewer than three rounds, and if it is not timed.
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
    /// The median over the rounds of a figure.
    pub fn median(&self, name: &str) -> Option<f64> {
        Some(self.figures.get(name)?.median)
    }

    /// Adds a value that follows from others.
    pub fn add(&mut self, name: &str, value: f64) {
        self.figures.insert(name.to_owned(), Spread::exactly(value));
    }

    /// The effect beside the base, in words.
    pub fn verdict(&self) -> String {
        match (&self.failure, self.effect) {
            (Some(_), _) => "failed".to_owned(),
            (None, None) if self.is_base && self.place.is_some() => "best".to_owned(),
            (None, None) if self.is_base => "base".to_owned(),
            (None, None) if !self.is_timed => "numerics only".to_owned(),
            (None, effect) => noise::words(effect),
        }
    }
}

impl Outcome {
    /// The outcome of these scenes. `cases` has the place of each variant's case in the ledger.
    pub fn new(
        experiment: &str,
        scenes: &[Scene],
        cases: &[usize],
        rounds: usize,
        ledger: &Ledger,
    ) -> Self {
        let (mut rows, mut runs) = (Vec::new(), Vec::new());
        for scene in scenes {
            for (at, variant) in scene.variants.iter().enumerate() {
                let case = cases[rows.len()];
                let (of_case, failure) = ledger.of_case(case, rounds);
                let mut figures = figures_of(&of_case);
                let seconds = ledger.of_rounds(rounds).filter(|record| {
                    record.case == case && matches!(record.ending, Ending::Summary(_))
                });
                let seconds = Spread::of(seconds.map(|record| Some(record.seconds)));
                figures.extend(seconds.map(|spread| ("seconds".to_owned(), spread)));
                let weights = of_case.first().map_or("", |run| run.text("weights_sha256"));
                rows.push(Row {
                    scene: scene.name.clone(),
                    at: scene.at,
                    variant: variant.name.clone(),
                    values: variant.values.clone(),
                    is_base: at == 0,
                    is_timed: variant.is_timed,
                    figures,
                    weights: weights.to_owned(),
                    failure: failure.map(str::to_owned),
                    ..Row::default()
                });
                runs.push(of_case);
            }
        }
        let origin = Origin::of(rounds);
        let (experiment, compared_by) = (experiment.to_owned(), FIGURE.to_owned());
        let mut outcome = Self { experiment, origin, keys: Vec::new(), compared_by, rows, runs };
        outcome.compare();
        outcome
    }

    /// Compares each row with the base of its scene.
    pub(crate) fn compare(&mut self) {
        let mut base = 0;
        for at in 0..self.rows.len() {
            base = if self.rows[at].is_base { at } else { base };
            let effect = self.effect(&self.compared_by, base, at);
            let weights = self.rows[base].weights.clone();
            let row = &mut self.rows[at];
            row.effect = effect.filter(|_| !row.is_base && row.is_timed);
            row.has_bits_of_base = !weights.is_empty() && row.weights == weights;
        }
    }

    /// Ranks all rows by a figure: the best comes first, as the base of all others.
    pub fn rank(&mut self, figure: &str, better: Better) {
        self.compared_by = figure.to_owned();
        let values = |at: usize| {
            let values = self.values(figure, at);
            let has_all = self.rows[at].failure.is_none() && !values.is_empty();
            Some(values).filter(|of| has_all && of.iter().all(|value| !value.is_nan()))
        };
        let cases: Vec<Option<Vec<f64>>> = (0..self.rows.len()).map(values).collect();
        let places = noise::places(&cases, better);
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        let key = |at: usize| {
            let median = self.rows[at].median(figure).unwrap_or(f64::INFINITY);
            let median = if better == Better::Lower { median } else { -median };
            (places[at].unwrap_or(usize::MAX), median)
        };
        order.sort_by(|a, b| {
            let (a, b) = (key(*a), key(*b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        self.rows = order.iter().map(|at| self.rows[*at].clone()).collect();
        self.runs = order.iter().map(|at| self.runs[*at].clone()).collect();
        for (at, row) in self.rows.iter_mut().enumerate() {
            (row.place, row.is_base) = (places[order[at]], at == 0);
        }
        self.compare();
    }

    /// A figure of a row in each round.
    pub fn values(&self, figure: &str, row: usize) -> Vec<f64> {
        self.runs[row].iter().map(|run| run.number(figure).unwrap_or(f64::NAN)).collect()
    }

    /// The effect of a row on a figure, beside another row.
    pub fn effect(&self, figure: &str, base: usize, row: usize) -> Option<Effect> {
        Effect::of(&self.values(figure, base), &self.values(figure, row))
    }

    /// The rows, scene by scene.
    pub fn scenes(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|_, next| !next.is_base)
    }

    /// The percentage of its measured steps in which a rank had no core: the most of any run.
    pub fn waited_pct(&self) -> Option<f64> {
        let waited = self.rows.iter().filter_map(|row| Some(row.figures.get("cpu_wait_pct")?.max));
        waited.reduce(f64::max)
    }

    /// Whether a run has failed.
    pub fn has_failures(&self) -> bool {
        self.rows.iter().any(|row| row.failure.is_some())
    }
}

/// All figures of the runs of a variant, by name.
fn figures_of(runs: &[RunSummary]) -> BTreeMap<String, Spread> {
    let all: Vec<BTreeMap<String, f64>> = runs.iter().map(figures).collect();
    let Some(first) = all.first() else { return BTreeMap::new() };
    let spread = |name: &String| {
        let spread = Spread::of(all.iter().map(|of| of.get(name).copied()));
        spread.map(|spread| (name.clone(), spread))
    };
    first.keys().filter_map(spread).collect()
}

fn figures(run: &RunSummary) -> BTreeMap<String, f64> {
    let is_wanted = |figure: &&Figure| figure.in_summary || figure.swept.is_some();
    let known = TABLE.iter().filter(is_wanted);
    let mut all: BTreeMap<String, f64> = known
        .filter_map(|figure| Some((figure.name.to_owned(), run.number(figure.name)?)))
        .collect();
    let busy = || Some(100.0 * run.number("compute_ms")? / run.number("wall_ms")?);
    all.extend(busy().map(|busy| ("busy_pct".to_owned(), busy)));
    let buckets = match run.part::<Anatomy>("anatomy").buckets.len() {
        // The losses take one more operation per step.
        0 => run.number("comm_ops_per_step").map(|count| (count - 1.0).max(0.0)),
        count => Some(count as f64),
    };
    all.extend(buckets.map(|count| ("num_buckets".to_owned(), count)));
    let of_program = ["throughput", "in_backward_ms"].into_iter();
    all.extend(of_program.filter_map(|name| Some((name.to_owned(), run.number(name)?))));
    let by_category: BTreeMap<String, f64> = run.part("peak_bytes");
    let by_category = by_category.into_iter().filter(|(name, _)| name != TOTAL);
    all.extend(by_category.map(|(name, bytes)| (format!("{name}_mb"), bytes / 1e6)));
    for rank in run.part::<Vec<RankMemory>>("memory") {
        for (name, mb) in memory_by_phase(&rank) {
            let most = all.entry(name).or_insert(mb);
            *most = most.max(mb);
        }
    }
    all
}

/// The memory of a rank in MB, at most in and after initialization, the passes, and the rest of the step.
fn memory_by_phase(rank: &RankMemory) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    let total = |of: &BTreeMap<String, u64>| of.get(TOTAL).map_or(0.0, |bytes| *bytes as f64 / 1e6);
    for phase in &rank.phases {
        let part = match phase.phase.as_str() {
            INITIALIZATION => "init",
            STEP => "step",
            _ => "before_step",
        };
        let peak = all.entry(format!("{part}_peak_mb")).or_insert(0.0_f64);
        *peak = peak.max(total(&phase.peak_bytes));
        // Phases are in order, so the last one of a part ends it.
        let name = if part == "step" { "after_step_mb".to_owned() } else { format!("{part}_mb") };
        all.insert(name, total(&phase.current_bytes));
    }
    all
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A row for each name, with the summaries of its rounds.
    pub fn outcome(rows: &[(&str, Vec<Value>)]) -> Outcome {
        let row = |(at, (name, rounds)): (usize, &(&str, Vec<Value>))| {
            let runs: Vec<RunSummary> = rounds.iter().cloned().map(RunSummary::from).collect();
            let row = Row {
                variant: (*name).to_owned(),
                is_base: at == 0,
                is_timed: true,
                figures: figures_of(&runs),
                weights: runs.first().map_or("", |run| run.text("weights_sha256")).to_owned(),
                failure: runs.is_empty().then(|| "it ended early".to_owned()),
                ..Row::default()
            };
            (row, runs)
        };
        let (rows, runs) = rows.iter().enumerate().map(row).unzip();
        let mut outcome = Outcome {
            experiment: "test".to_owned(),
            origin: Origin {
                version: String::new(),
                machine: "a machine".to_owned(),
                date: "2026-01-02 03:04:05".to_owned(),
                command: "paceline".to_owned(),
                rounds: 3,
            },
            keys: Vec::new(),
            compared_by: FIGURE.to_owned(),
            rows,
            runs,
        };
        outcome.compare();
        outcome
    }

    #[test]
    fn the_best_row_is_the_first_and_the_base() {
        let rounds =
            |ms: f64| [ms, 1.5 * ms, 0.99 * ms].map(|ms| json!({ "step_ms_median": ms })).to_vec();
        let rows = [("a", rounds(20.0)), ("b", Vec::new()), ("c", rounds(10.0))];
        let mut outcome = outcome(&rows);
        outcome.rank("step_ms_median", Better::Lower);
        let found: Vec<_> = outcome
            .rows
            .iter()
            .map(|row| (row.variant.as_str(), row.place, row.verdict()))
            .collect();
        let expected = [
            ("c", Some(1), "best".to_owned()),
            ("a", Some(2), "2.00x (2.00-2.00)".to_owned()),
            ("b", None, "failed".to_owned()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn phases_of_the_passes_come_before_the_step() {
        let phase = |name: &str, peak: u64, in_use: u64| json!({"phase": name, "peak_bytes": {"total": peak}, "current_bytes": {"total": in_use}});
        let rank = |more: u64| {
            json!({"peak_bytes": {}, "phases": [
                phase("initialization", 10 + more, 9), phase("forward", 40, 30),
                phase("backward", 35, 20), phase("step", 25, 21),
            ]})
        };
        let run: RunSummary = json!({"memory": [rank(2), rank(3)]}).into();
        let found = figures(&run);
        for (name, bytes) in [
            ("init_peak_mb", 13.0),
            ("init_mb", 9.0),
            ("before_step_peak_mb", 40.0),
            ("before_step_mb", 20.0),
            ("step_peak_mb", 25.0),
            ("after_step_mb", 21.0),
        ] {
            assert_eq!(found[name], bytes / 1e6, "{name}");
        }
    }
}
