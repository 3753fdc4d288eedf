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
use crate::study::write_files;

/// The most layouts that do not fit, on the console.
const MAX_OVER: usize = 5;

/// Columns that layouts which do not fit are shown without.
const OF_FITTING: &[&str] =
    &["measured_ms", "compute_ms", "idle_ms", "exposed_ms", "exchange_ms", "mfu_pct", "limit"];

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
    let is_fitting = |row: &&Row| row.over_bytes == 0;
    let (fitting, mut over): (Vec<&Row>, Vec<&Row>) = found.rows.iter().partition(is_fitting);
    let heading = heading(hardware, found);
    say(&heading);
    if fitting.is_empty() {
        say("\nNo layout fits.");
    } else {
        for table in [table(&fitting, &[]), memory(&fitting)] {
            say(&format!("\n{}", table.fitted(line_width())));
        }
    }
    if !over.is_empty() {
        let faster = if fitting.is_empty() { "" } else { " that would be faster" };
        say(&format!("\n{}{faster} do not fit. The nearest:", plural(over.len(), "layout")));
        over.sort_by_key(|row| row.over_bytes);
        over.truncate(MAX_OVER);
        say(&table(&over, OF_FITTING).fitted(line_width()));
    }
    if !found.formulas.is_empty() {
        say(&format!("\n{}", found.formulas.join("\n")));
    }
    fitting.iter().take(1).for_each(|row| say(&format!("\nThe first: {}", row.command)));
    let origin = Origin::of(args.study.rounds);
    let rows = table(&found.rows.iter().collect::<Vec<_>>(), &["over_gb"]);
    let title = heading.lines().next().unwrap_or_default().to_owned();
    let picture = Picture { title, subtitle: origin.place(), chart: chart(&fitting) };
    if let Some(folder) = &args.study.charts {
        let files = report::files(&page(&heading, &picture, &rows, &origin))?;
        write_report(&Disk::default(), folder, "plan", &files)?;
    }
    let pictures = (!picture.chart.is_empty()).then(|| ("plan".to_owned(), picture));
    let report = Report {
        origin: &origin,
        ranks: hardware.ranks,
        card: hardware.card.map(|card| card.name),
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
    let RankHardware { ranks, card, link, hosts, .. } = hardware;
    let place = card.map_or("this host", |card| card.name);
    let link = link.as_ref().map_or(String::new(), |(name, _)| format!(" on {name}"));
    let hosts = hosts.as_ref().map_or(String::new(), |(name, hosts)| {
        format!(", {} per host on {name}", hosts.ranks_per_host)
    });
    let speed = match card {
        Some(card) => format!(
            "Products reach {} % of the peak of {place} (--mfu), and memory {} GB/s.",
            100.0 * hardware.mfu,
            card.bytes_per_s / 1e9
        ),
        None => "Blocks were measured here, and ranks without communication.".to_owned(),
    };
    let (refused, reason) = &found.refused;
    let reason = reason.as_ref().map_or(String::new(), |reason| {
        format!("\n{refused} more are refused. The first: {reason}")
    });
    format!(
        "Plan of {}, {} parameters: {} of {place}{link}{hosts}\nSteps of {}; {:.1} GB per rank; {} layouts. {speed}{reason}",
        found.model,
        thousands(found.params),
        plural(*ranks, "rank"),
        plural(found.samples, "sample"),
        hardware.rank_bytes / 1e9,
        found.count - refused
    )
}

/// The table of these layouts. People see the columns in which a layout has something, but not those that are left out.
#[rustfmt::skip]
fn table(rows: &[&Row], left_out: &[&str]) -> Table {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let columns = Columns::new()
        .add("mesh", "layout", ("", 0), "", |row: &Row| row.layout.mesh())
        .add("strategy", "strategy", ("", 0), "", |row| row.layout.strategy)
        .add("schedule", "schedule", ("", 0), "", |row| row.layout.schedule.unwrap_or("-"))
        .add("batch", "batch", ("", 0), "", |row| format!("{}x{}", row.layout.accumulate, row.layout.micro_batch))
        .add("checkpoint_activations", "recompute", ("", 0), "", |row| if row.layout.checkpoint_activations { "yes" } else { "no" })
        .add("precision", "type", ("", 0), "", |row| row.layout.precision.name())
        .add("step_ms", "step", ("ms", 2), "", |row| row.times.step_ms)
        .add("measured_ms", "measured", ("ms", 2), "", |row| row.measured_ms.map(|of| of.median))
        .add("compute_ms", "compute", ("ms", 2), "", |row| row.times.compute_ms)
        .add("idle_ms", "idle", ("ms", 2), "", |row| row.times.idle_ms)
        .add("exposed_ms", "exposed", ("ms", 2), "", |row| row.times.exposed_ms)
        .add("exchange_ms", "exchange", ("ms", 2), "", |row| row.times.exchange_ms)
        .add("mfu_pct", "MFU", ("%", 1), "", |row| row.times.mfu_pct)
        .add("rank_gb", "memory", ("GB", 2), "", move |row| gb(row.rank_bytes))
        .add("over_gb", "over", ("GB", 2), "", move |row| gb(row.over_bytes))
        .add("limit", "limit", ("", 0), "", |row| row.times.limit.clone());
    without_empty(columns.table(rows.iter().copied()), left_out)
}

/// The table with labels of the columns in which a row has something, but not of those that are left out.
fn without_empty(mut table: Table, left_out: &[&str]) -> Table {
    let has_nothing = |cell: &Cell| match cell {
        Cell::Text(words) => ["-", "no"].contains(&&**words),
        cell => cell.number().unwrap_or(0.0) == 0.0,
    };
    for (at, head) in table.columns.iter_mut().enumerate() {
        if table.rows.iter().all(|row| has_nothing(&row[at])) || left_out.contains(&&*head.key) {
            head.label = "".into();
        }
    }
    table
}

/// The memory of each layout by category.
fn memory(rows: &[&Row]) -> Table {
    let mut columns = Columns::new()
        .add("mesh", "layout", ("", 0), "", |row: &Row| row.layout.mesh())
        .add("strategy", "strategy", ("", 0), "", |row| row.layout.strategy);
    for name in Category::ALL.map(Category::name).into_iter().chain(["total", "measured"]) {
        let of = move |row: &Row| match name {
            "measured" => row.measured_bytes,
            name => row.bytes.get(name).copied().filter(|bytes| *bytes > 0),
        };
        let mb = move |row: &Row| of(row).map(|bytes| bytes as f64 / 1e6);
        columns = columns.add(name, name, ("MB", 2), "", mb);
    }
    without_empty(columns.table(rows.iter().copied()), &[])
}

/// The steps as bars of their parts.
fn chart(rows: &[&Row]) -> Chart {
    let bar = |Row { layout, times, .. }: &&Row| {
        let schedule = layout.schedule.map_or(String::new(), |name| format!(" {name}"));
        let batch = format!("{}x{}", layout.accumulate, layout.micro_batch);
        let label = format!("{} {}{schedule} {batch}", layout.mesh(), layout.strategy);
        let parts = [
            ("compute", times.compute_ms, Color::Compute),
            ("idle", times.idle_ms, Color::Idle),
            ("exposed", times.exposed_ms, Color::Communication),
            ("exchange", times.exchange_ms, Color::Both),
        ];
        Bar::stack(label, parts.into_iter().filter(|(_, ms, _)| *ms > 0.0))
    };
    Chart::Rows(Rows::new(Shown::Parts, "ms", rows.iter().map(bar)))
}
