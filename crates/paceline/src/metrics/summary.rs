//! What a run came to: the summary that is written, and the blocks that are printed at its end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_collectives::{Algorithm, Link, OpKind, Transport};
use paceline_memory::Category;
use paceline_model::Layout;
use paceline_strategies::Alternating;
use serde::Serialize;

use super::event::{Event, Listener};
use crate::Result;
use crate::cli::DeviceName;
use crate::config::TrainConfig;
use crate::insight::advice::{self, Cost};
use crate::metrics::anatomy::Anatomy;
use crate::metrics::meter::{RankReport, StepTimes, TOTAL, quantile};
use crate::run::folder::write_json;
use crate::text::{ms, thousands};

/// What training came to.
#[derive(Debug)]
pub struct Outcome {
    /// How the ranks did reach each other; a single one needs no shared memory.
    pub transport: Transport,
    /// The link that was emulated.
    pub link: Option<Link>,
    /// Number of parameters.
    pub params: usize,
    /// Steps made, measured or not.
    pub num_steps: u64,
    /// Mean loss: of the evaluation if there was one, else of the last epoch.
    pub loss: f64,
    /// Part of the samples classified correctly, of the same samples.
    pub accuracy: Option<f64>,
    /// Wall-clock time of the whole run on rank 0.
    pub total: Duration,
}

/// The summary of a run, as written to `summary.json`. Times are of the measured steps: the median
/// and 99th percentile of the slowest rank's step, and means over steps and ranks of the parts.
/// `null` where no step was measured.
#[derive(Debug, Serialize)]
pub struct Summary {
    model: &'static str,
    strategy: &'static str,
    world_size: usize,
    threads: usize,
    device: DeviceName,
    transport: &'static str,
    /// The link that was emulated.
    link: Option<String>,
    params: usize,
    /// Per rank.
    batch_size: usize,
    /// Batches of a step.
    accumulate: usize,
    /// Steps that were measured.
    steps: usize,
    step_ms_median: Option<f64>,
    step_ms_p99: Option<f64>,
    /// Samples of a step, world size x batch size as a rule, / median step.
    samples_per_s: Option<f64>,
    loss: f64,
    accuracy: Option<f64>,
    /// Wall-clock time of the whole run on rank 0.
    total_s: f64,
    compute_ms: Option<f64>,
    comm_exposed_ms: Option<f64>,
    comm_hidden_ms: Option<f64>,
    comm_wait_ms: Option<f64>,
    comm_move_ms: Option<f64>,
    /// Exposed communication as a part of the step.
    comm_overhead_pct: Option<f64>,
    /// The largest over the ranks, by category.
    peak_bytes: BTreeMap<String, u64>,
    /// Proportional set size, mean over the ranks.
    resident_bytes: u64,
    /// The time that no span accounts for.
    rest_ms: Option<f64>,
    /// Arithmetic and copies that synchronisation adds.
    sync_ms: Option<f64>,
    /// Communication that ran while the main thread computed, in parts of all communication.
    overlap_pct: Option<f64>,
    comm_ops_per_step: Option<f64>,
    /// The messages of a rank's operations.
    comm_mb_per_step: Option<f64>,
    /// Rank 0's parameters.
    weights_sha256: String,
    /// Whether all ranks hold the same parameters.
    replicas_agree: bool,
    /// What synchronised steps take longer than unsynchronised ones, if the two were alternated.
    sync_cost: Option<SyncCost>,
    anatomy: Anatomy,
    advice: Option<String>,
    /// The trace of each rank, if the run was profiled.
    traces: Vec<PathBuf>,
    /// Mean step, for the scaling block.
    #[serde(skip)]
    step_ms_mean: Option<f64>,
    #[serde(skip)]
    dropped_spans: u64,
}

