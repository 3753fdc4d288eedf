//! The summary: a line per rank, the headline, and the output on the console.

use super::shared::{COUNT, PerStep, RANK};
use crate::fitted::fitted;
use crate::hta::{self, Analysis, Unit, columns};
use crate::report::{Body, Figure, Panel, Section};
use crate::table::{Cell, Column, Columns, Table};

/// The name of the summary's panel.
pub(super) const TABLE: &str = "summary";
/// The most ranks side by side on a console.
const RANKS_PER_BLOCK: usize = 8;
/// The figures of the headline.
const HEADLINE: [&str; 5] = [
    "compute_time_pctg",
    "non_compute_time_pctg",
    "idle_time_pctg",
    "comm_comp_overlap_pctg",
    "comm_overhead_pctg",
];

/// Turns a column of the analysis into a column of a table. The label is the name without the unit.
pub(super) fn column(of: &hta::Column) -> Column {
    let ending = match of.unit {
        Unit::Us => "_us",
        Unit::Ms => "_ms",
        Unit::Percent => "_pctg",
        Unit::Mb => "_mb",
        Unit::Rank | Unit::Count => "",
    };
    let label = of.name.strip_suffix(ending).unwrap_or(of.name).replace('_', " ");
    let decimals = match of.unit {
        Unit::Rank | Unit::Count => 0,
        Unit::Us => 1,
        Unit::Ms | Unit::Percent | Unit::Mb => 2,
    };
    Column::new(of.name, &label, symbol(of.unit), decimals, &definition(of))
}

/// The unit as people see it: memory is counted in 2^20 bytes, although the columns' names end in `_mb`.
pub(super) fn symbol(unit: Unit) -> &'static str {
    match unit {
        Unit::Mb => "MiB",
        unit => unit.symbol(),
    }
}

/// What a column means, and how it differs from the figure of the same name that a run prints itself.
pub(super) fn definition(of: &hta::Column) -> String {
    let beside = match of.name {
        "comm_overhead_pctg" => {
            " `paceline train` uses the word overhead for something else: the part of a step in which \
             the main thread was blocked on communication."
        }
        "comm_comp_overlap_pctg" => {
            " This figure covers the steps of the trace that were looked at. `paceline train` measures \
             the overlap itself, over all measured steps, as communication while the main thread \
             computed."
        }
        _ => "",
    };
    format!("{}{beside}", of.definition)
}

fn cell(of: &hta::Column, value: Option<f64>) -> Cell {
    match (of.unit, value) {
        (Unit::Rank | Unit::Count, Some(value)) if value == value.trunc() && value >= 0.0 => {
            Cell::Whole(value as u64)
        }
        (_, value) => value.into(),
    }
}

/// The table of `summary.csv`.
pub(super) fn table(analysis: &Analysis) -> Table {
    let all: Vec<_> = columns(analysis.kind).collect();
    let row = |rank: &hta::RankAnalysis| -> Vec<Cell> {
        all.iter().map(|of| cell(of, (of.get)(&rank.row))).collect()
    };
    let mean = |of: &&hta::Column| match of.unit {
        Unit::Rank => Cell::Text("mean".to_owned()),
        _ => Cell::from(analysis.mean(of)),
    };
    Table {
        columns: all.iter().map(|of| column(of)).collect(),
        rows: analysis.ranks.iter().map(row).collect(),
        mean: Some(all.iter().map(mean).collect()),
    }
}

/// The headline: means over ranks.
pub(super) fn figures(analysis: &Analysis) -> Vec<Figure> {
    let mut figures = Vec::new();
    let steps: Vec<f64> = analysis
        .ranks
        .iter()
        .filter_map(|rank| rank.anatomy.as_ref().map(|anatomy| anatomy.step_mean_ns / 1e6))
        .collect();
    if !steps.is_empty() {
        figures.push(Figure {
            column: Column::new(
                "step_ms",
                "step",
                "ms",
                2,
                "Mean length of the steps that were looked at, over steps and ranks.",
            ),
            value: Cell::Number(steps.iter().sum::<f64>() / steps.len() as f64),
        });
    }
    let all: Vec<_> = columns(analysis.kind).collect();
    for name in HEADLINE {
        if let Some(of) = all.iter().find(|of| of.name == name) {
            let mut column = column(of);
            column.definition = format!("Mean over ranks. {}", column.definition);
            column.label = match name {
                "comm_comp_overlap_pctg" => "communication hidden".to_owned(),
                "comm_overhead_pctg" => "communication of kernel time".to_owned(),
                _ => column.label.trim_end_matches(" time").replace("non ", "non-"),
            };
            figures.push(Figure { column, value: Cell::from(analysis.mean(of)) });
        }
    }
    figures
}

