//! Shows a plan: tables at the console's width, the same as CSV and JSON, and a page with a chart.

use paceline_analysis::report::{self, Body, Panel, Report as Page, Section};
use paceline_failure::Result;
use paceline_failure::outputs::write_report;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say, thousands};
use paceline_memory::Category;
use paceline_table::chart::{Chart, Color, Picture, Row as Bar, Rows, Shown};
use paceline_table::table::{Columns, Table};
use serde::Serialize;

use super::flags::{Hardware, PlanArgs};
use super::{Found, Row};
use crate::outcome::Origin;
use crate::study::write_files;

/// The most layouts that do not fit, on the console.
const MAX_OVER: usize = 5;

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    model: &'a str,
    params: u64,
    ranks: usize,
    card: Option<&'static str>,
    link: Option<&'a str>,
    rank_bytes: f64,
    layouts: usize,
    refused: usize,
    rows: &'a [Row],
}

/// Prints the plan and writes the files.
pub fn publish(args: &PlanArgs, hardware: &Hardware, found: &Found) -> Result<()> {
    let (fitting, over): (Vec<&Row>, Vec<&Row>) =
        found.rows.iter().partition(|row| row.over_bytes == 0);
    let heading = heading(hardware, found);
    say(&heading);
    if fitting.is_empty() {
        say("\nNo layout fits.");
    } else {
        say(&format!(
            "\n{}",
            columns(&fitting, false).table(fitting.iter().copied()).fitted(line_width())
        ));
        say(&format!("\n{}", memory(&fitting).fitted(line_width())));
    }
    if !over.is_empty() {
        let mut least = over.clone();
        least.sort_by_key(|row| row.over_bytes);
        least.truncate(MAX_OVER);
        let faster = if fitting.is_empty() { "" } else { " that would be faster" };
        say(&format!("\n{}{faster} do not fit. The nearest:", plural(over.len(), "layout")));
        say(&columns(&least, true).table(least.iter().copied()).fitted(line_width()));
    }
    fitting.iter().take(1).for_each(|row| say(&format!("\nThe first: {}", row.command)));
    let origin = Origin::of(args.study.rounds);
    let report = Report {
        origin: &origin,
        model: &found.model,
        params: found.params,
        ranks: hardware.on.ranks,
        card: hardware.on.card.map(|card| card.name),
        link: hardware.link.as_ref().map(|(name, _)| &**name),
        rank_bytes: hardware.rank_bytes,
        layouts: found.count,
        refused: found.refused.0,
        rows: &found.rows,
    };
    let table = columns(&fitting, false).table(&found.rows);
    let title = heading.lines().next().unwrap_or_default().to_owned();
    let picture = Picture { title, subtitle: origin.place(), chart: chart(&fitting) };
    let pictures = (!picture.chart.is_empty()).then(|| ("plan".to_owned(), picture));
    if let Some(folder) = &args.study.charts {
        let body = Body::Chart(chart(&fitting)).or("no layout fits");
        let panels = vec![
            Panel::new("step", "Parts of the step", "ms", "Of the rank that ends last.", body),
            Panel::new(
                "layouts",
                "Layouts",
                "",
                "The fastest first.",
                Body::Table(table.clone()).or("no layouts"),
            ),
        ];
        let page = Page {
            title: heading.lines().next().unwrap_or_default().to_owned(),
            subtitle: format!("{}; {}", origin.place(), origin.command),
            sections: vec![Section::new("plan", "Plan", &heading, panels)],
            csv_table: "layouts".to_owned(),
            ..Page::default()
        };
        write_report(&Disk::default(), folder, "plan", &report::files(&page)?)?;
    }
    write_files(&args.study, &report, &table.csv(), &pictures.into_iter().collect::<Vec<_>>())
}