impl Summary {
    /// Puts the ranks' reports together.
    pub fn new(
        config: &TrainConfig,
        outcome: &Outcome,
        reports: &[RankReport],
        layout: &Layout,
    ) -> Self {
        let num_steps = reports.iter().map(|report| report.steps.len()).min().unwrap_or(0);
        let slowest: Vec<u64> = (0..num_steps)
            .map(|step| reports.iter().map(|r| r.steps[step].step).max().unwrap_or(0))
            .collect();
        let measured = |value: f64| (num_steps > 0).then_some(value);
        let count = |part: fn(&StepTimes) -> u64| {
            let all = reports.iter().flat_map(|report| &report.steps[..num_steps]);
            let sum: u64 = all.map(part).sum();
            measured(sum as f64 / (num_steps * reports.len()) as f64)
        };
        let mean = |part: fn(&StepTimes) -> u64| count(part).map(|ns| ns / 1e6);
        let median = measured(ms(quantile(&slowest, 0.5)));
        let samples = config.samples_per_step();
        let mut peak_bytes = BTreeMap::new();
        for (category, &bytes) in reports.iter().flat_map(|report| &report.peak_bytes) {
            let peak = peak_bytes.entry(category.clone()).or_insert(0);
            *peak = bytes.max(*peak);
        }
        let (exposed, step) = (mean(|t| t.exposed), mean(|t| t.step));
        let anatomy = Anatomy::new(reports, layout, &config.strategy.bucket_units(layout));
        let cost: Cost = match outcome.link {
            Some(link) => on_link(link, config.world_size),
            None => advice::measured_cost(&anatomy.ops),
        };
        let strategy = &config.strategy;
        let advice = match strategy.sync_blocks {
            None => advice::advice(strategy.name, strategy.caps(), &anatomy, layout, &cost),
            Some(_) => None,
        };
        let weights_sha256 = reports.first().map(|r| r.weights_sha256.clone()).unwrap_or_default();
        let resident: u64 = reports.iter().map(|report| report.resident_bytes).sum();
        Self {
            model: config.model.name(),
            strategy: config.strategy.name.name(),
            world_size: config.world_size,
            threads: config.threads,
            device: config.device,
            transport: outcome.transport.name(),
            link: outcome.link.map(|link| link.to_string()),
            params: outcome.params,
            batch_size: config.batch_size,
            accumulate: config.strategy.accumulate,
            steps: num_steps,
            step_ms_median: median,
            step_ms_p99: measured(ms(quantile(&slowest, 0.99))),
            samples_per_s: median.map(|median| samples / median * 1e3),
            loss: outcome.loss,
            accuracy: outcome.accuracy,
            total_s: outcome.total.as_secs_f64(),
            compute_ms: mean(StepTimes::compute),
            comm_exposed_ms: exposed,
            comm_hidden_ms: mean(|t| t.hidden),
            comm_wait_ms: mean(|t| t.wait),
            comm_move_ms: mean(|t| t.moving),
            comm_overhead_pct: exposed.zip(step).map(|(exposed, step)| 100.0 * exposed / step),
            peak_bytes,
            resident_bytes: resident / reports.len().max(1) as u64,
            rest_ms: mean(StepTimes::rest),
            sync_ms: mean(|t| t.sync),
            overlap_pct: anatomy.overlap_pct(),
            comm_ops_per_step: count(|t| t.ops),
            comm_mb_per_step: count(|t| t.bytes).map(|bytes| bytes / 1e6),
            replicas_agree: reports.iter().all(|r| r.weights_sha256 == weights_sha256),
            weights_sha256,
            sync_cost: SyncCost::new(config, reports, num_steps),
            anatomy,
            advice,
            traces: reports.iter().filter_map(|report| report.trace.clone()).collect(),
            step_ms_mean: step,
            dropped_spans: reports.iter().map(|report| report.dropped_spans).sum(),
        }
    }
}

/// `summary.json`, and the copy that `--json` asks for.
#[derive(Debug)]
pub struct SummaryFile {
    files: Vec<PathBuf>,
}

impl SummaryFile {
    /// The summary in a run folder, and in this file too.
    pub fn new(folder: &Path, copy: Option<&Path>) -> Self {
        let file = folder.join("summary.json");
        Self { files: std::iter::once(file).chain(copy.map(Path::to_owned)).collect() }
    }
}

impl Listener for SummaryFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        let Event::Ended(summary, _) = event else { return Ok(()) };
        self.files.iter().try_for_each(|file| write_json(file, summary))
    }
}

/// What an all-reduce takes on an emulated link.
fn on_link(link: Link, world_size: usize) -> Cost {
    Box::new(move |bytes| {
        let time = link.time(OpKind::AllReduce, Algorithm::Direct, world_size, bytes);
        time.as_secs_f64() * 1e3
    })
}

/// What synchronisation adds to a step, from blocks of steps with and without it that took turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SyncCost {
    /// Median step with it.
    synchronised_ms: f64,
    /// Median step without.
    unsynchronised_ms: f64,
    /// The difference in percent of the step without.
    added_pct: f64,
}

impl SyncCost {
    fn new(config: &TrainConfig, reports: &[RankReport], num_steps: usize) -> Option<Self> {
        let block = config.strategy.sync_blocks?;
        let median = |kind: bool| {
            // The first step of a block also waits for what the ranks have drifted apart before.
            let belongs = |at: &usize| {
                let step = at + config.warmup_steps;
                Alternating::is_synchronised(block, step) == kind && !step.is_multiple_of(block)
            };
            let mean_of = |at: usize| {
                reports.iter().map(|r| r.steps[at].step).sum::<u64>() / reports.len() as u64
            };
            let steps: Vec<u64> = (0..num_steps).filter(belongs).map(mean_of).collect();
            (!steps.is_empty()).then(|| ms(quantile(&steps, 0.5)))
        };
        let (synchronised_ms, unsynchronised_ms) = (median(true)?, median(false)?);
        let added_pct = 100.0 * (synchronised_ms / unsynchronised_ms - 1.0);
        Some(Self { synchronised_ms, unsynchronised_ms, added_pct })
    }
}