/// The tables of all numbers; `not_used` says which events of the traces are in no table.
#[rustfmt::skip]
pub(super) fn section(analysis: &Analysis, not_used: Option<&str>) -> Section {
    let panel = Panel::new(
        TABLE,
        "Summary of the ranks",
        "",
        "A line per rank, as in summary.csv, and the mean over ranks. Times are sums over all steps that were \
         looked at. Hovering over the head of a column shows what it means.",
        Body::Table(table(analysis)),
    );
    let files = Columns::<&hta::RankAnalysis>::new()
        .add("rank", "rank", COUNT, RANK, |rank| rank.rank)
        .add("file", "file", COUNT, "Where its trace was read from.", |rank| rank.file.clone())
        .add("counted", "counted", COUNT,
            "What was counted as the rank's work: the kernels of its device or, where the trace has \
             none, the operators of its threads.",
            |rank| match rank.source {
                hta::Source::Kernels => "kernels",
                hta::Source::Operators => "operators",
            })
        .add("steps_found", "steps in the file", COUNT, "Steps that the trace holds.", |rank| rank.steps.found)
        .add("steps", "steps looked at", COUNT,
            "Steps that the figures cover; 0 if they cover the whole trace.", |rank| rank.steps.chosen.len())
        .table(&analysis.ranks);
    let files = Panel::new("files", "Traces", "", "What was read.", Body::Table(files));
    Section::new("numbers", "All numbers", not_used.unwrap_or(""), vec![panel, files])
}

/// Computes a figure of a rank.
type Get = Box<dyn Fn(&hta::RankAnalysis) -> Option<f64>>;

/// What the console shows of a column for a rank. Sums over steps are shown as means per step; a sum in
/// milliseconds repeats the one in microseconds and is left out.
fn shown(per_step: PerStep, of: &hta::Column) -> Option<(Column, Get)> {
    let mut shown = column(of);
    let (is_sum, scale) = match of.unit {
        Unit::Rank | Unit::Ms => return None,
        Unit::Us => (true, 1e-3),
        Unit::Count => (of.name.ends_with("_calls"), 1.0),
        Unit::Percent | Unit::Mb => (false, 1.0),
    };
    if of.unit == Unit::Us {
        (shown.unit, shown.decimals) = (per_step.unit().to_owned(), 3);
    } else if is_sum && per_step.unit() != "ms" {
        shown.unit = "/step".to_owned();
    }
    let get = of.get;
    let value = move |rank: &hta::RankAnalysis| {
        let value = get(&rank.row)? * scale;
        Some(if is_sum { per_step.mean(rank, value) } else { value })
    };
    Some((shown, Box::new(value)))
}

/// The output on the console: a line per figure, with the mean over ranks and then each rank. Times are
/// milliseconds per step. Lines have at most `width` characters.
pub fn console(analysis: &Analysis, width: Option<usize>) -> String {
    let per_step = PerStep::of(analysis);
    let all: Vec<_> = columns(analysis.kind).filter_map(|of| shown(per_step, of)).collect();
    let number = |column: &Column, value: Option<f64>, is_mean: bool| {
        // A mean of whole numbers is seldom whole.
        let is_whole = !is_mean && value.is_some_and(|value| value == value.trunc());
        let decimals = if column.decimals == 0 && !is_whole { 2 } else { column.decimals };
        Cell::from(value).shown(&Column { decimals, ..column.clone() })
    };
    let mean = |value: &Get| {
        let values: Vec<f64> = analysis.ranks.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let blocks = analysis.ranks.chunks(RANKS_PER_BLOCK).enumerate().map(|(at, ranks)| {
        let mut head = vec!["figure".to_owned(), "unit".to_owned()];
        head.extend((at == 0).then(|| "mean".to_owned()));
        head.extend(ranks.iter().map(super::shared::label));
        let row = |(column, value): &(Column, Get)| {
            let mut row = vec![column.label.clone(), column.unit.clone()];
            row.extend((at == 0).then(|| number(column, mean(value), true)));
            row.extend(ranks.iter().map(|rank| number(column, value(rank), false)));
            row
        };
        let rows: Vec<Vec<String>> = all.iter().map(row).collect();
        fitted(&head, &rows, |at| at < 2, width)
    });
    blocks.collect::<Vec<_>>().join("\n\n")
}
