//! Shows a plan: tables at the console's width, the same as CSV and JSON, and a page with a chart.

use paceline_analysis::report::{self, Body, Panel, Report as Page, Section};
use paceline_failure::Result;
use paceline_failure::outputs::write_report;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say, thousands};
use paceline_memory::Category;
use paceline_table::chart::{Chart, Color, Picture, Row as Bar, Rows, Shown};
use paceline_table::table::{Cell, Columns, Table};
use serde::Serialize;

use super::flags::{PlanArgs, RankHardware};
use super::{Found, Row};
use crate::outcome::Origin;
use crate::report::tabled;
use crate::study::write_files;

/// The most layouts that do not fit, on the console.
const MAX_OVER: usize = 5;

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    ranks: usize,
    card: Option<&'static str>,
    link: Option<&'a str>,
    bytes_per_rank: f64,
    #[serde(flatten)]
    found: &'a Found,
}

/// Prints the plan and writes the files.
pub fn publish(args: &PlanArgs, hardware: &RankHardware, found: &Found) -> Result<()> {
    let (fitting, over): (Vec<&Row>, Vec<&Row>) =
        found.rows.iter().partition(|row| row.over_bytes == 0);
    let heading = heading(hardware, found);
    say(&heading);
    if fitting.is_empty() {
        say("\nNo layout fits.");
    } else {
        say(&format!("\n{}", table(fitting.iter().copied(), false).fitted(line_width())));
        say(&format!("\n{}", memory(&fitting).fitted(line_width())));
    }
    if !over.is_empty() {
        let mut least = over.clone();
        least.sort_by_key(|row| row.over_bytes);
        least.truncate(MAX_OVER);
        let faster = if fitting.is_empty() { "" } else { " that would be faster" };
        say(&format!("\n{}{faster} do not fit. The nearest:", plural(over.len(), "layout")));
        say(&table(least.iter().copied(), true).fitted(line_width()));
    }
    if !found.formulas.is_empty() {
        say(&format!("\n{}", found.formulas.join("\n")));
    }
    fitting.iter().take(1).for_each(|row| say(&format!("\nThe first: {}", row.command)));
    let origin = Origin::of(args.study.rounds);
    let rows = table(found.rows.iter(), false);
    let title = heading.lines().next().unwrap_or_default().to_owned();
    let picture = Picture { title, subtitle: origin.place(), chart: chart(&fitting) };
    if let Some(folder) = &args.study.charts {
        let files = report::files(&page(&heading, &picture, &rows, &origin))?;
        write_report(&Disk::default(), folder, "plan", &files)?;
    }
    let pictures = (!picture.chart.is_empty()).then(|| ("plan".to_owned(), picture));
    let report = Report {
        origin: &origin,
        ranks: hardware.on.ranks,
        card: hardware.on.card.map(|card| card.name),
        link: hardware.link.as_ref().map(|(name, _)| &**name),
        bytes_per_rank: hardware.rank_bytes,
        found,
    };
    write_files(&args.study, &report, &rows.csv(), &Vec::from_iter(pictures))
}

fn page(heading: &str, picture: &Picture, rows: &Table, origin: &Origin) -> Page {
    let steps = Body::Chart(picture.chart.clone()).or("no layout fits");
    let rows = Body::Table(rows.clone()).or("no layouts");
    let panels = vec![
        Panel::new("step", "Parts of the step", "ms", "Of the rank that ends last.", steps),
        Panel::new("layouts", "Layouts", "", "The fastest first.", rows),
    ];
    Page {
        title: picture.title.clone(),
        subtitle: format!("{}; {}", origin.place(), origin.command),
        sections: vec![Section::new("plan", "Plan", heading, panels)],
        csv_table: "layouts".to_owned(),
        ..Page::default()
    }
}

fn heading(hardware: &RankHardware, found: &Found) -> String {
    let (ranks, params) = (hardware.on.ranks, thousands(found.params));
    let place = hardware.on.card.map_or("this host".to_owned(), |card| card.name.to_owned());
    let link = hardware.link.as_ref().map_or(String::new(), |(name, _)| format!(" on {name}"));
    let hosts = hardware.hosts.as_ref().map_or(String::new(), |(name, hosts)| {
        format!(", {} per host on {name}", hosts.ranks_per_host)
    });
    let speed = match &hardware.on.card {
        Some(card) => format!(
            "Products reach {} % of the peak of {} (--mfu), and memory {} GB/s.",
            100.0 * hardware.mfu,
            card.name,
            card.bytes_per_s / 1e9
        ),
        None => "Blocks were measured here, and ranks without communication.".to_owned(),
    };
    let refused = match &found.refused {
        (0, _) => String::new(),
        (count, reason) => format!(
            "\n{count} more are refused. The first: {}",
            reason.as_deref().unwrap_or_default()
        ),
    };
    format!(
        "Plan of {}, {params} parameters: {} of {place}{link}{hosts}\nSteps of {}; {:.1} GB per rank; {} layouts. {speed}{refused}",
        found.model,
        plural(ranks, "rank"),
        plural(found.samples, "sample"),
        hardware.rank_bytes / 1e9,
        found.count - found.refused.0
    )
}