/// The block at the end of a run.
pub(crate) fn summary_block(summary: &Summary, outcome: &Outcome) -> String {
    let mut lines = vec![format!("Total time: {:.2} s", outcome.total.as_secs_f64())];
    let times = (summary.step_ms_median, summary.step_ms_p99, summary.samples_per_s);
    if let (Some(median), Some(p99), Some(samples)) = times {
        lines.push(format!(
            "Step: {median:.2} ms median, {p99:.2} ms p99 over {} steps; {} samples/s",
            thousands(summary.steps as u64),
            thousands(samples.round() as u64)
        ));
    } else {
        lines.push(INSUFFICIENT.into());
    }
    let parts = (
        summary.compute_ms.zip(summary.comm_overhead_pct),
        summary.comm_exposed_ms.zip(summary.comm_hidden_ms),
        summary.comm_wait_ms.zip(summary.comm_move_ms),
    );
    if let (Some((compute, overhead)), Some((exposed, hidden)), Some((wait, moving))) = parts {
        lines.push(format!("Compute time: {compute:.2} ms per step"));
        lines.push(format!(
            "Communication time: {exposed:.2} ms exposed, {hidden:.2} ms hidden per step; \
             {wait:.2} ms waiting, {moving:.2} ms moving"
        ));
        lines.push(format!("Communication overhead: {overhead:.2} % of the step is exposed"));
    }
    // Of two kinds of step that take turns, a mean says nothing.
    if summary.steps > 0 && summary.sync_cost.is_none() {
        lines.extend(summary.anatomy.lines());
    }
    lines.extend(summary.advice.iter().map(|advice| format!("Advice: {advice}.")));
    if let Some(cost) = &summary.sync_cost {
        lines.push(format!(
            "Synchronisation: {:.3} ms per step with it, {:.3} without (medians, in turns): {:+.2} %",
            cost.synchronised_ms, cost.unsynchronised_ms, cost.added_pct
        ));
    }
    let categories = Category::ALL.into_iter().map(Category::name).chain([TOTAL]);
    let peaks: Vec<String> = categories
        .filter_map(|name| summary.peak_bytes.get(name).map(|bytes| (name, *bytes)))
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(name, bytes)| format!("{name} {:.2}", bytes as f64 / 1e6))
        .collect();
    lines.push(format!("Peak memory per rank, MB: {}", peaks.join(", ")));
    lines.push(format!(
        "Resident (proportional) per rank: {:.1} MB",
        summary.resident_bytes as f64 / 1e6
    ));
    lines.push(format!("Weights: sha256 {}", &summary.weights_sha256));
    if !summary.replicas_agree {
        lines.push(format!(
            "The ranks hold different weights, as {} leaves them; those of rank 0 count",
            if summary.sync_cost.is_some() {
                "a step without synchronisation"
            } else {
                summary.strategy
            }
        ));
    }
    if summary.dropped_spans > 0 {
        lines.push(format!(
            "{} spans or operations found no room; times and counts are too low",
            summary.dropped_spans
        ));
    }
    lines.join("\n")
}

const INSUFFICIENT: &str = "Insufficient measured steps. Increase steps or reduce warmup.";

/// The block of the scaling benchmark. Its throughput uses the average step.
pub(crate) fn scaling_block(config: &TrainConfig, summary: &Summary, outcome: &Outcome) -> String {
    let mut lines = vec![
        "=== DDP Scaling Benchmark ===".to_owned(),
        format!("World size       : {}", config.world_size),
        "Device           : cpu".to_owned(),
        format!("Config           : {}", serde_json::json!(config.model)),
        format!("Warmup steps     : {}", config.warmup_steps),
        format!("Measured steps   : {} / {}", summary.steps, outcome.num_steps),
    ];
    match summary.step_ms_mean {
        Some(mean) => {
            let samples = config.samples_per_step() / mean * 1e3;
            let measured = config.samples_per_step() * summary.steps as f64;
            lines.push(format!("Avg step time    : {mean:.2} ms"));
            lines.push(format!(
                "Throughput       : {} samples/s",
                thousands(samples.round() as u64)
            ));
            lines.push(format!("Measured samples : {}", thousands(measured.round() as u64)));
        }
        None => lines.push(INSUFFICIENT.to_owned()),
    }
    lines.join("\n")
}
