//! The study as text and as a chart: the table, and how the strategies compare with the first one.

use paceline_host::text::thousands;
use paceline_table::chart::{Axis, Picture, Series};
use paceline_table::table::{Column, Columns, Head};

use super::Row;
use super::memory::Memory;
use crate::rank;
use crate::step::{MEDIANS, RANGES, communication_columns, step_columns};
use crate::study::Setting;

/// A column of memory: its key, its label, its definition, and the bytes.
type OfMemory = (&'static str, &'static str, &'static str, fn(&Memory) -> u64);

/// The memory of the rank that has most.
const MEMORY: [OfMemory; 9] = [
    ("init_peak_mb", "peak: init", "Most at once in initialization.", |of| of.init.peak),
    ("before_step_peak_mb", "before step", "Most in the passes.", |of| of.before_step.peak),
    ("step_peak_mb", "step", "Most from the end of the passes to that of the step.", |of| {
        of.step.peak
    }),
    ("init_mb", "after: init", "In use after initialization.", |of| of.init.in_use),
    ("before_step_mb", "before step", "In use before the step.", |of| of.before_step.in_use),
    ("after_step_mb", "step", "In use after the step.", |of| of.step.in_use),
    ("parameters_mb", "parameters", "Parameters after the step.", |of| of.parameters),
    ("gradients_mb", "gradients", "Gradients after the step.", |of| of.gradients),
    ("optimizer_mb", "optimizer", "Optimizer state after the step.", |of| of.optimizer),
];

/// The columns of the study. Sizes are in MB of 1e6 bytes, which the console says once, above them.
pub fn columns() -> Columns<Row> {
    let name = |row: &Row| row.strategy.clone();
    let columns = Columns::new().add("strategy", "strategy", ("", 0), "The strategy.", name);
    let columns = step_columns(columns, ["least", "most"], |row| &row.times).add(
        "optimizer_ms",
        "optimizer",
        ("ms", 2),
        "Clipping and update.",
        |row| row.optimizer_ms,
    );
    let labels = [("communication", 1), ("", 2), ("", 2)];
    let mut columns = communication_columns(columns, labels, |row| &row.times);
    columns.0.extend(MEMORY.map(|(key, label, definition, of)| {
        Column::new(Head::new(key, label, ("", 2), definition), move |row: &Row| row.mb(of))
    }));
    columns
}

/// The table of `rows`, and the lines below it.
pub fn text(rows: &[Row], setting: &Setting, width: Option<usize>) -> String {
    let table = columns().table(rows);
    let is_memory = |head: &Head| MEMORY.iter().any(|(key, ..)| *key == head.key);
    let times = table.with_columns(|head| !is_memory(head));
    let memory = table.with_columns(|head| head.key == "strategy" || is_memory(head));
    let mut lines = vec![
        format!("{} parameters", thousands(setting.params)),
        times.fitted(width),
        format!("{MEDIANS}; {RANGES}"),
        "\nMemory of the rank that has most, MB of 1e6 bytes".to_owned(),
        memory.fitted(width),
        "peak: the most at once during initialization, in the forward and the backward pass before the optimizer's step, \
         and from there to the end of that step; after: in use at the end of each, and of the last one the parts of \
         parameters, gradients and optimizer state"
            .to_owned(),
        rank::rule(setting.rounds),
    ];
    if let Some((first, others)) = rows.split_first() {
        lines.extend(others.iter().map(|row| against(first, row)));
    }
    lines.join("\n")
}

/// Compares a strategy with the first one.
fn against(first: &Row, row: &Row) -> String {
    let [[mb, first_mb], [peak_mb, first_peak_mb]] = [
        [row, first].map(|row| row.mb(|of| of.optimizer).unwrap_or(0.0)),
        [row, first].map(|row| row.peaks_mb().into_iter().fold(0.0, f64::max)),
    ];
    format!(
        "{} against {}: step {}; optimizer state {mb:.2} of {first_mb:.2} MB; most memory {peak_mb:.2} of \
         {first_peak_mb:.2} MB",
        row.strategy,
        first.strategy,
        row.times.against(&first.times)
    )
}

/// The chart of the peaks: a line for each strategy.
pub fn chart(rows: &[Row], setting: &Setting, ranks: usize) -> Picture {
    let series = rows.iter().enumerate().map(|(look, row)| {
        let points = (1..).zip(row.peaks_mb()).map(|(at, mb)| (f64::from(at), 1e6 * mb));
        Series::line(&row.strategy, points).look(look)
    });
    setting.chart(
        format!("{}, {ranks} ranks over {}: memory of a rank", setting.model, setting.transport),
        Axis::linear("1: initialization, 2: forward and backward pass, 3: optimizer step", ""),
        Axis::linear("The most at once", "B"),
        series.collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;
    use crate::studies::scaling::verdict::tests::setting;

    #[test]
    fn strategies_are_compared_with_the_first_one() {
        let rows = [row("ddp", 20.0, 1.0), row("zero1", 23.0, 0.5), row("sharded1", 20.5, 0.5)];
        insta::assert_snapshot!(text(&rows, &setting(2), None));
    }

    #[test]
    fn the_chart_has_a_line_of_three_points_for_each_strategy() {
        let chart = chart(&[row("ddp", 20.0, 1.0), row("sharded1", 20.5, 0.5)], &setting(2), 2);
        let points: Vec<_> = chart.series().iter().map(|line| line.points.clone()).collect();
        assert_eq!(points[0], [(1.0, 6e6), (2.0, 13e6), (3.0, 8e6)]);
        assert_eq!(points[1], [(1.0, 4e6), (2.0, 11e6), (3.0, 6e6)]);
    }
}