/// The table of these layouts. On a console it has what some of them have, or by how much they do not fit.
#[rustfmt::skip]
fn table<'a>(rows: impl Iterator<Item = &'a Row> + Clone, is_over: bool) -> Table {
    let any = |has: fn(&Row) -> bool, label: &'static str| if rows.clone().any(has) { label } else { "" };
    let fits = |has: fn(&Row) -> bool, label| if is_over { "" } else { any(has, label) };
    let heads = [
        ("mesh", "layout", ("", 0)),
        ("strategy", "strategy", ("", 0)),
        ("schedule", any(|row| row.layout.schedule.is_some(), "schedule"), ("", 0)),
        ("batch", "batch", ("", 0)),
        ("checkpoint_activations", any(|row| row.layout.checkpoint_activations, "recompute"), ("", 0)),
        ("precision", "type", ("", 0)),
        ("step_ms", "step", ("ms", 2)),
        ("measured_ms", fits(|row| row.measured_ms.is_some(), "measured"), ("ms", 2)),
        ("compute_ms", fits(|_| true, "compute"), ("ms", 2)),
        ("idle_ms", fits(|row| row.times.idle_ms > 0.0, "idle"), ("ms", 2)),
        ("exposed_ms", fits(|row| row.times.exposed_ms > 0.0, "exposed"), ("ms", 2)),
        ("exchange_ms", fits(|row| row.times.exchange_ms > 0.0, "exchange"), ("ms", 2)),
        ("mfu_pct", fits(|row| row.times.mfu_pct.is_some(), "MFU"), ("%", 1)),
        ("rank_gb", "memory", ("GB", 2)),
        ("over_gb", if is_over { "over" } else { "" }, ("GB", 2)),
        ("limit", fits(|_| true, "limit"), ("", 0)),
    ];
    let cells = |Row { layout, times, rank_bytes, over_bytes, measured_ms, .. }: &Row| -> [Cell; 16] {
        let text = |words: &str| Cell::Text(words.to_owned());
        [
            Cell::Text(layout.mesh()),
            text(&layout.strategy),
            text(layout.schedule.unwrap_or("-")),
            Cell::Text(format!("{}x{}", layout.accumulate, layout.micro_batch)),
            text(if layout.checkpoint_activations { "yes" } else { "no" }),
            text(layout.precision.name()),
            times.step_ms.into(),
            measured_ms.map(|of| of.median).into(),
            times.compute_ms.into(),
            times.idle_ms.into(),
            times.exposed_ms.into(),
            times.exchange_ms.into(),
            times.mfu_pct.into(),
            (*rank_bytes as f64 / 1e9).into(),
            (*over_bytes as f64 / 1e9).into(),
            text(&times.limit),
        ]
    };
    tabled(heads, rows.clone().map(cells))
}

/// The memory of each layout by category.
fn memory(rows: &[&Row]) -> Table {
    let mut columns = Columns::new()
        .add("mesh", "layout", ("", 0), "", |row: &Row| row.layout.mesh())
        .add("strategy", "strategy", ("", 0), "", |row| row.layout.strategy.clone());
    for name in Category::ALL.map(Category::name).into_iter().chain(["total", "measured"]) {
        let of = move |row: &Row| match name {
            "measured" => row.measured_bytes,
            name => row.bytes.get(name).copied().filter(|bytes| *bytes > 0),
        };
        if rows.iter().any(|row| of(row).is_some()) {
            let mb = move |row: &Row| of(row).map(|bytes| bytes as f64 / 1e6);
            columns = columns.add(name, name, ("MB", 2), "", mb);
        }
    }
    columns.table(rows.iter().copied())
}

/// The steps as bars of their parts.
fn chart(rows: &[&Row]) -> Chart {
    let bar = |row: &&Row| {
        let of = &row.times;
        let words = [
            row.layout.mesh(),
            row.layout.strategy.clone(),
            row.layout.schedule.unwrap_or_default().to_owned(),
            format!("{}x{}", row.layout.accumulate, row.layout.micro_batch),
        ];
        let label = words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
        let parts = [
            ("compute", of.compute_ms, Color::Compute),
            ("idle", of.idle_ms, Color::Idle),
            ("exposed", of.exposed_ms, Color::Communication),
            ("exchange", of.exchange_ms, Color::Both),
        ];
        Bar::stack(label, parts.into_iter().filter(|(_, ms, _)| *ms > 0.0))
    };
    Chart::Rows(Rows::new(Shown::Parts, "ms", rows.iter().map(bar)))
}