fn heading(hardware: &Hardware, found: &Found) -> String {
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

/// The columns; those of layouts that do not fit say by how much.
fn columns(rows: &[&Row], is_over: bool) -> Columns<Row> {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let if_any = |has: fn(&Row) -> bool, label: &'static str| {
        if !is_over && rows.iter().any(|row| has(row)) { label } else { "" }
    };
    let if_fits = |label: &'static str| if is_over { "" } else { label };
    Columns::new()
        .add("mesh", "layout", ("", 0), "The axes of the grid of ranks.", |row: &Row| {
            row.layout.mesh()
        })
        .add(
            "strategy",
            "strategy",
            ("", 0),
            "How ranks along dp keep their models equal.",
            |row| row.layout.strategy.clone(),
        )
        .add(
            "schedule",
            if rows.iter().any(|row| row.layout.schedule.is_some()) { "schedule" } else { "" },
            ("", 0),
            "The order of the stages of a pipeline.",
            |row| row.layout.schedule.unwrap_or("-"),
        )
        .add(
            "batch",
            "batch",
            ("", 0),
            "Micro-batches of a step, and the samples of each.",
            |row| format!("{}x{}", row.layout.accumulate, row.layout.micro_batch),
        )
        .add(
            "checkpoint_activations",
            "recompute",
            ("", 0),
            "Whether activations are computed again.",
            |row| if row.layout.checkpoint_activations { "yes" } else { "no" },
        )
        .add("precision", "type", ("", 0), "The type of products.", |row| {
            row.layout.precision.name()
        })
        .add("step_ms", "step", ("ms", 2), "The predicted step.", |row| row.times.step_ms)
        .add(
            "measured_ms",
            if_any(|row| row.measured_ms.is_some(), "measured"),
            ("ms", 2),
            "The measured step.",
            |row| row.measured_ms.map(|of| of.median),
        )
        .add("compute_ms", if_fits("compute"), ("ms", 2), "Passes and optimizer.", |row| {
            row.times.compute_ms
        })
        .add(
            "idle_ms",
            if_any(|row| row.times.idle_ms > 0.0, "idle"),
            ("ms", 2),
            "Waits for other stages.",
            |row| row.times.idle_ms,
        )
        .add(
            "exposed_ms",
            if_fits("exposed"),
            ("ms", 2),
            "Communication along dp that nothing hides.",
            |row| row.times.exposed_ms,
        )
        .add(
            "exchange_ms",
            if_any(|row| row.times.exchange_ms > 0.0, "exchange"),
            ("ms", 2),
            "Exchanges within layers.",
            |row| row.times.exchange_ms,
        )
        .add(
            "mfu_pct",
            if_any(|row| row.times.mfu_pct.is_some(), "MFU"),
            ("%", 1),
            "Model FLOP utilization.",
            |row| row.times.mfu_pct,
        )
        .add("rank_gb", "memory", ("GB", 2), "Of the rank that needs the most.", move |row| {
            gb(row.rank_bytes)
        })
        .add(
            "over_gb",
            if is_over { "over" } else { "" },
            ("GB", 2),
            "By how much that is too much.",
            move |row| gb(row.over_bytes),
        )
        .add("limit", if_fits("limit"), ("", 0), "The largest part of the step.", |row| {
            row.times.limit.clone()
        })
}

/// The memory of each layout by category.
fn memory(rows: &[&Row]) -> Table {
    let mut columns = Columns::new()
        .add("mesh", "layout", ("", 0), "", |row: &Row| row.layout.mesh())
        .add("strategy", "strategy", ("", 0), "", |row| row.layout.strategy.clone());
    for name in Category::ALL.map(Category::name).into_iter().chain(["total"]) {
        let of = move |row: &Row| row.bytes.get(name).copied().unwrap_or(0);
        if rows.iter().any(|row| of(row) > 0) {
            columns = columns.add(name, name, ("MB", 2), "", move |row| of(row) as f64 / 1e6);
        }
    }
    if rows.iter().any(|row| row.measured_bytes.is_some()) {
        let of = |row: &Row| row.measured_bytes.map(|bytes| bytes as f64 / 1e6);
        columns = columns.add("measured", "measured", ("MB", 2), "", of);
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
