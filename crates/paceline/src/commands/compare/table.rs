//! The table and the charts of a comparison.

use paceline_analysis::hta::columns;
use paceline_analysis::report::chart::{Color, Row};
use paceline_analysis::report::{Body, Panel, Section, Width};
use paceline_observe::figures::figure::{Compared, Figure};
use paceline_observe::figures::table::TABLE;
use paceline_study::answer;
use paceline_study::outcome::FIGURE;
use paceline_table::table::{Cell, Head, Table};

use super::load::Run;
use super::{NAME, SETTINGS, settings};

/// The cell of a figure for a run: a word or a number of the run's summary, or a value that is computed
/// here.
fn cell(figure: &Figure, run: &Run, price_per_hour: Option<f64>) -> Cell {
    let summary = &run.summary;
    match figure.name {
        "transport" => match summary.text("link") {
            "" => Cell::from(summary.text("transport")),
            link => Cell::Text(format!("{}, link {link}", summary.text("transport"))),
        },
        "world_size" => Cell::Whole(summary.count("world_size")),
        "cost" => Cell::from(cost(run, price_per_hour)),
        // Without measured steps the summary has zeros for the times of a step, which would mislead.
        _ if figure.is_part_of_step && !is_measured(run) => Cell::Missing,
        name => match (TRACED.iter().find(|(of, _)| *of == name), summary.text(name)) {
            (Some((_, traced)), _) => Cell::from(mean(run, traced)),
            (None, "") => Cell::from(summary.number(name)),
            (None, word) => Cell::from(word),
        },
    }
}

fn cost(run: &Run, price_per_hour: Option<f64>) -> Option<f64> {
    Some(run.summary.number("total_s")? * price_per_hour? / 3600.0)
}

/// Figures that come from traces: the name of the figure, and the column of the trace analysis.
const TRACED: [(&str, &str); 4] = [
    ("traced_idle_pct", "idle_time_pctg"),
    ("traced_compute_pct", "compute_time_pctg"),
    ("traced_overlap_pct", "comm_comp_overlap_pctg"),
    ("traced_overhead_pct", "comm_overhead_pctg"),
];

/// The mean over ranks of a column of a run's traces.
fn mean(run: &Run, traced: &str) -> Option<f64> {
    let analysis = run.traced.as_ref()?;
    analysis.mean(columns(analysis.kind).find(|column| column.head.key == traced)?)
}

/// The figures that the comparison shows.
fn figures(runs: &[Run], price_per_hour: Option<f64>) -> Vec<&'static Figure> {
    // For damaged traces the columns are shown empty, so that the user sees that figures are missing.
    let has_traces = runs.iter().any(|run| run.traced.is_some() || !run.untraced.is_empty());
    let is_there = |figure: &&Figure| match figure.name {
        "cost" => price_per_hour.is_some(),
        name => has_traces || TRACED.iter().all(|(of, _)| *of != name),
    };
    TABLE.iter().filter(|figure| figure.compared != Compared::No).filter(is_there).collect()
}

/// Whether the run has measured at least one step.
fn is_measured(run: &Run) -> bool {
    run.summary.number("wall_ms").is_some_and(|wall| wall > 0.0)
}

/// All sections of the report.
pub(super) fn sections(runs: &[Run], price_per_hour: Option<f64>) -> Vec<Section> {
    let figures = figures(runs, price_per_hour);
    let row = |run: &Run| {
        let cells = figures.iter().map(|figure| cell(figure, run, price_per_hour));
        std::iter::once(Cell::from(run.name.as_str())).chain(cells).collect()
    };
    let name = Head::new("run", "run", ("", 0), "The name of the run's folder.");
    let table = Table {
        columns: std::iter::once(name).chain(figures.iter().map(|figure| figure.head())).collect(),
        rows: runs.iter().map(row).collect(),
        mean: None,
    };
    let bars = |key: &str, title: &str, color: Color| -> Option<Panel> {
        let figure = figures.iter().find(|figure| figure.name == key)?;
        let value = |run: &Run| match cell(figure, run, price_per_hour) {
            Cell::Number(value) => Some(value),
            _ => None,
        };
        let Figure { unit, definition, .. } = figure;
        let bars = runs.iter().map(|run| Row::bar(label(run, runs), value(run), color));
        let body = Body::bars(unit, bars).or("No run says so.");
        let id = key.replace('_', "-");
        Some(Panel::new(&id, title, unit, definition, body).wide(Width::Half))
    };
    let charts = [
        bars("samples_per_s", "Samples per second", Color::Compute),
        bars("total_s", "Time of the run", Color::Other),
        bars("overlap_pct", "Communication hidden behind computation", Color::Communication),
        bars("comm_overhead_pct", "Exposed communication of the step", Color::Communication),
        bars("peak_mb", "Peak memory", Color::Memory),
        bars("eval_accuracy_pct", "Accuracy", Color::Other),
        bars("cost", "Cost", Color::Other),
    ];
    let table = Panel::new(
        NAME,
        "All runs",
        "",
        "A row per run, as in compare.csv. The head of each column says on hover what it means.",
        Body::Table(table),
    );
    let mut tables = vec![table];
    tables.extend(different(runs).map(|table| {
        Panel::new(
            SETTINGS,
            "Settings that differ",
            "",
            "What decided the runs, from their config.json; settings that are the same in all runs are left \
             out.",
            Body::Table(table),
        )
    }));
    vec![
        Section::new(
            "runs",
            "Side by side",
            "",
            std::iter::once(anatomy(runs)).chain(charts.into_iter().flatten()).collect(),
        ),
        Section::new("numbers", "All numbers", "", tables),
    ]
}

