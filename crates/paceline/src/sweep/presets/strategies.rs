//! `paceline train --ddp-choice all`: every strategy in a run of its own, with the same seed and data,
//! and one table of all.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;

use crate::bench::screen::say;
use crate::cli::{Given, StrategyName, TrainArgs};
use crate::environment::Placement;
use crate::metrics::TOTAL;
use crate::outputs::{check_file, check_folder};
use crate::run::folder;
use crate::sweep::execute::{self, RunSummary, Runs};
use crate::text::{hundredths, plain_table, thousands};
use crate::{Failure, Result, resources};

/// Batches of a step of the strategies that were published with several.
const PUBLISHED_ACCUMULATION: usize = 4;
/// The strategy whose bits the others are compared with.
const REFERENCE: &str = "simple_ddp";

/// How many batches each strategy adds up before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Settings {
    /// All as many.
    LikeForLike,
    /// As the originals were measured.
    AsPublished,
}

impl Settings {
    fn accumulation(self, strategy: StrategyName, asked: Option<usize>) -> usize {
        match (self, strategy) {
            (Settings::LikeForLike, _) => asked.unwrap_or(1),
            (
                Settings::AsPublished,
                StrategyName::Single | StrategyName::SimpleDdp | StrategyName::Ddp,
            ) => 1,
            (Settings::AsPublished, _) => asked.unwrap_or(PUBLISHED_ACCUMULATION),
        }
    }
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
}

/// A run of the comparison.
#[derive(Clone, Debug, Serialize)]
struct Row {
    strategy: String,
    accumulate: usize,
    /// Wall-clock time of the run, from its start to its end.
    seconds: f64,
    /// The price of that time.
    cost: Option<f64>,
    /// Whether it ended with the same parameters as the reference, bit for bit.
    same_bits: bool,
    /// All of the run's own summary.
    summary: Value,
    #[serde(skip)]
    found: RunSummary,
}

/// A strategy that these flags do not fit.
#[derive(Clone, Debug, Serialize)]
struct LeftOut {
    strategy: String,
    /// Why not.
    reason: String,
}

/// All runs.
#[derive(Clone, Debug, Serialize)]
struct Report {
    machine: String,
    date: String,
    command: String,
    settings: Settings,
    price_per_hour: Option<f64>,
    runs: Vec<Row>,
    left_out: Vec<LeftOut>,
}

