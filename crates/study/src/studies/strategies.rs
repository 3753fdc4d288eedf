//! `paceline train --ddp-choice all` and `--shard-choice all`: run one strategy after the other with the same seed and data,
//! and compare all in one table. With `published` instead of `all`, those of a published comparison, with its accumulation.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_choices::registry::read;
use paceline_choices::strategies::Synchronizes;
use paceline_failure::outputs::{check_file, write_bytes, write_json, write_stated_json};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::text::{line_width, say, warn};
use paceline_launch::environment::Placement;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::find;
use paceline_run::folder;
use paceline_settings::flags::{Comparison, RunFlags, Several};
use paceline_settings::spec::RunSpec;
use paceline_table::table::{Cell, Column, Columns, Head, Table};
use serde::Serialize;

use crate::ledger::{Ending, Ledger};
use crate::plan::Case;
use crate::step::STEP_TIMES;
use crate::{command_line, execute, refuse_ranks, spec, usage};

/// The strategy whose bits the others are compared with.
const REFERENCE: &str = "simple_ddp";

/// A run of the comparison.
#[derive(Clone, Debug, Serialize)]
struct Row {
    /// The strategy's name in the comparison.
    choice: String,
    strategy: String,
    accumulate: usize,
    /// Wall-clock time of the run, from its start to its end.
    seconds: f64,
    /// The price of that time, if the user gave a price per hour.
    cost: Option<f64>,
    /// Whether it ended with the same parameters as the reference, bit for bit.
    same_bits: bool,
    /// The run's own summary.
    summary: RunSummary,
}

/// A strategy that was not run because these flags do not fit it.
#[derive(Clone, Debug, Serialize)]
struct LeftOut {
    strategy: String,
    /// The reason.
    reason: String,
}

/// All runs of the comparison.
#[derive(Clone, Debug, Serialize)]
struct Report {
    machine: String,
    date: String,
    command: String,
    /// The flag that asked for the comparison.
    comparison: &'static str,
    price_per_hour: Option<f64>,
    runs: Vec<Row>,
    left_out: Vec<LeftOut>,
}

