//! The page of a report: one file that contains its style, its script and its drawings, and loads nothing.
//!
//! A [`Report`] goes in, and the text of the page comes out. This module does not know what was measured.

use std::fmt::Write as _;

use maud::Markup;
use paceline_files::printable_lines;

use super::chart::{FULL, HALF, PageColor, THIRD, WIDTHS};
use super::{Body, Figure, Panel, Report, Section, Width};
use crate::table::{Cell, Column, Table, counted};

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
    let mut body = String::new();
    head(&mut body, report);
    for section in &report.sections {
        add_section(&mut body, section);
    }
    let title = escaped(&report.title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{body}\
         <div id=\"said\" role=\"status\" aria-live=\"polite\"></div>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

fn head(out: &mut String, report: &Report) {
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<header>\n<div class=\"bar\"><h1>{}</h1>\
         <button id=\"face\" type=\"button\" title=\"Light or dark\">light / dark</button></div>\n\
         <p class=\"sub\">{}</p>\n",
        escaped(&report.title),
        escaped(&report.subtitle)
    );
    if !report.figures.is_empty() {
        out.push_str("<dl class=\"figures\">\n");
        for Figure { column, value } in &report.figures {
            let _ = writeln!(
                out,
                "<div title=\"{}\"><dt>{}</dt><dd><span class=\"n\" data-v=\"{}\">{}</span>\
                 <small>{}</small></dd></div>",
                escaped(&column.definition),
                escaped(&column.label),
                escaped(&value.exact()),
                escaped(&value.shown(column)),
                escaped(&column.unit)
            );
        }
        out.push_str("</dl>\n");
    }
    if !report.notes.is_empty() {
        out.push_str("<ul class=\"notes\" id=\"notes\">\n");
        for note in &report.notes {
            let (kind, text) = (note.weight.name(), escaped(&note.text));
            let _ = writeln!(out, "<li class=\"{kind}\"><b>{kind}</b> {text}</li>");
        }
        out.push_str("</ul>\n");
    }
    let links = report.sections.iter().filter(|section| !section.panels.is_empty());
    let links = links.map(|s| format!("<a href=\"#{}\">{}</a>", escaped(&s.id), escaped(&s.title)));
    let _ = write!(out, "<nav>{}</nav>\n</header>\n", links.collect::<String>());
}

fn add_section(out: &mut String, section: &Section) {
    if section.panels.is_empty() {
        return;
    }
    let (id, title, lead) = (escaped(&section.id), escaped(&section.title), escaped(&section.lead));
    let _ = write!(
        out,
        "<section id=\"{id}\">\n<h2>{title}</h2>\n<p class=\"lead\">{lead}</p>\n<div class=\"panels\">\n"
    );
    for panel in &section.panels {
        add_panel(out, panel);
    }
    out.push_str("</div>\n</section>\n");
}

fn add_panel(out: &mut String, panel: &Panel) {
    let (class, width) = match panel.width {
        Width::Full => ("panel", FULL),
        Width::Half => ("panel half", HALF),
        Width::Third => ("panel third", THIRD),
    };
    let unit = match panel.unit.as_str() {
        "" => String::new(),
        unit => format!(" <small>{}</small>", escaped(unit)),
    };
    let definition = escaped(&panel.definition);
    let _ = write!(
        out,
        "<figure class=\"{class}\" id=\"{}\">\n<figcaption title=\"{definition}\"><h3>{}{unit}</h3>",
        escaped(&panel.id),
        escaped(&panel.title)
    );
    let title = panel.title.as_str();
    let (entries, drawn) = match &panel.body {
        Body::Bars(bars) => (Vec::new(), chart(width, |width| bars.svg(width, title))),
        Body::Stacked(all) => (all.legend(), chart(width, |width| all.svg(width, title))),
        Body::Donuts(donuts) => (donuts.legend(), chart(width, |width| donuts.svg(width, title))),
        Body::Lanes(lanes) => (lanes.legend(), chart(width, |width| lanes.svg(width, title))),
        Body::Lines(lines) => (lines.legend(), chart(width, |width| lines.svg(width, title))),
        Body::Table(table) => (Vec::new(), table_html(table)),
        Body::Nothing(reason) => {
            (Vec::new(), format!("<p class=\"nothing\">{}</p>\n", escaped(reason)))
        }
    };
    out.push_str(&legend(&entries));
    let _ =
        write!(out, "</figcaption>\n<p class=\"definition\">{}</p>\n", prose(&panel.definition));
    let _ = writeln!(out, "{drawn}</figure>");
}