/// The table of settings that are not the same in all runs, with a row per run; `None` if all are equal.
pub(super) fn different(runs: &[Run]) -> Option<Table> {
    let different = settings::different(runs);
    let names =
        std::iter::once("run".to_owned()).chain(different.iter().map(|(name, _)| name.clone()));
    let columns = names.map(Head::plain).collect();
    let row = |(at, run): (usize, &Run)| {
        let values = different
            .iter()
            .map(|(_, values)| values[at].as_deref().map_or(Cell::Missing, Cell::from));
        std::iter::once(Cell::from(run.name.as_str())).chain(values).collect()
    };
    let rows = runs.iter().enumerate().map(row).collect();
    (!different.is_empty()).then_some(Table { columns, rows, mean: None })
}

/// The label of a run: its strategy if no other run has the same, or else the folder's name.
fn label(run: &Run, runs: &[Run]) -> String {
    let strategy = run.summary.text("strategy");
    let same = runs.iter().filter(|other| other.summary.text("strategy") == strategy);
    if runs.len() > 1 && same.count() == 1 { strategy.to_owned() } else { run.name.clone() }
}

fn anatomy(runs: &[Run]) -> Panel {
    let stacks = runs.iter().filter(|run| is_measured(run)).map(|run| {
        let parts = TABLE.iter().filter(|figure| figure.is_part_of_step);
        let value = |figure: &Figure| run.summary.number(figure.name).unwrap_or(0.0);
        let parts = parts.map(|figure| (figure.label, value(figure), color(figure)));
        Row::stack(label(run, runs), parts)
    });
    let body = Body::stacked("ms", stacks).or("No run has measured a step.");
    Panel::new(
        "anatomy",
        "Anatomy of the step",
        "ms",
        "The main thread's time in a step, as a mean over ranks and measured steps. The parts are \
         disjoint and add up to the step.",
        body,
    )
}

/// The color of a part of the step.
fn color(part: &Figure) -> Color {
    match part.name {
        "forward_ms" => Color::Forward,
        "backward_ms" => Color::Backward,
        "sync_ms" => Color::Sync,
        "comm_exposed_ms" => Color::Communication,
        "optimizer_ms" => Color::Optimizer,
        "to_device_ms" => Color::Memory,
        "data_ms" => Color::DataWait,
        _ => Color::Idle,
    }
}

/// The table for a console: the flags that differ and the figures that matter most.
pub(super) fn for_console(
    runs: &[Run],
    price_per_hour: Option<f64>,
    width: Option<usize>,
) -> String {
    let names: Vec<Cell> = runs.iter().map(|run| Cell::from(label(run, runs))).collect();
    let mut flags = settings::flags(runs);
    flags.retain(|(_, values)| *values != names);
    flags.insert(0, ("run".to_owned(), names));
    let mut figures = figures(runs, price_per_hour);
    figures.retain(|figure| figure.compared == Compared::First);
    figures.sort_by_key(|figure| figure.name != FIGURE);
    let heads = flags.iter().map(|(name, _)| Head::plain(name.clone()));
    let row = |(at, run): (usize, &Run)| {
        let figures = figures.iter().map(|figure| cell(figure, run, price_per_hour));
        flags.iter().map(|(_, values)| values[at].clone()).chain(figures).collect()
    };
    let columns = heads.chain(figures.iter().map(|figure| figure.head())).collect();
    let table = Table { columns, rows: runs.iter().enumerate().map(row).collect(), mean: None };
    table.compact(flags.len(), true, width)
}

