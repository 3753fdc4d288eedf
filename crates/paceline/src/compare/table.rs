//! The table and the charts of a comparison.

use paceline_analysis::hta::{Analysis, columns};
use paceline_analysis::report::chart::{Bar, Bars, Ink, Part, Stack, Stacked};
use paceline_analysis::report::{Body, Panel, Section, Width};
use paceline_analysis::table::{Cell, Column, Table};

use super::NAME;
use super::load::Run;
use crate::metrics::TOTAL;

/// A column, and where it is of a run.
struct Figure {
    column: Column,
    get: Box<dyn Fn(&Run) -> Cell>,
}

fn figure(
    (key, label, unit, decimals): (&str, &str, &str, usize),
    definition: &str,
    get: impl Fn(&Run) -> Option<f64> + 'static,
) -> Figure {
    Figure {
        column: Column::new(key, label, unit, decimals, definition),
        get: Box::new(move |run| Cell::maybe(get(run))),
    }
}

fn words(key: &str, definition: &str, get: impl Fn(&Run) -> String + 'static) -> Figure {
    Figure {
        column: Column::new(key, key, "", 0, definition),
        get: Box::new(move |run| Cell::Text(get(run))),
    }
}

fn of_step(key: &str, label: &str, definition: &str, get: fn(&Run) -> f64) -> Figure {
    // Without measured steps the anatomy is all zeros, which are no figures.
    let measured = move |run: &Run| (run.summary.anatomy.wall_ms > 0.0).then(|| get(run));
    figure((key, label, "ms", 2), definition, measured)
}

fn cost(run: &Run, price_per_hour: f64) -> Option<f64> {
    run.total_s.map(|seconds| seconds * price_per_hour / 3600.0)
}

fn peak_mb(run: &Run) -> Option<f64> {
    run.summary.peak_bytes.get(TOTAL).map(|bytes| *bytes as f64 / 1e6)
}

/// A figure of the traces.
fn traced(key: &'static str, label: &'static str, name: &'static str) -> Figure {
    let mean = move |analysis: &Analysis| {
        let column = columns(analysis.kind).find(|column| column.name == name)?;
        analysis.mean(column)
    };
    let definition = columns(paceline_analysis::hta::Kind::Ddp)
        .find(|column| column.name == name)
        .map_or("", |column| column.definition);
    let definition = format!(
        "From the run's traces, and so of the steps that were profiled only; mean over ranks. \
         {definition} The column without \"traced\" is what the run measured itself, in all measured steps, \
         on its main thread."
    );
    figure((key, label, "%", 2), &definition, move |run| run.traced.as_ref().and_then(mean))
}

fn figures(runs: &[Run], price_per_hour: Option<f64>) -> Vec<Figure> {
    let mut all = vec![
        words("run", "The name of the run's folder.", |run| run.name.clone()),
        words("model", "The model.", |run| run.model.clone()),
        words("strategy", "What kept the replicas equal.", |run| run.summary.strategy.clone()),
        Figure {
            column: Column::new("ranks", "ranks", "", 0, "Number of ranks."),
            get: Box::new(|run| Cell::Whole(run.summary.world_size as u64)),
        },
        words("transport", "How the ranks reached each other.", |run| {
            let link = run.summary.link.as_ref().map(|link| format!(", link {link}"));
            format!("{}{}", run.summary.transport, link.unwrap_or_default())
        }),
        figure(("time_s", "time", "s", 2), "Wall-clock time of the whole run on rank 0.", |run| {
            run.total_s
        }),
        figure(
            ("samples_per_s", "samples/s", "", 0),
            "Samples of all ranks, divided by the time of the measured steps with the wait for their data.",
            |run| run.summary.samples_per_s,
        ),
        figure(
            ("step_ms", "step", "ms", 2),
            "Median over steps of the slowest rank's step.",
            |run| run.summary.step_ms_median,
        ),
        of_step("data_ms", "data", "Mean wait for the batch.", |run| run.summary.anatomy.data_ms),
        of_step("forward_ms", "forward", "Forward pass and loss.", |run| {
            run.summary.anatomy.forward_ms
        }),
        of_step("backward_ms", "backward", "Backward pass.", |run| run.summary.anatomy.backward_ms),
        of_step("sync_ms", "sync", "Arithmetic and copies that synchronisation adds.", |run| {
            run.summary.anatomy.sync_ms
        }),
        of_step("exposed_ms", "exposed", "The main thread was blocked on communication.", |run| {
            run.summary.anatomy.exposed_ms
        }),
        of_step("optimizer_ms", "optimizer", "The update of the parameters.", |run| {
            run.summary.anatomy.optimizer_ms
        }),
        of_step("rest_ms", "rest", "What no span accounts for.", |run| run.summary.anatomy.rest_ms),
        of_step(
            "wait_ms",
            "waiting",
            "Operations waited for the last rank; part of exposed and hidden.",
            |run| run.summary.anatomy.wait_ms,
        ),
        figure(
            ("overlap_pctg", "overlap", "%", 1),
            "Communication that ran while the main thread computed, in parts of all communication.",
            |run| run.summary.overlap_pct,
        ),
        figure(
            ("comm_overhead_pctg", "comm. overhead", "%", 1),
            "Exposed communication as a part of the step.",
            |run| run.comm_overhead_pctg,
        ),
        figure(
            ("peak_mb", "peak", "MB", 2),
            "The most memory of a rank in tensors, MB of 1e6 bytes.",
            peak_mb,
        ),
        figure(("loss", "loss", "", 4), "Training loss of the last epoch.", |run| run.summary.loss),
        figure(
            ("accuracy_pctg", "accuracy", "%", 2),
            "The part of the test set that is classified correctly.",
            |run| run.accuracy.map(|part| 100.0 * part),
        ),
    ];
    if let Some(price) = price_per_hour {
        let definition = format!("The price of an hour, {price}, times the run's time in hours.");
        all.push(figure(("cost", "cost", "", 5), &definition, move |run| cost(run, price)));
    }
    // Where traces are damaged, empty columns say that they should be there.
    if runs.iter().any(|run| run.traced.is_some() || !run.untraced.is_empty()) {
        all.extend([
            traced("traced_idle_pctg", "idle, traced", "idle_time_pctg"),
            traced("traced_compute_pctg", "compute, traced", "compute_time_pctg"),
            traced("traced_overlap_pctg", "overlap, traced", "comm_comp_overlap_pctg"),
            traced("traced_overhead_pctg", "comm. overhead, traced", "comm_overhead_pctg"),
        ]);
    }
    all
}

