//! A report in all formats.
//!
//! A [`Report`] goes in. The contents of files come out. This file knows neither what was measured nor where the files
//! go.

use std::fmt::Write as _;

use serde::{Serialize, Serializer};

use super::{Body, Figure, Report, html};
use crate::table::{Cell, Table, counted, plain_markdown};

/// The most rows of a table in the Markdown summary, which is meant to be read in an issue.
const MARKDOWN_ROWS: usize = 12;

/// The report as `csv`, `html`, `json` and `md`: the endings of the files, and their contents.
pub fn files(report: &Report) -> serde_json::Result<[(&'static str, String); 4]> {
    let csv = report.table(&report.csv_table).map(|table| table.csv()).unwrap_or_default();
    let json = Json {
        title: &report.title,
        subtitle: &report.subtitle,
        figures: report.figures.iter().map(|of| (&*of.column.key, &of.value)).collect(),
        notes: report.notes.iter().map(|of| (of.weight.name(), of.text.as_str())).collect(),
        tables: report.tables().map(|(panel, table)| (panel.id.as_str(), table)).collect(),
    };
    let json = serde_json::to_string_pretty(&json)? + "\n";
    Ok([("csv", csv), ("html", html::page(report)), ("json", json), ("md", report.markdown())])
}

/// The JSON form.
#[derive(Serialize)]
struct Json<'a> {
    title: &'a str,
    subtitle: &'a str,
    #[serde(serialize_with = "map")]
    figures: Vec<(&'a str, &'a Cell)>,
    notes: Vec<(&'a str, &'a str)>,
    #[serde(serialize_with = "map")]
    tables: Vec<(&'a str, &'a Table)>,
}

/// Pairs as an object, in their order.
fn map<T: Serialize, S: Serializer>(
    pairs: &[(&str, &T)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

impl Report {
    /// The Markdown form: figures, notes and tables. Long tables are cut.
    pub fn markdown(&self) -> String {
        let (title, subtitle) = (plain_markdown(&self.title), plain_markdown(&self.subtitle));
        let mut out = format!("## {title}\n\n{subtitle}\n\n");
        for figure in &self.figures {
            let Figure { column, value } = figure;
            let unit = if column.unit.is_empty() { "" } else { " " };
            let shown = plain_markdown(&value.shown(column));
            // Writing to a string cannot fail.
            let _ = writeln!(out, "- **{}**: {shown}{unit}{}", column.label, column.unit);
        }
        for note in &self.notes {
            let text = plain_markdown(&note.text);
            let _ = writeln!(out, "- {}: {text}", note.weight.name());
        }
        for section in &self.sections {
            let tables: Vec<_> = section
                .panels
                .iter()
                .filter_map(|panel| match &panel.body {
                    Body::Table(table) if !table.rows.is_empty() => Some((panel, table)),
                    _ => None,
                })
                .collect();
            for (panel, table) in tables {
                let (head, left_out) = table.head(MARKDOWN_ROWS);
                let _ =
                    write!(out, "\n### {}\n\n{}", plain_markdown(&panel.title), head.markdown());
                if left_out > 0 {
                    let more = counted(left_out as u64, "more row is", "more rows are");
                    let _ = writeln!(out, "\n{more} in the other files.");
                }
            }
        }
        out
    }
}
