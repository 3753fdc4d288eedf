//! `sweep.html`: the ranking of a sweep, its settings and their effects, for a browser.

use paceline_analysis::report::chart::{Color, Row};
use paceline_analysis::report::{Body, Panel, Report as Page, Section, Weight};
use paceline_host::text::plural;
use paceline_observe::figures::figure::Better;
use paceline_table::table::{Columns, Table};

use super::Report;
use super::effects::Effect;
use crate::step::STEP_TIMES;

/// The page.
pub fn page(of: &Report) -> Page {
    let figure = of.ranking.figure;
    let at = of.ranked_at();
    let bars = of.rows.iter().map(|row| {
        let spread = row.figures[at].filter(|_| row.failure.is_none());
        let bar = Row::bar(&row.name, spread.map(|of| of.median), Color::Compute);
        Row { interval: spread.map(|of| [of.min, of.max]), ..bar }
    });
    let is_better = if of.ranking.better == Better::Higher { "More" } else { "Less" };
    let rule = format!("{is_better} is better. {}", of.rule);
    let bars = Panel::new(
        "medians",
        &format!("Cases by {}", figure.label),
        figure.unit,
        &format!("{} The median over the rounds, with the range. {rule}", figure.definition),
        Body::bars(figure.unit, bars).or("No case has a result."),
    );
    let table = of.table().with_columns(|head| !head.label.is_empty());
    let definition = "A row per case, the best first, as sweep.csv, which also has every spread.";
    let table = Panel::new("ranking", "Ranking", "", definition, Body::Table(table));
    let mut page = Page {
        title: format!("Sweep of {}", of.keys.join(", ")),
        subtitle: format!(
            "{}, {}; {}, {}, {}",
            of.machine,
            of.date,
            plural(of.rows.len(), "case"),
            plural(of.rounds, "round"),
            of.command
        ),
        sections: vec![
            Section::new(
                "cases",
                "Ranking",
                "Which case is best, and by how much.",
                vec![bars, table],
            ),
            Section::new(
                "effects",
                "Effects",
                "What each value of a setting does, all other settings being the same.",
                vec![effects(of)],
            ),
            Section::new("settings", "Settings", "What all cases share.", vec![settings(of)]),
        ],
        csv_table: "ranking".to_owned(),
        ..Page::default()
    };
    for row in &of.rows {
        if let Some(failure) = &row.failure {
            page.note(Weight::Warning, format!("{} has failed: {failure}", row.name));
        }
    }
    page.note(Weight::Note, rule);
    page.note(Weight::Note, STEP_TIMES);
    page
}

fn effects(of: &Report) -> Panel {
    let columns = Columns::<Effect>::new()
        .add("key", "setting", ("", 0), "The setting.", |of| of.key.clone())
        .add("value", "value", ("", 0), "Its value.", |of| of.value.clone())
        .add("beside", "beside", ("", 0), "The value that is compared with.", |of| {
            of.beside.clone()
        })
        .add(
            "change_pct",
            "change",
            ("%", 1),
            "By how much the figure that ranks is larger: the geometric mean over the pairs.",
            |of| of.change_pct,
        )
        .add("pairs", "pairs", ("", 0), "Pairs of cases that differ in nothing else.", |of| {
            of.pairs
        })
        .add(
            "pairs_that_differ",
            "that differ",
            ("", 0),
            "Pairs whose difference is more than noise.",
            |of| of.pairs_that_differ,
        );
    let definition = "Each value beside the first one that was given for the setting. Where pairs disagree, settings act on each other.";
    let body =
        Body::Table(columns.table(&of.effects)).or("Only one value of each setting was given.");
    Panel::new("effects", "Effects of the settings", "", definition, body)
}

fn settings(of: &Report) -> Panel {
    let columns = Columns::<(String, String)>::new()
        .add("setting", "setting", ("", 0), "The flag.", |of: &(String, String)| of.0.clone())
        .add("value", "value", ("", 0), "Its value.", |of| of.1.clone());
    let table: Table = columns.table(&of.settings);
    let body = Body::Table(table).or("All settings have their defaults.");
    Panel::new(
        "shared",
        "Settings of all cases",
        "",
        "What was stated for all cases; the rest are defaults.",
        body,
    )
}