/// All of the report.
pub(super) fn sections(runs: &[Run], price_per_hour: Option<f64>) -> Vec<Section> {
    let figures = figures(runs, price_per_hour);
    let table = Table {
        columns: figures.iter().map(|figure| figure.column.clone()).collect(),
        rows: runs.iter().map(|run| figures.iter().map(|of| (of.get)(run)).collect()).collect(),
        mean: None,
    };
    let bars = |key: &str, title: &str, ink: Ink| -> Option<Panel> {
        let figure = figures.iter().find(|figure| figure.column.key == key)?;
        let value = |run: &Run| match (figure.get)(run) {
            Cell::Number(value) => Some(value),
            _ => None,
        };
        let Column { unit, definition, .. } = &figure.column;
        let bars = runs.iter().map(|run| Bar { label: label(run, runs), value: value(run), ink });
        let bars: Vec<Bar> = bars.collect();
        let body = match bars.iter().all(|bar| bar.value.is_none()) {
            true => Body::Nothing("No run says so.".into()),
            false => {
                let whole = (unit == "%").then_some(100.0);
                Body::Bars(Bars { unit: unit.clone(), whole, bars })
            }
        };
        let id = key.replace('_', "-");
        Some(Panel::new(&id, title, unit, definition, body).wide(Width::Half))
    };
    let charts = [
        bars("samples_per_s", "Samples per second", Ink::Compute),
        bars("time_s", "Time of the run", Ink::Other),
        bars("overlap_pctg", "Communication hidden behind computation", Ink::Communication),
        bars("comm_overhead_pctg", "Communication overhead", Ink::Communication),
        bars("peak_mb", "Peak memory", Ink::Memory),
        bars("accuracy_pctg", "Accuracy", Ink::Other),
        bars("cost", "Cost", Ink::Other),
    ];
    let table = Panel::new(
        NAME,
        "All runs",
        "",
        "A row per run, as in compare.csv. The head of each column says on hover what it means.",
        Body::Table(table),
    );
    vec![
        Section::new(
            "runs",
            "Side by side",
            "",
            std::iter::once(anatomy(runs)).chain(charts.into_iter().flatten()).collect(),
        ),
        Section::new("numbers", "All numbers", "", vec![table]),
    ]
}

/// The strategy where that tells the runs apart, else the folder's name.
fn label(run: &Run, runs: &[Run]) -> String {
    let same = runs.iter().filter(|other| other.summary.strategy == run.summary.strategy);
    if same.count() == 1 {
        return run.summary.strategy.clone();
    }
    // Names begin with the day, and what does not fit a chart is cut: what all share is left out.
    let shared = shared_words(runs);
    run.name.split('-').skip(shared).collect::<Vec<_>>().join("-")
}

/// How many words all names of runs begin with alike, the last word of a name not counted.
fn shared_words(runs: &[Run]) -> usize {
    let words = |run: &Run| run.name.split('-').map(str::to_owned).collect::<Vec<_>>();
    let all: Vec<Vec<String>> = runs.iter().map(words).collect();
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0).saturating_sub(1);
    let is_same = |at: &usize| all.iter().all(|words| words[*at] == all[0][*at]);
    (0..shortest).take_while(is_same).count()
}

