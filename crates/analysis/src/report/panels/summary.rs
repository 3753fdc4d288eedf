//! The summary: a line per rank, the headline, and the output on the console.

use super::shared::{COUNT, PerStep, RANK};
use crate::fitted::fitted;
use crate::hta::{self, Analysis, columns};
use crate::report::{Body, Figure, Panel, Section};
use crate::table::{Cell, Column, Columns, Head, Table};

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

/// The table of `summary.csv`.
pub(super) fn table(analysis: &Analysis) -> Table {
    let all: Vec<_> = columns(analysis.kind).collect();
    let row = |rank: &hta::RankAnalysis| all.iter().map(|of| of.cell(rank)).collect();
    let mean = |of: &&Column<hta::RankAnalysis>| match &*of.head.key {
        "rank" => Cell::from("mean"),
        _ => Cell::from(analysis.mean(of)),
    };
    Table {
        columns: all.iter().map(|of| of.head.clone()).collect(),
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
            column: Head::new(
                "step_ms",
                "step",
                ("ms", 2),
                "Mean length of the steps that were looked at, over steps and ranks.",
            ),
            value: Cell::Number(steps.iter().sum::<f64>() / steps.len() as f64),
        });
    }
    let all: Vec<_> = columns(analysis.kind).collect();
    for name in HEADLINE {
        if let Some(of) = all.iter().find(|of| of.head.key == name) {
            let mut column = of.head.clone();
            column.definition = format!("Mean over ranks. {}", column.definition).into();
            // A part of the kernel time is named without these words.
            if let Some(part) =
                column.label.strip_suffix(" time").filter(|part| !part.contains("of "))
            {
                column.label = part.replace("non ", "non-").into();
            }
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

/// The head and the figure of a column on the console, for a rank. Sums over steps are shown as means
/// per step; a sum in milliseconds repeats the one in microseconds and is left out.
fn shown(per_step: PerStep, of: &'static Column<hta::RankAnalysis>) -> Option<(Head, Get)> {
    let mut shown = of.head.clone();
    let (is_sum, scale) = match &*shown.unit {
        _ if shown.key == "rank" => return None,
        "ms" => return None,
        "us" => (true, 1e-3),
        "" => (shown.key.ends_with("_calls"), 1.0),
        _ => (false, 1.0),
    };
    if shown.unit == "us" {
        (shown.unit, shown.decimals) = (per_step.unit().into(), 3);
    } else if is_sum && per_step.unit() != "ms" {
        shown.unit = "/step".into();
    }
    let value = move |rank: &hta::RankAnalysis| {
        let value = of.cell(rank).number()? * scale;
        Some(if is_sum { per_step.mean(rank, value) } else { value })
    };
    Some((shown, Box::new(value)))
}

/// The output on the console: a line per figure, with the mean over ranks and then each rank. Times are
/// milliseconds per step. Lines have at most `width` characters.
pub fn console(analysis: &Analysis, width: Option<usize>) -> String {
    let per_step = PerStep::of(analysis);
    let all: Vec<_> = columns(analysis.kind).filter_map(|of| shown(per_step, of)).collect();
    let number = |column: &Head, value: Option<f64>, is_mean: bool| {
        // A mean of whole numbers is rarely whole.
        let is_whole = !is_mean && value.is_some_and(|value| value == value.trunc());
        let decimals = if column.decimals == 0 && !is_whole { 2 } else { column.decimals };
        Cell::from(value).shown(&Head { decimals, ..column.clone() })
    };
    let mean = |value: &Get| {
        let values: Vec<f64> = analysis.ranks.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let blocks = analysis.ranks.chunks(RANKS_PER_BLOCK).enumerate().map(|(at, ranks)| {
        let mut head = vec!["figure".to_owned(), "unit".to_owned()];
        head.extend((at == 0).then(|| "mean".to_owned()));
        head.extend(ranks.iter().map(super::shared::label));
        let row = |(column, value): &(Head, Get)| {
            let mut row = vec![column.label.to_string(), column.unit.to_string()];
            row.extend((at == 0).then(|| number(column, mean(value), true)));
            row.extend(ranks.iter().map(|rank| number(column, value(rank), false)));
            row
        };
        let rows: Vec<Vec<String>> = all.iter().map(row).collect();
        fitted(&head, &rows, |at| at < 2, width)
    });
    blocks.collect::<Vec<_>>().join("\n\n")
}
