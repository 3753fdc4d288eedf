//! The report of a difference: two traces side by side.
//!
//! A [`Diff`] goes in. A [`Report`] comes out. The rows come from `hta`.

use super::names;
use super::odd;
use super::shared::{COUNT, MS, ms};
use crate::hta::{Diff, DiffRow, Shift, Side};
use crate::report::chart::{Color, Row};
use crate::report::{Body, Figure, Note, Panel, Report, Section, Weight, Width};
use crate::table::{Cell, Columns, Head, Table, counted};
use crate::timeline::Timeline;

/// The most names in each chart.
const NAMES: usize = 12;

/// The report of a difference between the traces of two ranks. `timelines` are the traces themselves, which show whether
/// they come from a CPU.
pub fn of_diff(diff: &Diff, timelines: &[Timeline], about: Report) -> Report {
    let on_cpu = names::are_of_cpu(timelines);
    let mut report = Report { figures: figures(diff), csv_table: "diff".to_owned(), ..about };
    for note in &diff.notes {
        report.note(Weight::Note, note);
    }
    let rows: Vec<&DiffRow> = diff.rows.iter().filter(|row| !on_cpu || is_once(row)).collect();
    report.notes.extend(noise(&rows));
    let panels = vec![
        changes(diff, &rows, "more", "Takes longer in the second", Shift::Slower),
        changes(diff, &rows, "less", "Takes longer in the first", Shift::Faster),
        Panel::new(
            "diff",
            "Every name",
            "",
            "How often each name occurs in a step of each trace, and the sum of its durations there. What became \
             of a name is decided by its counts, as in HTA's trace difference. A difference is noise if it is \
             at most three times its standard error, which follows from the spread of each trace over its steps. That \
             does not cover what makes a whole run faster or slower than another one.",
            Body::Table(table(diff, &rows)),
        ),
    ];
    report.sections = vec![Section::new(
        "changes",
        "What changed",
        "Operators and calls of the host, and kernels of the device; the difference is second minus first.",
        panels,
    )];
    let odd = odd::notes(timelines);
    if !odd.is_empty() {
        report.sections.extend(odd::section(timelines));
        report.notes.extend(odd);
    }
    if on_cpu {
        names::make_plain(&mut report);
    }
    report
}

/// Whether a row is shown for ranks that have computed on a CPU. Their traces have each kernel three times: as kernel, as
/// the operator that is the kernel, and as the call that launches it.
fn is_once(row: &DiffRow) -> bool {
    let is_copy = row.name.starts_with("paceline::") || row.name == "cudaLaunchKernel";
    row.side == Side::Device || !is_copy
}

/// How many names differ by more than noise.
fn noise(rows: &[&DiffRow]) -> Option<Note> {
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count() as u64;
    let differ = count(Shift::Slower) + count(Shift::Faster);
    let text = match count(Shift::Unknown) {
        0 => format!(
            "{} by more than noise, {} within the spread of the steps.",
            counted(differ, "name differs", "names differ"),
            counted(count(Shift::Noise), "differs", "differ"),
        ),
        _ => "A single step of a trace does not show by how much steps differ, so no difference can be told from \
              noise. Record several steps, and compare all of them."
            .to_owned(),
    };
    (!rows.is_empty()).then_some(Note { weight: Weight::Note, text })
}

fn figures(diff: &Diff) -> Vec<Figure> {
    let kernels = || diff.rows.iter().filter(|row| row.side == Side::Device);
    let first: f64 = kernels().map(|row| diff.of_control(row.control_ns as f64) / 1e6).sum();
    let second: f64 = kernels().map(|row| diff.of_test(row.test_ns as f64) / 1e6).sum();
    let figure = |key, label, definition, value| Figure {
        column: Head::new(key, label, ("ms/step", 2), definition),
        value: Cell::Number(value),
    };
    // A trace of a CPU has no kernels.
    if first + second == 0.0 {
        return Vec::new();
    }
    vec![
        figure(
            "first_device_ms",
            "kernels, first",
            "Sum of the durations of all kernels of the first, as a mean over steps.",
            first,
        ),
        figure(
            "second_device_ms",
            "kernels, second",
            "Sum of the durations of all kernels of the second, as a mean over steps.",
            second,
        ),
        figure(
            "device_difference_ms",
            "kernels, difference",
            "Second minus first.",
            second - first,
        ),
    ]
}

/// The largest changes in one direction. Without a spread, every change counts.
fn changes(diff: &Diff, rows: &[&DiffRow], id: &str, title: &str, verdict: Shift) -> Panel {
    let sign = if verdict == Shift::Slower { 1.0 } else { -1.0 };
    let time = |row: &DiffRow| diff.time_ns(row) * sign;
    let counts = |row: &&&DiffRow| matches!(row.verdict, Shift::Unknown) || row.verdict == verdict;
    let mut rows: Vec<&DiffRow> =
        rows.iter().filter(counts).copied().filter(|row| time(row) > 0.0).collect();
    rows.sort_by(|a, b| time(b).total_cmp(&time(a)).then(a.name.cmp(&b.name)));
    let bars = rows.iter().take(NAMES).map(|row| {
        let color = match row.side {
            Side::Host => Color::Host,
            Side::Device => Color::Compute,
        };
        Row::bar(row.name.clone(), Some(time(row) / 1e6), color)
    });
    let body = Body::bars("ms/step", bars).or("No name does, by more than noise.");
    let definition = "The twelve names with the largest difference of summed durations per step that is more than \
         noise; kernels of the device in blue, the host in brown.";
    Panel::new(id, title, "ms/step", definition, body).wide(Width::Half)
}

/// Every name.
#[rustfmt::skip]
fn table(diff: &Diff, rows: &[&DiffRow]) -> Table {
    let (first, second) = (diff.control_steps.max(1) as f64, diff.test_steps.max(1) as f64);
    // Calls per step are whole, unless steps differ.
    let calls = if [first, second].iter().all(|steps| *steps == 1.0) || rows.iter().all(|row| {
        row.control_calls as f64 % first == 0.0 && row.test_calls as f64 % second == 0.0
    }) { COUNT } else { ("/step", 2) };
    Columns::<&DiffRow>::new()
        .add("name", "name", COUNT, "The operator, call, span or kernel.", |of| of.name.clone())
        .add("side", "side", COUNT, "Whether it ran on the host or on the device.", |of| match of.side {
            Side::Host => "host",
            Side::Device => "device",
        })
        .add("verdict", "time", COUNT,
            "Whether it takes longer in the second. noise: the difference is at most three times its standard error. \
             one step: a trace has a single step, so its spread is unknown.", |of| of.verdict.name())
        .add("change", "count", COUNT, "How its count per step changed.", |of| of.change)
        .add("first_calls", "calls, first", calls, "How often it occurs in a step of the first.",
            move |of| of.control_calls as f64 / first)
        .add("second_calls", "calls, second", calls, "How often it occurs in a step of the second.",
            move |of| of.test_calls as f64 / second)
        .add("first_ms", "time, first", MS, "Sum of its durations in a step of the first.",
            move |of| ms(of.control_ns) / first)
        .add("second_ms", "time, second", MS, "Sum of its durations in a step of the second.",
            move |of| ms(of.test_ns) / second)
        .add("difference_ms", "time, difference", MS, "Second minus first.",
            move |of| ms(of.test_ns) / second - ms(of.control_ns) / first)
        .add("error_ms", "error", MS, "The standard error of the difference, from the spread over steps.",
            |of| of.error_ns.map(|ns| ns / 1e6))
        .table(rows.iter().copied())
}