/// Makes all runs, prints the table, and writes what was found.
pub fn compare(args: &TrainArgs, placement: Option<Placement>) -> Result<u8> {
    if let Some(placement) = placement {
        return usage(format!(
            "--ddp-choice all starts ranks of its own, but another launcher has started {}; start it \
             by itself, or pass one --strategy",
            placement.place.world_size
        ));
    }
    let given = Given::of_train_command();
    if given.has("strategy") {
        return usage("--ddp-choice all runs every strategy; leave --strategy out".into());
    }
    if args.save.is_some() {
        return usage(
            "--save: with --ddp-choice all, every run would write the same checkpoint; leave it out"
                .into(),
        );
    }
    let price_per_hour = args.compare.price_per_hour;
    if let Some(price) = price_per_hour.filter(|price| !(*price >= 0.0 && price.is_finite())) {
        return usage(format!("--price-per-hour {price}: pass a price that is not negative"));
    }
    let settings =
        if args.compare.as_published { Settings::AsPublished } else { Settings::LikeForLike };
    let own = ["ddp-choice", "like-for-like", "as-published", "price-per-hour", "json", "quiet"];
    let flags = given.without(&own);
    let config = execute::resolve(&flags)?;
    let (asked, world_size) = (given.number("accumulate"), config.world_size);
    let (mut cases, mut left_out) = (Vec::new(), Vec::new());
    for &strategy in StrategyName::value_variants() {
        if strategy == StrategyName::Single && world_size > 1 {
            continue;
        }
        let accumulate = settings.accumulation(strategy, asked);
        let flags = flags.with("strategy", strategy.name()).with("accumulate", accumulate);
        match execute::resolve(&flags) {
            Ok(config) => cases.push((strategy, accumulate, config.warnings, flags)),
            // The flags are sound by themselves, as was seen above; they only do not fit this one.
            Err(Failure::Usage(reason)) => {
                left_out.push(LeftOut { strategy: strategy.name().to_owned(), reason });
            }
            Err(other) => return Err(other),
        }
    }
    if cases.is_empty() {
        let reason = left_out.into_iter().next().map_or(String::new(), |left| left.reason);
        return usage(format!("--ddp-choice all: no strategy fits these flags: {reason}"));
    }
    check_folder("the run folder", &folder::runs(), "start from a folder that you can write to")?;
    args.json.as_deref().map_or(Ok(()), |file| check_file("--json", file))?;
    // What holds for some of the strategies only is in their run folders.
    let everywhere =
        |warning: &&String| cases.iter().all(|(_, _, others, _)| others.contains(warning));
    for warning in cases.iter().take(1).flat_map(|case| &case.2).filter(everywhere) {
        eprintln!("warning: {warning}");
    }

    let folder = folder::create_named(config.model.name(), "all")?;
    let absolute = std::path::absolute(&folder)
        .map_err(|e| Failure::io("the run folder has no absolute path", e))?;
    let runs = Runs::new(cases.len(), Duration::MAX, Some(absolute))?;
    let mut rows: Vec<Row> = Vec::new();
    for (strategy, accumulate, _, flags) in &cases {
        let found = runs.train(strategy.name(), flags)?;
        let seconds = found.took.as_secs_f64();
        rows.push(Row {
            strategy: found.strategy.clone(),
            accumulate: *accumulate,
            seconds,
            cost: price_per_hour.map(|price| price * seconds / 3600.0),
            same_bits: false,
            summary: found.whole.clone(),
            found,
        });
    }
    runs.finish();
    let reference = rows.iter().find(|row| row.strategy == REFERENCE);
    let reference = reference.map(|row| row.found.weights_sha256.clone());
    for row in &mut rows {
        row.same_bits = Some(&row.found.weights_sha256) == reference.as_ref();
    }
    let report = Report {
        machine: resources::machine(),
        date: jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string(),
        command: super::command_line(),
        settings,
        price_per_hour,
        runs: rows,
        left_out,
    };
    folder::write_json(&folder.join("comparison.json"), &report)?;
    if let Some(file) = &args.json {
        folder::write_json(file, &report)?;
    }
    if !args.quiet {
        say(&text(&report));
        say(&format!("Run folders: {}/", folder.display()));
    }
    Ok(0)
}

/// The table, and what its columns mean.
fn text(report: &Report) -> String {
    let Some(first) = report.runs.first().map(|row| &row.found) else { return String::new() };
    let link =
        first.link.as_ref().map_or(String::new(), |l| format!(", on an emulated link of {l}"));
    let settings = match report.settings {
        Settings::LikeForLike => {
            format!("like for like: batches per step {}", report.runs[0].accumulate)
        }
        Settings::AsPublished => {
            let of = |row: &Row| format!("{} {}", row.strategy, row.accumulate);
            let all: Vec<String> = report.runs.iter().map(of).collect();
            format!("as published: batches per step {}", all.join(", "))
        }
    };
    let lines: Vec<[String; 14]> = report.runs.iter().map(line).collect();
    let names = [
        "strategy",
        "step ms",
        "samples/s",
        "compute ms",
        "exposed ms",
        "hidden ms",
        "overlap %",
        "waiting ms",
        "ops/step",
        "MB/step",
        "peak MB",
        "loss",
        "weights",
        "same bits",
    ];
    let table = match report.price_per_hour {
        None => plain_table(names, 1, &lines),
        Some(_) => {
            let cost = |row: &Row| row.cost.map_or("-".to_owned(), |cost| format!("{cost:.5}"));
            let costs = report.runs.iter().map(cost).chain([String::new()]);
            let names = std::array::from_fn::<_, 15, _>(|at| *names.get(at).unwrap_or(&"cost"));
            let with_cost = lines.iter().zip(costs).map(|(line, cost)| {
                std::array::from_fn(|at| line.get(at).cloned().unwrap_or_else(|| cost.clone()))
            });
            plain_table(names, 1, &with_cost.collect::<Vec<[String; 15]>>())
        }
    };
    let left_out = report.left_out.iter();
    let left_out: String =
        left_out.map(|left| format!("\nleft out: {}: {}", left.strategy, left.reason)).collect();
    format!(
        "{} ranks over {}{link}; {settings}\n{table}\nstep: median of the slowest rank's; peak: the most \
         memory of a rank; weights: begin of their digest; same bits: as {REFERENCE}{left_out}",
        first.world_size, first.transport
    )
}