/// A sentence, in which names stand between backticks.
fn prose(text: &str) -> String {
    let part = |(at, part): (usize, &str)| match at % 2 {
        0 => escaped(part),
        _ => format!("<code>{}</code>", escaped(part)),
    };
    text.split('`').enumerate().map(part).collect()
}

/// A chart, drawn at every width up to `widest`, because text in a drawing that is only scaled becomes too small
/// to read on a phone. The page shows one of the drawings. A chart of very many shapes has fewer drawings, to keep
/// the page small, and one with a single drawing scrolls.
fn chart(widest: i32, draw: impl Fn(i32) -> Markup) -> String {
    let whole = draw(widest).0;
    let mut others = Vec::new();
    let mut room = OTHERS;
    for width in WIDTHS.into_iter().rev().filter(|width| *width < widest) {
        let drawing = draw(width).0;
        if drawing.len() > room {
            break;
        }
        room -= drawing.len();
        others.insert(0, drawing);
    }
    if others.is_empty() && widest > THIRD {
        let hint = "This chart has many parts: scroll it sideways to see all of them.";
        return scrolling("large", hint, &whole);
    }
    format!("<div class=\"chart\">{whole}{}</div>\n", others.concat())
}

/// A box that scrolls sideways. The script shows the hint if there is more than the box can show.
fn scrolling(class: &str, hint: &str, inside: &str) -> String {
    format!(
        "<p class=\"more\" hidden>{hint}</p>\n\
         <div class=\"wide {class}\"><div class=\"scroll\">{inside}</div></div>\n"
    )
}

fn legend(entries: &[(String, PageColor)]) -> String {
    if entries.len() < 2 {
        return String::new();
    }
    let entry = |(name, color): &(String, PageColor)| {
        format!(
            "<span><i style=\"background:var({})\"></i>{}</span>",
            color.variable(),
            escaped(name)
        )
    };
    format!("<div class=\"legend\">{}</div>", entries.iter().map(entry).collect::<String>())
}

/// A table. A click on a head sorts it, and a click on a number copies the number.
fn table_html(table: &Table) -> String {
    let class = |at| if table.is_number(at) { "num" } else { "word" };
    let classes: Vec<&str> = (0..table.columns.len()).map(class).collect();
    let mut out = String::from("<table>\n<thead><tr>");
    for (Column { key, label, unit, definition, .. }, class) in table.columns.iter().zip(&classes) {
        let unit = match unit.as_str() {
            "" => String::new(),
            unit => format!("<small>{}</small>", escaped(unit)),
        };
        let _ = write!(
            out,
            "<th class=\"{class}\" data-key=\"{}\" aria-sort=\"none\" title=\"{}\">\
             <button type=\"button\">{}{unit}</button></th>",
            escaped(key),
            escaped(definition),
            escaped(label)
        );
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    let (shown, left_out) = table.head(ROWS);
    for row in &shown.rows {
        add_row(&mut out, row, &table.columns, &classes);
    }
    out.push_str("</tbody>\n");
    if let Some(mean) = &table.mean {
        out.push_str("<tfoot>\n");
        add_row(&mut out, mean, &table.columns, &classes);
        out.push_str("</tfoot>\n");
    }
    out.push_str("</table>");
    let hint = format!(
        "This table has {} columns: scroll it sideways to see all of them.",
        table.columns.len()
    );
    let mut out = scrolling("", &hint, &out);
    if left_out > 0 {
        let more = counted(left_out as u64, "more row is", "more rows are");
        let _ = writeln!(out, "<p class=\"nothing\">{more} in the files.</p>");
    }
    out
}

fn add_row(out: &mut String, row: &[Cell], columns: &[Column], classes: &[&str]) {
    out.push_str("<tr>");
    for ((cell, column), class) in row.iter().zip(columns).zip(classes) {
        let (exact, text) = (escaped(&cell.exact()), escaped(&cell.shown(column)));
        let _ = match cell {
            Cell::Text(words) if words.len() > LONG => {
                write!(out, "<td class=\"{class}\" title=\"{text}\">{text}</td>")
            }
            Cell::Text(_) => write!(out, "<td class=\"{class}\">{text}</td>"),
            _ => write!(out, "<td class=\"{class} n\" data-v=\"{exact}\">{text}</td>"),
        };
    }
    out.push_str("</tr>\n");
}

/// Text escaped for an element or an attribute of the page. A name in a trace may hold anything, and most control
/// characters may not stand in XML at all.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable_lines(text).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_sentence_are_code() {
        let sentence = prose("`a_ms` in percent of `b_ms`, if a < b.");
        assert_eq!(sentence, "<code>a_ms</code> in percent of <code>b_ms</code>, if a &lt; b.");
    }
}
