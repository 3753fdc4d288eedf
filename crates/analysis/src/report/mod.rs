//! Reports: the findings of an analysis, for people and for programs.
//!
//! A [`Report`] goes in: headline figures, notes, and sections of charts and tables. A self-contained page,
//! CSV, JSON, Markdown and lines for a console come out. This module does not know how the numbers were
//! computed; their units and definitions come with them.
//!
//! | file | purpose |
//! |---|---|
//! | [`panels`] | the charts and tables that show an analysis of traces |
//! | `html` | the HTML page |
//! | `files` | all formats of a report, and how they are written |

pub mod panels;

mod files;
mod html;

pub use files::files;
pub use paceline_table::chart;

use crate::table::{Cell, Head, Table};
use chart::{Axis, Chart, Lines, Row, Rows, Series, Shown};

/// A report: everything that its page shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The object of the analysis, as a title.
    pub title: String,
    /// Where the data comes from.
    pub subtitle: String,
    /// The numbers that readers look for first.
    pub figures: Vec<Figure>,
    /// Remarks that readers must know before they trust a number.
    pub notes: Vec<Note>,
    /// All charts and tables.
    pub sections: Vec<Section>,
    /// The [`Panel::id`] of the table that becomes the CSV file.
    pub csv_table: String,
}

/// A headline number.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Its name, unit and definition.
    pub column: Head,
    /// Its value.
    pub value: Cell,
}

/// How much a note matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// Says what to do.
    Advice,
    /// Good to know.
    Note,
    /// Some numbers cannot be taken at face value.
    Warning,
}

/// A remark that goes with the numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// How much it matters.
    pub weight: Weight,
    /// Its text.
    pub text: String,
}

/// Panels that belong together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Its name in links; unique in a report.
    pub id: String,
    /// Its title.
    pub title: String,
    /// A sentence with the question that it answers.
    pub lead: String,
    /// Its charts and tables.
    pub panels: Vec<Panel>,
}

/// A chart or a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// Its name in links and files; unique in a report.
    pub id: String,
    /// Its title.
    pub title: String,
    /// The unit of its values; empty if they have no unit or several.
    pub unit: String,
    /// The contents, how they are computed, and where the formula comes from.
    pub definition: String,
    /// How much of the page it takes.
    pub width: Width,
    /// The chart or table itself.
    pub body: Body,
}

/// How much of the page's width a panel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// All of it.
    Full,
    /// Half of it.
    Half,
    /// A third of it.
    Third,
}

/// The contents of a panel.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// A chart.
    Chart(Chart),
    /// A table.
    Table(Table),
    /// Why there is nothing to show.
    Nothing(String),
}

impl Body {
    /// The body itself, or [`Body::Nothing`] with `reason` if it has nothing to show.
    pub fn or(self, reason: &str) -> Self {
        let is_empty = match &self {
            Body::Chart(chart) => chart.is_empty(),
            Body::Table(table) => table.rows.is_empty(),
            Body::Nothing(_) => true,
        };
        if is_empty { Body::Nothing(reason.to_owned()) } else { self }
    }

    /// Stacks of parts.
    pub fn stacked(unit: &str, stacks: impl IntoIterator<Item = Row>) -> Self {
        Body::Chart(Chart::Rows(Rows::new(Shown::Parts, unit, stacks)))
    }

    /// Bars. Percentages are parts of a whole; otherwise the longest bar fills the width.
    pub fn bars(unit: &str, bars: impl IntoIterator<Item = Row>) -> Self {
        let whole = (unit == "%").then_some(100.0);
        Body::Chart(Chart::Rows(Rows { whole, ..Rows::new(Shown::Bars, unit, bars) }))
    }

    /// Rows of what happened, in milliseconds.
    pub fn lanes(lanes: impl IntoIterator<Item = Row>) -> Self {
        Body::Chart(Chart::Rows(Rows::new(Shown::Lanes, "ms", lanes)))
    }

    /// Lines over milliseconds.
    pub fn over_time(unit: &'static str, series: impl IntoIterator<Item = Series>) -> Self {
        let (x, y) = (Axis::linear("", "ms"), Axis::linear("", unit));
        Body::Chart(Chart::Lines(Lines { x, y, series: series.into_iter().collect() }))
    }
}

impl Panel {
    /// A panel as wide as the page.
    pub fn new(id: &str, title: &str, unit: &str, definition: &str, body: Body) -> Self {
        let [id, title, unit, definition] = [id, title, unit, definition].map(str::to_owned);
        Self { id, title, unit, definition, width: Width::Full, body }
    }

    /// A table as wide as the page, or the reason why it has no rows.
    pub fn table(id: &str, title: &str, definition: &str, table: Table, empty: &str) -> Self {
        Self::new(id, title, "", definition, Body::Table(table).or(empty))
    }

    /// The same panel with this width.
    pub fn wide(self, width: Width) -> Self {
        Self { width, ..self }
    }
}

impl Section {
    /// A section.
    pub fn new(id: &str, title: &str, lead: &str, panels: Vec<Panel>) -> Self {
        Self { id: id.into(), title: title.into(), lead: lead.into(), panels }
    }
}

impl Report {
    /// All tables with their panels.
    pub fn tables(&self) -> impl Iterator<Item = (&Panel, &Table)> {
        let panels = self.sections.iter().flat_map(|section| &section.panels);
        panels.filter_map(|panel| match &panel.body {
            Body::Table(table) => Some((panel, table)),
            _ => None,
        })
    }

    /// The table of the panel `id`; `None` if there is no such panel or it shows no table.
    pub fn table(&self, id: &str) -> Option<&Table> {
        self.tables().find(|(panel, _)| panel.id == id).map(|(_, table)| table)
    }

    /// Adds a note.
    pub fn note(&mut self, weight: Weight, text: impl Into<String>) {
        self.notes.push(Note { weight, text: text.into() });
    }
}

impl Weight {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Weight::Advice => "advice",
            Weight::Note => "note",
            Weight::Warning => "warning",
        }
    }
}
