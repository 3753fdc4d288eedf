//! A report in all formats.
//!
//! A [`Report`] goes in. The contents of files come out. This file knows neither what was measured nor where the files
//! go.

use std::fmt;
use std::fmt::Write as _;

use serde::Serialize;
use serde::ser::SerializeMap;

use super::{Body, Figure, Report, html};
use crate::table::{counted, plain_markdown};

/// Why a report could not be made.
#[derive(thiserror::Error)]
pub enum ReportError {
    /// A part of the report has no form in JSON.
    #[error("cannot write the report as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl fmt::Debug for ReportError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The most rows of a table in the Markdown summary, which is meant to be read in an issue.
const MARKDOWN_ROWS: usize = 12;

/// The report as `csv`, `html`, `json` and `md`: the endings of the files, and their contents.
pub fn files(report: &Report) -> Result<[(&'static str, String); 4], ReportError> {
    let csv = report.table(&report.csv_table).map(|table| table.csv()).unwrap_or_default();
    let json = serde_json::to_string_pretty(&Json(report))? + "\n";
    Ok([("csv", csv), ("html", html::page(report)), ("json", json), ("md", report.markdown())])
}

/// The JSON form.
struct Json<'a>(&'a Report);

impl Serialize for Json<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Figures<'a>(&'a [Figure]);
        impl Serialize for Figures<'_> {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|f| (&f.column.key, &f.value)))
            }
        }
        struct Tables<'a>(&'a Report);
        impl Serialize for Tables<'_> {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.tables().map(|(panel, table)| (&panel.id, table)))
            }
        }
        let report = self.0;
        let notes: Vec<_> =
            report.notes.iter().map(|note| (note.weight.name(), &note.text)).collect();
        let mut map = serializer.serialize_map(Some(5))?;
        map.serialize_entry("title", &report.title)?;
        map.serialize_entry("subtitle", &report.subtitle)?;
        map.serialize_entry("figures", &Figures(&report.figures))?;
        map.serialize_entry("notes", &notes)?;
        map.serialize_entry("tables", &Tables(report))?;
        map.end()
    }
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