fn anatomy(runs: &[Run]) -> Panel {
    let stacks = runs.iter().filter(|run| run.summary.anatomy.wall_ms > 0.0).map(|run| {
        let of = &run.summary.anatomy;
        let part = |name: &str, value, ink| Part { name: name.into(), value, ink };
        let parts = vec![
            part("data wait", of.data_ms, Ink::DataWait),
            part("forward", of.forward_ms, Ink::Forward),
            part("backward", of.backward_ms, Ink::Backward),
            part("sync", of.sync_ms, Ink::Sync),
            part("exposed communication", of.exposed_ms, Ink::Communication),
            part("optimizer", of.optimizer_ms, Ink::Optimizer),
            part("rest", of.rest_ms, Ink::Idle),
        ];
        Stack { label: label(run, runs), parts }
    });
    let stacks: Vec<Stack> = stacks.collect();
    let body = match stacks.is_empty() {
        true => Body::Nothing("No run has measured a step.".into()),
        false => Body::Stacked(Stacked { unit: "ms".into(), stacks }),
    };
    Panel::new(
        "anatomy",
        "Anatomy of the step",
        "ms",
        "The main thread's time in a step, as a mean over ranks and measured steps. The parts are \
         disjoint and add up to the step.",
        body,
    )
}

/// Columns that follow the run's name in the first of two tables on a console; the second has the others.
const FIRST: [&str; 13] = [
    "model",
    "strategy",
    "ranks",
    "transport",
    "time_s",
    "samples_per_s",
    "step_ms",
    "overlap_pctg",
    "comm_overhead_pctg",
    "peak_mb",
    "loss",
    "accuracy_pctg",
    "cost",
];

/// The table in two, without words that are the same in every row: lines are to fit on a screen.
pub(super) fn for_console(table: &Table) -> String {
    let is_shown = |at: usize| {
        let first = table.rows.first().map(|row| &row[at]);
        let is_missing = table.rows.iter().all(|row| row[at] == Cell::Missing);
        let is_word = matches!(first, Some(Cell::Text(_)));
        let is_same = table.rows.iter().all(|row| Some(&row[at]) == first);
        at == 0 || !(is_missing || (is_word && is_same && table.rows.len() > 1))
    };
    let part = |is_first: bool| {
        let belongs =
            |at: &usize| *at == 0 || FIRST.contains(&table.columns[*at].key.as_str()) == is_first;
        let all = (0..table.columns.len()).filter(belongs);
        let shown: Vec<usize> = all.filter(|at| is_shown(*at)).collect();
        let columns = shown.iter().map(|at| table.columns[*at].clone()).collect();
        let row = |row: &Vec<Cell>| shown.iter().map(|at| row[*at].clone()).collect();
        Table { columns, rows: table.rows.iter().map(row).collect(), mean: None }.text()
    };
    format!("{}\n\n{}", part(true), part(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::anatomy::Anatomy;
    use crate::sweep::execute::RunSummary;

    fn run(name: &str, strategy: &str, total_s: Option<f64>) -> Run {
        let anatomy =
            Anatomy { wall_ms: 20.0, forward_ms: 12.5, exposed_ms: 7.5, ..Anatomy::default() };
        Run {
            name: name.into(),
            model: "cnn".into(),
            batch_size: 32,
            accuracy: Some(0.9125),
            total_s,
            comm_overhead_pctg: Some(37.5),
            summary: RunSummary {
                strategy: strategy.into(),
                world_size: 2,
                transport: "shm".into(),
                samples_per_s: Some(3200.4),
                peak_bytes: [("total".to_owned(), 11_000_000)].into(),
                anatomy,
                ..RunSummary::default()
            },
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
        assert_eq!(value(&runs, "accuracy_pctg", 0), Cell::Number(91.25));
        assert_eq!(value(&runs, "peak_mb", 0), Cell::Number(11.0));
        assert_eq!(value(&runs, "exposed_ms", 1), Cell::Number(7.5));
    }

    #[test]
    fn runs_of_one_strategy_are_told_apart_by_name() {
        let runs = [run("a", "ddp", None), run("b", "ddp", None), run("c", "flat_ddp", None)];
        let labels: Vec<String> = runs.iter().map(|run| label(run, &runs)).collect();
        assert_eq!(labels, ["a", "b", "flat_ddp"]);
        let names = ["20260131-120000-cnn-ddp", "20260131-120009-cnn-ddp"];
        let runs = names.map(|name| run(name, "ddp", None));
        let labels: Vec<String> = runs.iter().map(|run| label(run, &runs)).collect();
        assert_eq!(labels, ["120000-cnn-ddp", "120009-cnn-ddp"]);
    }

    #[test]
    fn the_console_leaves_out_what_is_the_same() {
        let runs = [run("a", "ddp", Some(1.0)), run("b", "simple_ddp", Some(2.0))];
        let sections = sections(&runs, None);
        let Body::Table(table) = &sections[1].panels[0].body else { panic!("no table") };
        let text = for_console(table);
        let head = text.lines().next().unwrap();
        assert!(head.starts_with("run  strategy"), "{text}");
        assert!(!head.contains("model") && !head.contains("loss"), "{text}");
    }
}
