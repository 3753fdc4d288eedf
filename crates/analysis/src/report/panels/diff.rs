//! The report of a difference: two traces side by side.
//!
//! A [`Diff`] goes in. A [`Report`] comes out. The rows come from `hta`.

use crate::hta::{Diff, DiffRow, Side};
use crate::report::chart::{Bar, PageColor};
use crate::report::{Body, Figure, Panel, Report, Section, Weight, Width};
use crate::table::{Cell, Column, Columns, Table};

use super::shared::{About, COUNT, US, us};

/// The most names in each chart.
const NAMES: usize = 12;

/// The report of a difference between the traces of two ranks, or between sums over ranks.
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
            "How often each name occurs in each trace, and the sum of its durations. What became of a \
             name is decided by its counts, as in HTA's trace difference.",
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
        color: match row.side {
            Side::Host => PageColor::Host,
            Side::Device => PageColor::Compute,
        },
    });
    let body = Body::bars("ms", bars).or("No name does.");
    let definition = "The twelve names with the largest difference of summed durations; kernels of the \
         device in blue, the host in brown.";
    Panel::new(id, title, "ms", definition, body).wide(Width::Half)
}

/// Every name.
#[rustfmt::skip]
fn table(diff: &Diff) -> Table {
    Columns::<&DiffRow>::new()
        .add("name", "name", COUNT, "The operator, call, span or kernel.", |of| of.name.clone())
        .add("side", "side", COUNT, "Whether it ran on the host or on the device.", |of| match of.side {
            Side::Host => "host",
            Side::Device => "device",
        })
        .add("change", "change", COUNT, "How its count changed.", |of| of.change.name())
        .add("first_calls", "calls, first", COUNT, "How often it occurs in the first.", |of| of.control_calls)
        .add("second_calls", "calls, second", COUNT, "How often it occurs in the second.", |of| of.test_calls)
        .add("calls_difference", "calls, difference", COUNT, "Second minus first.", |of| of.calls() as f64)
        .add("first_us", "time, first", US, "Sum of its durations in the first.", |of| us(of.control_ns))
        .add("second_us", "time, second", US, "Sum of its durations in the second.", |of| us(of.test_ns))
        .add("difference_us", "time, difference", US, "Second minus first.", |of| us(of.time_ns()))
        .table(&diff.rows)
}