/// Makes all runs, prints the table, and writes the report.
pub fn compare(
    given: &RunSpec,
    comparison: Comparison,
    several: Several,
    placement: Option<Placement>,
) -> Result<u8> {
    let flag = format!("--{} {}", comparison.key(), several.word());
    refuse_ranks(&flag, placement)?;
    if several == Several::Published && !given.has("nproc") {
        return usage(format!(
            "{flag} needs the number of ranks: pass --nproc 2, as in the published runs"
        ));
    }
    let args: RunFlags = read(&given.parse()?)?;
    if given.has("strategy") {
        return usage(format!("{flag} runs several strategies; leave --strategy out"));
    }
    if args.checkpoints.save.is_some() {
        return usage(format!(
            "--save: with {flag}, every run would write the same checkpoint; leave it out"
        ));
    }
    let price_per_hour = args.compare.price_per_hour;
    if let Some(price) = price_per_hour.filter(|price| !(*price >= 0.0 && price.is_finite())) {
        return usage(format!("--price-per-hour {price}: pass a price that is finite, at least 0"));
    }
    let own = [
        comparison.key(),
        "price-per-hour",
        "json",
        "quiet",
        // The folder with the folders of all runs.
        "name",
        "run-dir",
    ];
    let config = spec::resolve(&given.without(&own[..own.len() - 2]))?;
    let silent: &[&str] = if args.output.quiet { &["log-every"] } else { &[] };
    let flags = given.without(&own).without(silent);
    let (asked, world_size) = (given.number("accumulate"), config.world_size);
    let (mut cases, mut warnings, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
    for (choice, strategy) in comparison.strategies() {
        let published = comparison.published().iter().find(|(name, _)| *name == choice);
        let accumulate = match (several, published) {
            (Several::All, _) => asked.unwrap_or(1),
            (Several::Published, Some((_, 1))) => 1,
            (Several::Published, Some((_, batches))) => asked.unwrap_or(*batches),
            (Several::Published, None) => continue,
        };
        if strategy.of.synchronizes == Synchronizes::Alone && world_size > 1 {
            continue;
        }
        let flags = flags.with("strategy", strategy.name).with("accumulate", accumulate);
        match spec::resolve(&flags) {
            Ok(config) => {
                let name = choice.to_owned();
                cases.push(Case { name, values: Vec::new(), spec: flags });
                warnings.push(config.warnings);
            }
            // The flags were found to be valid above; they only do not fit this strategy.
            Err(Failure::Usage(reason)) => {
                left_out.push(LeftOut { strategy: choice.to_owned(), reason });
            }
            Err(other) => return Err(other),
        }
    }
    if cases.is_empty() {
        let reason = left_out.into_iter().next().map_or(String::new(), |left| left.reason);
        return usage(format!("{flag}: no strategy fits these flags: {reason}"));
    }
    folder::check_runs(config.output.run_dir.as_deref())?;
    args.output.json.as_deref().map_or(Ok(()), |file| check_file("--json", file))?;
    // Warnings about some of the strategies only are in their run folders.
    let everywhere = |warning: &&String| warnings.iter().all(|others| others.contains(warning));
    for warning in warnings.iter().take(1).flatten().filter(everywhere) {
        warn(warning);
    }

    let disk = Disk::default();
    let runs_folder = folder::runs(config.output.run_dir.as_deref());
    let name = folder::name_of(&config, several.word());
    let folder = folder::create_named(&disk, &runs_folder, &name)?;
    let absolute = std::path::absolute(&folder)
        .map_err(|e| Failure::io("the run folder has no absolute path", e))?;
    let mut ledger = Ledger::default();
    execute::make(&cases, 1, Duration::MAX, Some(&absolute), &mut ledger)?;
    let runs = || {
        let all = ledger.records().iter().zip(&cases);
        all.filter_map(|(record, case)| {
            let Ending::Summary(summary) = &record.ending else { return None };
            Some((case, record.seconds, summary))
        })
    };
    let weights = |summary: &RunSummary| summary.text("weights_sha256").to_owned();
    let reference = runs().find(|(.., summary)| summary.text("strategy") == REFERENCE);
    let reference = reference.map(|(.., summary)| weights(summary));
    let rows = runs().map(|(case, seconds, summary)| Row {
        choice: case.name.clone(),
        strategy: summary.text("strategy").to_owned(),
        accumulate: case.spec.number("accumulate").unwrap_or(1),
        seconds,
        cost: price_per_hour.map(|price| price * seconds / 3600.0),
        same_bits: Some(weights(summary)) == reference,
        summary: summary.clone(),
    });
    let rows: Vec<Row> = rows.collect();
    let report = Report {
        machine: resources::machine(),
        date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
        command: command_line(),
        comparison: comparison.key(),
        price_per_hour,
        runs: rows,
        left_out,
    };
    write_json(&disk, &folder.join("comparison.json"), &report)?;
    write_bytes(&disk, &folder.join("comparison.csv"), table(&report).csv().as_bytes())?;
    if let Some(file) = &args.output.json {
        write_stated_json(&disk, file, &report)?;
    }
    if !args.output.quiet {
        say(&text(&report, line_width()));
        say(&format!("Run folders: {}/", folder.printable()));
    }
    Ok(0)
}

/// The table, and an explanation of its columns.
fn text(report: &Report, width: Option<usize>) -> String {
    let Some(first) = report.runs.first().map(|row| &row.summary) else { return String::new() };
    let link = match first.text("link") {
        "" => String::new(),
        link => format!(", on an emulated link of {link}"),
    };
    let all: Vec<String> = match &report.runs[..] {
        [first, others @ ..] if others.iter().all(|row| row.accumulate == first.accumulate) => {
            vec![first.accumulate.to_string()]
        }
        all => all.iter().map(|row| format!("{} {}", row.choice, row.accumulate)).collect(),
    };
    let left_out = report.left_out.iter();
    let left_out: String =
        left_out.map(|left| format!("\nleft out: {}: {}", left.strategy, left.reason)).collect();
    format!(
        "{} ranks over {}{link}; batches per step: {}\n{}\n{STEP_TIMES}; peak: the most memory of a rank; \
         weights: begin of their digest; same bits: as {REFERENCE}{left_out}",
        first.count("world_size"),
        first.text("transport"),
        all.join(", "),
        table(report).fitted(width)
    )
}

/// Figures of a run that stand before memory, with labels that are shorter than their own. A label with a slash has the unit in it.
const BEFORE_MEMORY: [(&str, &str); 10] = [
    ("step_ms_median", "median step"),
    ("samples_per_s", "samples/s"),
    ("step_ms", "mean step"),
    ("compute_ms", "compute"),
    ("comm_exposed_ms", "exposed"),
    ("comm_hidden_ms", "hidden"),
    ("overlap_pct", "hidden"),
    ("comm_wait_ms", "waiting"),
    ("comm_ops_per_step", "ops/step"),
    ("comm_mb_per_step", "MB/step"),
];
/// Memory: the key, the label, and the category in summaries.
const MEMORY: [(&str, &str, &str); 4] = [
    ("model_mb", "model", "parameters"),
    ("gradient_mb", "gradient", "gradients"),
    ("optimizer_mb", "optimizer", "optimizer"),
    ("open_units_mb", "open units", "unsharded"),
];
/// Figures that the comparison about memory leaves out. The other one leaves out memory.
const OF_SPEED: [&str; 5] =
    ["step_ms", "compute_ms", "comm_wait_ms", "comm_ops_per_step", "train_loss"];
const MOST: &str = "The most memory of a rank for it, in MB of 1e6 bytes.";
/// Figures of a run that stand after memory.
const AFTER_MEMORY: [(&str, &str); 4] = [
    ("peak_mb", "peak"),
    ("train_loss", "loss"),
    ("eval_loss", "eval loss"),
    ("eval_accuracy_pct", "accuracy"),
];
const SAME_BITS: &str = "Whether the parameters are those of simple_ddp, bit for bit.";

/// Columns of these figures.
fn figures(of: &[(&'static str, &'static str)]) -> impl Iterator<Item = Column<Row>> {
    of.iter().filter_map(|&(name, label)| {
        let head = find(name)?.head();
        let unit = if label.contains('/') { "".into() } else { head.unit };
        let head = Head { label: label.into(), unit, ..head };
        Some(Column::new(head, move |row: &Row| row.summary.number(name)))
    })
}

fn table(report: &Report) -> Table {
    let is_about_memory = report.comparison == Comparison::Sharding.key();
    let name = |row: &Row| row.choice.clone();
    let mut columns = Columns::new().add("choice", "strategy", ("", 0), "The strategy.", name);
    columns.0.extend(figures(&BEFORE_MEMORY));
    columns.0.extend(MEMORY.map(|(key, label, category)| {
        Column::new(Head::new(key, label, ("MB", 2), MOST), move |row: &Row| {
            let peaks: BTreeMap<String, u64> = row.summary.part("peak_bytes");
            peaks.get(category).map(|bytes| *bytes as f64 / 1e6)
        })
    }));
    columns.0.extend(figures(&AFTER_MEMORY));
    let weights =
        |row: &Row| row.summary.text("weights_sha256").chars().take(8).collect::<String>();
    let same_bits = |row: &Row| if row.same_bits { "yes" } else { "no" };
    columns = columns
        .add("weights", "weights", ("", 0), "Beginning of the digest of the parameters.", weights)
        .add("same_bits", "same bits", ("", 0), SAME_BITS, same_bits)
        .add("cost", "cost", ("", 5), "The price of the run's time.", |row| row.cost);
    columns.0.retain(|column| {
        // Only runs with --evaluate have these, only models that classify have an accuracy, and only a price makes costs.
        let is_optional = column.head.key.starts_with("eval_") || column.head.key == "cost";
        let is_empty = || report.runs.iter().all(|row| column.cell(row) == Cell::Missing);
        let is_other = if is_about_memory {
            OF_SPEED.contains(&&*column.head.key)
        } else {
            MEMORY.iter().any(|(key, ..)| *key == column.head.key)
        };
        !is_other && (!is_optional || !is_empty())
    });
    columns.table(&report.runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(price_per_hour: Option<f64>) -> Report {
        let row = |strategy: &str, step: f64, digest: &str| {
            let summary = serde_json::json!({
                "strategy": strategy, "world_size": 2, "transport": "shm",
                "link": "10 Gbit/s, 50.0 us", "step_ms_median": step, "samples_per_s": 128e3 / step,
                "loss": 0.5, "step_ms": step + 0.5, "compute_ms": 20.0, "comm_exposed_ms": step - 20.0,
                "comm_hidden_ms": 1.0, "comm_wait_ms": 0.25, "overlap_pct": 12.5,
                "comm_ops_per_step": 4.0, "comm_mb_per_step": 2.75,
                "peak_bytes": {"total": 11_065_616}, "weights_sha256": digest
            });
            Row {
                choice: strategy.into(),
                strategy: strategy.into(),
                accumulate: 1,
                seconds: 36.0,
                cost: price_per_hour.map(|price| price * 36.0 / 3600.0),
                same_bits: digest.starts_with("24b"),
                summary: summary.into(),
            }
        };
        Report {
            machine: String::new(),
            date: String::new(),
            command: String::new(),
            comparison: Comparison::DataParallel.key(),
            price_per_hour,
            runs: vec![
                row("simple_ddp", 25.0, "24b8b23c773128e2"),
                row("ddp", 22.5, "24b8b23c773128e2"),
                row("top_k", 21.0, "a13e7cb82a596e63"),
            ],
            left_out: vec![LeftOut { strategy: "local_sgd".into(), reason: "why".into() }],
        }
    }

    #[test]
    fn all_stand_in_one_table() {
        insta::assert_snapshot!(text(&report(None), None), @r"
        2 ranks over shm, on an emulated link of 10 Gbit/s, 50.0 us; batches per step: 1
        strategy    median step ms  samples/s  mean step ms  compute ms  exposed ms  hidden ms  hidden %  waiting ms  ops/step  MB/step  peak MB    loss  weights   same bits
        ----------  --------------  ---------  ------------  ----------  ----------  ---------  --------  ----------  --------  -------  -------  ------  --------  ---------
        simple_ddp           25.00      5,120         25.50       20.00        5.00       1.00      12.5        0.25      4.00     2.75    11.07  0.5000  24b8b23c  yes
        ddp                  22.50      5,689         23.00       20.00        2.50       1.00      12.5        0.25      4.00     2.75    11.07  0.5000  24b8b23c  yes
        top_k                21.00      6,095         21.50       20.00        1.00       1.00      12.5        0.25      4.00     2.75    11.07  0.5000  a13e7cb8  no
        median step: median over the steps, each as long as on its slowest rank; other times of a step: means over ranks and steps; peak: the most memory of a rank; weights: begin of their digest; same bits: as simple_ddp
        left out: local_sgd: why
        ");
    }

    #[test]
    fn a_price_adds_a_column() {
        let text = text(&report(Some(0.79)), None);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("same bits     cost"), "{text}");
        assert!(lines[3].ends_with("24b8b23c  yes        0.00790"), "{text}");
    }
}
