//! Two traces side by side.

use crate::hta::{Diff, DiffRow, Side};
use crate::report::chart::{Bar, Bars, Ink};
use crate::report::{Body, Figure, Panel, Report, Section, Weight, Width};
use crate::table::{Cell, Column, Table};

use super::About;

/// Names in each chart.
const NAMES: usize = 12;

/// The report of a difference: of two rank's traces, or of sums over ranks.
pub fn of_diff(diff: &Diff, about: About) -> Report {
    let mut report = Report {
        title: about.title,
        subtitle: about.subtitle,
        figures: figures(diff),
        notes: about.notes,
        sections: Vec::new(),
        csv_table: "diff".to_owned(),
    };
    for note in &diff.notes {
        report.note(Weight::Note, note);
    }
    let panels = vec![
        changes(diff, "more", "Takes longer in the second", 1),
        changes(diff, "less", "Takes longer in the first", -1),
        Panel::new(
            "diff",
            "Every name",
            "",
            "How often each name occurs in both traces, and how long all of that took. What became of a \
             name is told from its counts, as in HTA's trace difference.",
            Body::Table(table(diff)),
        ),
    ];
    report.sections = vec![Section::new(
        "changes",
        "What changed",
        "Operators and calls of the host, and kernels of the device; the difference is second minus first.",
        panels,
    )];
    report
}

fn figures(diff: &Diff) -> Vec<Figure> {
    let sum = |side, time: fn(&DiffRow) -> i64| -> f64 {
        diff.rows.iter().filter(|row| row.side == side).map(time).sum::<i64>() as f64 / 1e6
    };
    let figure = |key: &str, label: &str, definition: &str, value| Figure {
        column: Column::new(key, label, "ms", 2, definition),
        value: Cell::Number(value),
    };
    vec![
        figure(
            "first_device_ms",
            "kernels, first",
            "Sum of the durations of all kernels of the first.",
            sum(Side::Device, |row| row.control_ns),
        ),
        figure(
            "second_device_ms",
            "kernels, second",
            "Sum of the durations of all kernels of the second.",
            sum(Side::Device, |row| row.test_ns),
        ),
        figure(
            "device_difference_ms",
            "kernels, difference",
            "Second minus first.",
            sum(Side::Device, DiffRow::time_ns),
        ),
    ]
}

/// The largest changes of one sign.
fn changes(diff: &Diff, id: &str, title: &str, sign: i64) -> Panel {
    let mut rows: Vec<&DiffRow> = diff.rows.iter().filter(|row| row.time_ns() * sign > 0).collect();
    rows.sort_by(|a, b| (b.time_ns() * sign).cmp(&(a.time_ns() * sign)).then(a.name.cmp(&b.name)));
    let bars = rows.iter().take(NAMES).map(|row| Bar {
        label: row.name.clone(),
        value: Some((row.time_ns() * sign) as f64 / 1e6),
        ink: match row.side {
            Side::Host => Ink::Host,
            Side::Device => Ink::Compute,
        },
    });
    let bars: Vec<Bar> = bars.collect();
    let body = match bars.is_empty() {
        true => Body::Nothing("Nothing does.".into()),
        false => Body::Bars(Bars { unit: "ms".into(), whole: None, bars }),
    };
    let definition = "The twelve names with the largest difference of summed durations; kernels of the \
         device in blue, the host in brown.";
    Panel::new(id, title, "ms", definition, body).wide(Width::Half)
}

/// Every name.
fn table(diff: &Diff) -> Table {
    let count =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "", 0, definition);
    let time =
        |key: &str, label: &str, definition: &str| Column::new(key, label, "us", 1, definition);
    let columns = vec![
        Column::new("name", "name", "", 0, "The operator, call, span or kernel."),
        Column::new("side", "side", "", 0, "Whether it ran on the host or on the device."),
        Column::new("change", "change", "", 0, "What became of it, by counts."),
        count("first_calls", "calls, first", "How often it occurs in the first."),
        count("second_calls", "calls, second", "How often it occurs in the second."),
        count("calls_difference", "calls, difference", "Second minus first."),
        time("first_us", "time, first", "Sum of its durations in the first."),
        time("second_us", "time, second", "Sum of its durations in the second."),
        time("difference_us", "time, difference", "Second minus first."),
    ];
    let rows = diff.rows.iter().map(|row| {
        let side = match row.side {
            Side::Host => "host",
            Side::Device => "device",
        };
        vec![
            Cell::Text(row.name.clone()),
            side.into(),
            row.change.name().into(),
            Cell::Whole(row.control_calls),
            Cell::Whole(row.test_calls),
            Cell::Number(row.calls() as f64),
            Cell::Number(row.control_ns as f64 / 1e3),
            Cell::Number(row.test_ns as f64 / 1e3),
            Cell::Number(row.time_ns() as f64 / 1e3),
        ]
    });
    Table { columns, rows: rows.collect(), mean: None }
}
