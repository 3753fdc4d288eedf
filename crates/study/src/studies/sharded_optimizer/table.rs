//! The study as text and as a chart: the table, and how the strategies compare with the first one.

use paceline_host::text::thousands;
use paceline_table::plot::{Axis, LineChart, Series, Spacing, Stroke, Unit};
use paceline_table::table::Cell;

use super::Row;
use crate::rank;
use crate::study::{Setting, table_of};

/// The table of `rows`, and the lines below it.
pub fn text(rows: &[Row], setting: &Setting, width: Option<usize>) -> String {
    let times = table_of(
        rows,
        &[
            ("", "strategy", 0, |row| Cell::Text(row.strategy.clone())),
            ("", "step ms", 2, |row| Cell::Number(row.step_ms)),
            ("", "least", 2, |row| Cell::Number(row.step_ms_min)),
            ("", "most", 2, |row| Cell::Number(row.step_ms_max)),
            ("", "optimizer ms", 2, |row| Cell::Number(row.optimizer_ms)),
            ("", "communication %", 1, |row| Cell::Number(row.exposed_pct)),
        ],
    );
    let memory = table_of(
        rows,
        &[
            ("", "strategy", 0, |row| Cell::Text(row.strategy.clone())),
            ("", "peak: init", 2, |row| Cell::Number(row.init_peak_mb)),
            ("", "before step", 2, |row| Cell::Number(row.before_step_peak_mb)),
            ("", "step", 2, |row| Cell::Number(row.step_peak_mb)),
            ("", "after: init", 2, |row| Cell::Number(row.init_mb)),
            ("", "before step", 2, |row| Cell::Number(row.before_step_mb)),
            ("", "step", 2, |row| Cell::Number(row.after_step_mb)),
            ("", "parameters", 2, |row| Cell::Number(row.parameters_mb)),
            ("", "gradients", 2, |row| Cell::Number(row.gradients_mb)),
            ("", "optimizer", 2, |row| Cell::Number(row.optimizer_mb)),
        ],
    );
    let mut lines = vec![
        format!("{} parameters", thousands(setting.params)),
        times.fitted(width),
        "step: of the slowest rank, median over the rounds, with the least and the most of a round; communication: \
         exposed communication in percent of the step"
            .to_owned(),
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
    let step = match row.step().differs_from(&first.step()) {
        true => format!("{:+.1} %", 100.0 * (row.step_ms / first.step_ms - 1.0)),
        false => "within noise".to_owned(),
    };
    format!(
        "{} against {}: step {step}; optimizer state {:.2} of {:.2} MB; most memory {:.2} of {:.2} MB",
        row.strategy,
        first.strategy,
        row.optimizer_mb,
        first.optimizer_mb,
        row.peak_mb(),
        first.peak_mb()
    )
}

/// The chart of the peaks: a line for each strategy.
pub fn chart(rows: &[Row], setting: &Setting, ranks: usize) -> LineChart {
    let line = |(look, row): (usize, &Row)| {
        let peaks = [row.init_peak_mb, row.before_step_peak_mb, row.step_peak_mb];
        let points = (1..).zip(peaks).map(|(at, mb)| (f64::from(at), 1e6 * mb));
        Series {
            name: row.strategy.clone(),
            points: points.collect(),
            ranges: Vec::new(),
            stroke: Stroke::Solid,
            look,
        }
    };
    LineChart {
        title: format!(
            "{}, {ranks} ranks over {}: memory of a rank",
            setting.model, setting.transport
        ),
        subtitle: setting.place(),
        x: Axis {
            label: "1: initialization, 2: forward and backward pass, 3: optimizer step".into(),
            unit: Unit::Count,
            spacing: Spacing::Linear,
        },
        y: Axis { label: "The most at once".into(), unit: Unit::Bytes, spacing: Spacing::Linear },
        series: rows.iter().enumerate().map(line).collect(),
    }
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
        let points: Vec<_> = chart.series.iter().map(|line| line.points.clone()).collect();
        assert_eq!(points[0], [(1.0, 6e6), (2.0, 13e6), (3.0, 8e6)]);
        assert_eq!(points[1], [(1.0, 4e6), (2.0, 11e6), (3.0, 6e6)]);
    }
}