/// The best of the runs, in words.
pub(super) fn best(runs: &[Run]) -> Option<String> {
    let labels: Vec<String> = runs.iter().map(|run| label(run, runs)).collect();
    // Ranks that never synchronize train no model together.
    let is_whole = |(_, run): &(&String, &Run)| run.summary.text("strategy") != "no_sync";
    let cases = labels.iter().zip(runs).filter(is_whole);
    let cases = cases.map(|(label, run)| (&**label, std::slice::from_ref(&run.summary)));
    answer::best(FIGURE, &cases.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use paceline_analysis::hta::Kind;

    use super::*;

    #[test]
    fn every_traced_figure_is_a_column_of_the_analysis() {
        let has = |kind, name| columns(kind).any(|column| column.head.key == name);
        for (figure, column) in TRACED {
            assert!(TABLE.iter().any(|of| of.name == figure), "{figure}");
            assert!(
                [Kind::Ddp, Kind::Sharding].into_iter().any(|kind| has(kind, column)),
                "{column}"
            );
        }
    }

    fn run(name: &str, strategy: &str, total_s: Option<f64>) -> Run {
        let summary = serde_json::json!({
            "model": "cnn", "batch_size": 32, "eval_accuracy": 0.9125, "total_s": total_s,
            "comm_overhead_pct": 37.5, "strategy": strategy, "world_size": 2, "transport": "shm",
            "samples_per_s": 3200.4, "peak_bytes": {"total": 11_000_000},
            "wall_ms": 20.0, "forward_ms": 12.5, "comm_exposed_ms": 7.5
        });
        let settings = [("seed", "1"), ("strategy.name", strategy)];
        Run {
            name: name.into(),
            summary: summary.into(),
            settings: settings.map(|(name, value)| (name.into(), Some(value.into()))).into(),
            stated: settings::Settings::new(),
            traced: None,
            untraced: Vec::new(),
        }
    }

    fn value(runs: &[Run], key: &str, row: usize) -> Cell {
        let sections = sections(runs, Some(0.79));
        let table = sections.iter().flat_map(|s| &s.panels).find_map(|panel| match &panel.body {
            Body::Table(table) => Some(table.clone()),
            _ => None,
        });
        let table = table.unwrap();
        let at = table.columns.iter().position(|column| column.key == key).unwrap();
        table.rows[row][at].clone()
    }

    #[test]
    fn a_run_costs_its_time() {
        let runs = [run("a", "ddp", Some(7200.0)), run("b", "simple_ddp", None)];
        assert_eq!(value(&runs, "cost", 0), Cell::Number(1.58));
        assert_eq!(value(&runs, "cost", 1), Cell::Missing);
        assert_eq!(value(&runs, "eval_accuracy_pct", 0), Cell::Number(91.25));
        assert_eq!(value(&runs, "peak_mb", 0), Cell::Number(11.0));
        assert_eq!(value(&runs, "comm_exposed_ms", 1), Cell::Number(7.5));
    }

    #[test]
    fn runs_of_one_strategy_are_told_apart_by_name() {
        let runs = [run("a", "ddp", None), run("b", "ddp", None), run("c", "flat_ddp", None)];
        let labels: Vec<String> = runs.iter().map(|run| label(run, &runs)).collect();
        assert_eq!(labels, ["a", "b", "flat_ddp"]);
    }

    #[test]
    fn the_console_has_what_differs() {
        let mut runs = [run("a", "ddp", Some(1.0)), run("b", "simple_ddp", Some(2.0))];
        let text = for_console(&runs, None, None);
        assert!(text.starts_with("run\n----------\nddp\nsimple_ddp\n"), "{text}");
        assert!(text.contains("\nThe same in all: samples/s"), "{text}");
        assert!(!text.contains("strategy"), "the names say it: {text}");
        // A stated flag is shown with the value of the runs that do not state it.
        runs[1].stated.insert("seed".into(), Some("2".into()));
        runs[1].settings.insert("seed".into(), Some("2".into()));
        assert_eq!(settings::flags(&runs), [("seed".into(), vec!["1".into(), "2".into()])]);
    }

    #[test]
    fn settings_that_differ_are_shown() {
        let runs = [run("a", "ddp", None), run("b", "simple_ddp", None), run("c", "ddp", None)];
        assert_eq!(
            different(&runs).unwrap().fitted(None),
            "run  strategy.name\n---  -------------\na    ddp\nb    simple_ddp\nc    ddp"
        );
        assert_eq!(different(&runs[..1]), None);
        let mut runs = runs;
        runs[1].settings.clear();
        assert_eq!(different(&runs), None, "a run without a configuration differs in nothing");
        runs[2].settings.insert("seed".into(), None);
        assert_eq!(different(&runs).unwrap().columns[1].key, "seed");
        runs[2].settings.remove("seed");
        assert_eq!(different(&runs), None, "another version names it otherwise");
        runs[2].settings.insert("strategy.k".into(), Some("2".into()));
        assert_eq!(different(&runs).unwrap().columns[1].key, "strategy.k", "one run states it");
    }
}
