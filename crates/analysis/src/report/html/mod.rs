//! The page of a report: one file that contains its style, its script and its drawings, and loads nothing.
//!
//! A [`Report`] goes in, and the text of the page comes out. Only a value of the type [`Markup`] reaches the page as it is:
//! text is escaped. This module does not know what was measured.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use paceline_files::printable_lines;

use super::chart::{FULL, HALF, THIRD, WIDTHS, style};
use super::{Body, Figure, Panel, Report, Section, Width};
use crate::table::{Cell, Head, Table, counted};

static STYLE: &str = include_str!("page.css");
static SCRIPT: &str = include_str!("page.js");

/// The most rows of a table on the page, to keep the page small. The other files have the rest.
const ROWS: usize = 250;
/// The most bytes of the drawings of a chart at further widths.
const OTHERS: usize = 60_000;
/// Text longer than this may be cut off in its cell, so it is shown in full on hover.
const LONG: usize = 40;

/// The page of a report.
pub(super) fn page(report: &Report) -> String {
    let sections = || report.sections.iter().filter(|section| !section.panels.is_empty());
    let page = html! {
        (DOCTYPE) "\n"
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (report.title) }
                style { (PreEscaped(style())) (PreEscaped(STYLE)) }
            }
            body {
                header {
                    (head(report))
                    nav {
                        @for section in sections() {
                            a href={ "#" (section.id) } { (section.title) }
                        }
                    }
                }
                @for section in sections() { (section_html(section)) }
                div id="said" role="status" aria-live="polite" {}
                script { (PreEscaped(SCRIPT)) }
            }
        }
        "\n"
    };
    // A name in a trace may hold anything, and most control characters are not allowed in a page.
    printable_lines(&page.0).into_owned()
}

fn head(report: &Report) -> Markup {
    html! {
        div.bar {
            h1 { (report.title) }
            button id="face" type="button" title="Light or dark" { "light / dark" }
        }
        p.sub { (report.subtitle) }
        @if !report.figures.is_empty() {
            dl.figures {
                @for Figure { column, value } in &report.figures {
                    div title=(column.definition) {
                        dt { (column.label) }
                        dd {
                            span.n data-v=(value.exact()) { (value.shown(column)) }
                            small { (column.unit) }
                        }
                    }
                }
            }
        }
        @if !report.notes.is_empty() {
            ul.notes id="notes" {
                @for note in &report.notes {
                    li class=(note.weight.name()) { b { (note.weight.name()) } " " (note.text) }
                }
            }
        }
    }
}

fn section_html(section: &Section) -> Markup {
    html! {
        section id=(section.id) {
            h2 { (section.title) }
            p.lead { (section.lead) }
            div.panels { @for panel in &section.panels { "\n" (panel_html(panel)) } }
        }
    }
}

fn panel_html(panel: &Panel) -> Markup {
    let (class, width) = match panel.width {
        Width::Full => ("panel", FULL),
        Width::Half => ("panel half", HALF),
        Width::Third => ("panel third", THIRD),
    };
    let title = panel.title.as_str();
    let drawn = match &panel.body {
        Body::Chart(of) => chart(width, |width| of.element(width, title)),
        Body::Table(table) => table_html(table),
        Body::Nothing(reason) => html! { p.nothing { (reason) } },
    };
    html! {
        figure class=(class) id=(panel.id) {
            figcaption title=(panel.definition) {
                h3 { (title) @if !panel.unit.is_empty() { " " small { (panel.unit) } } }
            }
            p.definition { (prose(&panel.definition)) }
            (drawn)
        }
    }
}

/// A sentence, in which names stand between backticks.
fn prose(text: &str) -> Markup {
    html! {
        @for (at, part) in text.split('`').enumerate() {
            @if at % 2 == 0 { (part) } @else { code { (part) } }
        }
    }
}

/// A chart, drawn at every width up to `widest`, because text in a drawing that is only scaled becomes too small
/// to read on a phone. The page shows one of the drawings. A chart of very many shapes has fewer drawings, to keep
/// the page small, and one with a single drawing scrolls.
fn chart(widest: i32, draw: impl Fn(i32) -> Markup) -> Markup {
    let whole = draw(widest);
    let mut others = Vec::new();
    let mut room = OTHERS;
    for width in WIDTHS.into_iter().rev().filter(|width| *width < widest) {
        let drawing = draw(width);
        if drawing.0.len() > room {
            break;
        }
        room -= drawing.0.len();
        others.insert(0, drawing);
    }
    if others.is_empty() && widest > THIRD {
        let hint = "This chart has many parts: scroll it sideways to see all of them.";
        return scrolling("wide large", hint, &whole);
    }
    html! { div.chart { (whole) @for drawing in &others { (drawing) } } }
}

/// A box that scrolls sideways. The script shows the hint if there is more than the box can show.
fn scrolling(class: &str, hint: &str, inside: &Markup) -> Markup {
    html! {
        p.more hidden { (hint) }
        div class=(class) { div.scroll { (inside) } }
    }
}

/// A table. A click on a head sorts it, and a click on a number copies the number.
fn table_html(table: &Table) -> Markup {
    let class = |at| if table.is_number(at) { "num" } else { "word" };
    let classes: Vec<&str> = (0..table.columns.len()).map(class).collect();
    let (shown, left_out) = table.head(ROWS);
    let whole = html! {
        table {
            thead {
                tr {
                    @for (column, class) in table.columns.iter().zip(&classes) {
                        th class=(class) data-key=(column.key) aria-sort="none" title=(column.definition) {
                            button type="button" {
                                (column.label)
                                @if !column.unit.is_empty() { small { (column.unit) } }
                            }
                        }
                    }
                }
            }
            tbody { @for row in &shown.rows { (row_html(row, &table.columns, &classes)) } }
            @if let Some(mean) = &table.mean {
                tfoot { (row_html(mean, &table.columns, &classes)) }
            }
        }
    };
    let hint = format!(
        "This table has {} columns: scroll it sideways to see all of them.",
        table.columns.len()
    );
    html! {
        (scrolling("wide", &hint, &whole))
        @if left_out > 0 {
            p.nothing { (counted(left_out as u64, "more row is", "more rows are")) " in the files." }
        }
    }
}

fn row_html(row: &[Cell], columns: &[Head], classes: &[&str]) -> Markup {
    html! {
        "\n" tr {
            @for ((cell, column), class) in row.iter().zip(columns).zip(classes) {
                @let text = cell.shown(column);
                @match cell {
                    Cell::Text(words) if words.len() > LONG => td class=(class) title=(text) { (text) },
                    Cell::Text(_) => td class=(class) { (text) },
                    _ => td class={ (class) " n" } data-v=(cell.exact()) { (text) },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_sentence_are_code() {
        let sentence = prose("`a_ms` in percent of `b_ms`, if a < b.").0;
        assert_eq!(sentence, "<code>a_ms</code> in percent of <code>b_ms</code>, if a &lt; b.");
    }
}