fn line(row: &Row) -> [String; 14] {
    let found = &row.found;
    let or_dash = |value: Option<f64>, decimals: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    let peak = found.peak_bytes.get(TOTAL).map(|bytes| *bytes as f64 / 1e6);
    [
        row.strategy.clone(),
        or_dash(found.step_ms_median, 2),
        found.samples_per_s.map_or("-".to_owned(), |rate| thousands(rate.round() as u64)),
        or_dash(found.compute_ms, 2),
        or_dash(found.comm_exposed_ms, 2),
        or_dash(found.comm_hidden_ms, 2),
        or_dash(found.overlap_pct, 1),
        or_dash(found.comm_wait_ms, 2),
        found.comm_ops_per_step.map_or("-".to_owned(), |ops| hundredths(ops).to_string()),
        or_dash(found.comm_mb_per_step, 2),
        or_dash(peak, 2),
        or_dash(found.loss, 4),
        found.weights_sha256.chars().take(8).collect(),
        if row.same_bits { "yes" } else { "no" }.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(price_per_hour: Option<f64>) -> Report {
        let row = |strategy: &str, step: f64, digest: &str| {
            let found = RunSummary {
                strategy: strategy.into(),
                world_size: 2,
                transport: "shm".into(),
                link: Some("10 Gbit/s, 50.0 us".into()),
                step_ms_median: Some(step),
                samples_per_s: Some(128e3 / step),
                loss: Some(0.5),
                compute_ms: Some(20.0),
                comm_exposed_ms: Some(step - 20.0),
                comm_hidden_ms: Some(1.0),
                comm_wait_ms: Some(0.25),
                overlap_pct: Some(12.5),
                comm_ops_per_step: Some(4.0),
                comm_mb_per_step: Some(2.75),
                peak_bytes: [("total".to_owned(), 11_065_616)].into(),
                weights_sha256: digest.into(),
                ..RunSummary::default()
            };
            Row {
                strategy: strategy.into(),
                accumulate: 1,
                seconds: 36.0,
                cost: price_per_hour.map(|price| price * 36.0 / 3600.0),
                same_bits: digest.starts_with("24b"),
                summary: Value::Null,
                found,
            }
        };
        Report {
            machine: String::new(),
            date: String::new(),
            command: String::new(),
            settings: Settings::LikeForLike,
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
        insta::assert_snapshot!(text(&report(None)), @r"
        2 ranks over shm, on an emulated link of 10 Gbit/s, 50.0 us; like for like: batches per step 1
        strategy    step ms  samples/s  compute ms  exposed ms  hidden ms  overlap %  waiting ms  ops/step  MB/step  peak MB    loss   weights  same bits
        ----------  -------  ---------  ----------  ----------  ---------  ---------  ----------  --------  -------  -------  ------  --------  ---------
        simple_ddp    25.00      5,120       20.00        5.00       1.00       12.5        0.25         4     2.75    11.07  0.5000  24b8b23c        yes
        ddp           22.50      5,689       20.00        2.50       1.00       12.5        0.25         4     2.75    11.07  0.5000  24b8b23c        yes
        top_k         21.00      6,095       20.00        1.00       1.00       12.5        0.25         4     2.75    11.07  0.5000  a13e7cb8         no
        step: median of the slowest rank's; peak: the most memory of a rank; weights: begin of their digest; same bits: as simple_ddp
        left out: local_sgd: why
        ");
    }

    #[test]
    fn a_price_adds_a_column() {
        let text = text(&report(Some(0.79)));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("same bits     cost"), "{text}");
        assert!(lines[3].ends_with("      yes  0.00790"), "{text}");
    }

    #[test]
    fn published_settings_differ_by_strategy() {
        use StrategyName::{Ddp, SimpleDdp, SimpleDdpGa};
        let like = |asked| {
            [SimpleDdp, SimpleDdpGa, Ddp].map(|s| Settings::LikeForLike.accumulation(s, asked))
        };
        let published = |asked| {
            [SimpleDdp, SimpleDdpGa, Ddp].map(|s| Settings::AsPublished.accumulation(s, asked))
        };
        assert_eq!((like(None), like(Some(3))), ([1, 1, 1], [3, 3, 3]));
        assert_eq!((published(None), published(Some(3))), ([1, 4, 1], [1, 3, 1]));
    }
}
