//! What a run says: on the console while it runs and when it ends, and in its summary.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use paceline_collectives::{Algorithm, Group, Link, OpKind, Transport};
use paceline_memory::Category;
use paceline_model::{Layout, Model};
use paceline_strategies::{Alternating, StepLoss};
use serde::Serialize;

use crate::Result;
use crate::advice::{self, Cost};
use crate::anatomy::Anatomy;
use crate::checkpoint::Progress;
use crate::cli::DeviceName;
use crate::config::{ModelSettings, TrainConfig};
use crate::measure::{RankReport, StepTimes, TOTAL, quantile};
use crate::train::EpochSums;

/// Without a terminal, a line is printed every so many batches.
const LINE_EVERY: usize = 10;

/// The console of one rank. Only rank 0's says anything, and nothing if the run is to be quiet.
#[derive(Debug)]
pub struct Console {
    speaks: bool,
    bar: Option<ProgressBar>,
    num_epochs: usize,
    /// Batches of a step.
    per_step: usize,
    has_classes: bool,
}

impl Console {
    /// The console of `rank`.
    pub fn new(config: &TrainConfig, rank: usize) -> Self {
        let speaks = rank == 0 && !config.quiet;
        let draws = speaks && std::io::stdout().is_terminal();
        let bar = draws.then(|| {
            let style = ProgressStyle::with_template(
                "{prefix} [{bar:30}] {pos}/{len} batches, {per_sec}, {msg}",
            );
            ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout())
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let has_classes = matches!(config.model, ModelSettings::Cnn { .. });
        let per_step = config.strategy.accumulate;
        Self { speaks, bar, num_epochs: config.epochs, per_step, has_classes }
    }

    fn say(&self, text: impl AsRef<str>) {
        if !self.speaks {
            return;
        }
        // A reader that went away, as `head` does, is no reason to stop training.
        let print = || drop(writeln!(std::io::stdout(), "{}", text.as_ref()));
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// A line about the run, and one per rank about where it computes. Every rank calls it.
    pub fn placement(&self, config: &TrainConfig, group: &Group, local_rank: usize) -> Result<()> {
        self.say(format!(
            "paceline train: {}, {} over {}, {} x {}{}",
            config.model.name(),
            config.strategy.name.name(),
            group.transport().name(),
            plural(config.world_size, "rank"),
            plural(config.threads, "thread"),
            group.link().map_or(String::new(), |link| format!(", on an emulated link of {link}")),
        ));
        let line = placement_line(group.rank(), local_rank);
        for line in group.gather_object(&line, 0)?.into_iter().flatten() {
            self.say(line);
        }
        Ok(())
    }

    /// The size of the model.
    pub fn model(&self, model: &Model) {
        let params = model.layout.num_params();
        self.say(format!(
            "Parameters: {}, gradients: {:.2} MB",
            thousands(params as u64),
            params as f64 * 4.0 / 1e6
        ));
    }

    /// Where a run that may continue from a checkpoint begins.
    pub fn begin(&self, config: &TrainConfig, progress: Progress) {
        let Some(resume) = &config.resume else { return };
        let folder = resume.folder().display();
        let Progress { epochs, steps } = progress;
        let left = (config.epochs as u64).saturating_sub(epochs);
        self.say(match (epochs, left) {
            (0, _) => format!("No checkpoint in {folder} yet: training starts anew"),
            (_, 0) => format!("Resumed from {folder}: all {epochs} epochs are complete already"),
            (_, _) => format!(
                "Resumed from {folder}: {} and {} are complete",
                plural(epochs as usize, "epoch"),
                plural(steps as usize, "step")
            ),
        });
    }

    /// An epoch of `num_steps` batches begins.
    pub fn begin_epoch(&self, epoch: u64, num_steps: usize) {
        if let Some(bar) = &self.bar {
            bar.set_length(num_steps as u64);
            bar.reset();
            bar.set_prefix(format!("Epoch {}/{}", epoch + 1, self.num_epochs));
        }
    }

    /// A step is done, and with it `batches` of the epoch.
    pub fn step(&self, epoch: u64, batches: usize, loss: f64) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(format!("loss {loss:.4}"));
                bar.set_position(batches as u64);
            }
            None if batches / LINE_EVERY > (batches - self.per_step.min(batches)) / LINE_EVERY => {
                self.say(format!("Epoch {} Batch {batches} Loss: {loss:.4}", epoch + 1));
            }
            None => {}
        }
    }

    /// An epoch is done.
    pub fn end_epoch(&self, epoch: u64, sums: &EpochSums, took: Duration) {
        let accuracy = if self.has_classes {
            format!(", accuracy {:.2} %", 100.0 * sums.correct / sums.count)
        } else {
            String::new()
        };
        self.say(format!(
            "Epoch {}/{}: loss {:.4}{accuracy}, {:.2} s",
            epoch + 1,
            self.num_epochs,
            sums.loss / sums.count,
            took.as_secs_f64()
        ));
        if let Some(bar) = &self.bar
            && epoch as usize + 1 == self.num_epochs
        {
            bar.finish_and_clear();
        }
    }

    /// The test set has been evaluated.
    pub fn evaluation(&self, sums: &EpochSums) {
        self.say(format!(
            "Evaluation loss: {:.4}, over {} samples",
            sums.loss / sums.count,
            thousands(sums.count as u64)
        ));
        self.say(format!("Evaluation accuracy: {:.2}%", 100.0 * sums.correct / sums.count));
    }

    /// The test set has been evaluated after so many steps.
    pub fn evaluation_midway(&self, steps: u64, sums: &EpochSums) {
        self.say(format!(
            "Step {steps}: evaluation loss {:.4}, accuracy {:.2} %, over {} samples",
            sums.loss / sums.count,
            100.0 * sums.correct / sums.count,
            thousands(sums.count as u64)
        ));
    }

    /// The run is over.
    pub fn summary(
        &self,
        config: &TrainConfig,
        summary: &Summary,
        outcome: &Outcome,
        folder: Option<&Path>,
    ) {
        if let ModelSettings::Mlp { .. } = config.model {
            self.say(scaling_block(config, summary, outcome));
        }
        self.say(summary_block(summary, outcome));
        if let Some(folder) = folder {
            self.say(format!("Run folder: {}/", folder.display()));
        }
    }
}

/// A line of `metrics.jsonl`: one step as rank 0 saw it, times in milliseconds.
#[derive(Debug, Serialize)]
pub struct StepLine {
    step: u64,
    epoch: u64,
    batch: usize,
    samples: usize,
    loss: f64,
    correct: f64,
    lr: f64,
    /// Before it was clipped; only where it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    grad_norm: Option<f64>,
    step_ms: f64,
    data_ms: f64,
    forward_ms: f64,
    backward_ms: f64,
    optimizer_ms: f64,
    comm_exposed_ms: f64,
    comm_hidden_ms: f64,
    comm_wait_ms: f64,
    comm_move_ms: f64,
}

impl StepLine {
    /// The line of a step, after which `batch` batches of the epoch are done; steps and epochs count
    /// from 1.
    pub fn new(
        step: u64,
        epoch: u64,
        batch: usize,
        loss: &StepLoss,
        lr: f64,
        grad_norm: Option<f64>,
        times: &StepTimes,
    ) -> Self {
        Self {
            step,
            epoch: epoch + 1,
            batch,
            samples: loss.count,
            loss: loss.loss,
            correct: loss.correct,
            lr,
            grad_norm,
            step_ms: ms(times.step),
            data_ms: ms(times.data),
            forward_ms: ms(times.forward),
            backward_ms: ms(times.backward),
            optimizer_ms: ms(times.optimizer),
            comm_exposed_ms: ms(times.exposed),
            comm_hidden_ms: ms(times.hidden),
            comm_wait_ms: ms(times.wait),
            comm_move_ms: ms(times.moving),
        }
    }
}

/// A line of `metrics.jsonl`: the test set as evaluated after a step.
#[derive(Debug, Serialize)]
pub struct EvaluationLine {
    step: u64,
    epoch: u64,
    eval_samples: f64,
    eval_loss: f64,
    eval_accuracy: f64,
}

impl EvaluationLine {
    /// The line of an evaluation after so many steps; epochs count from 1.
    pub fn new(step: u64, epoch: u64, sums: &EpochSums) -> Self {
        let EpochSums { loss, correct, count } = *sums;
        Self {
            step,
            epoch: epoch + 1,
            eval_samples: count,
            eval_loss: loss / count,
            eval_accuracy: correct / count,
        }
    }
}

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
        let mean = |part: fn(&StepTimes) -> u64| {
            let all = reports.iter().flat_map(|report| &report.steps[..num_steps]);
            let sum: u64 = all.map(part).sum();
            measured(ms(sum) / (num_steps * reports.len()) as f64)
        };
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
        let count = |part: fn(&StepTimes) -> u64| mean(part).map(|ms| ms * 1e6);
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
            step_ms_mean: step,
            dropped_spans: reports.iter().map(|report| report.dropped_spans).sum(),
        }
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

fn summary_block(summary: &Summary, outcome: &Outcome) -> String {
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
    if summary.steps > 0 {
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
            summary.strategy
        ));
    }
    if summary.dropped_spans > 0 {
        lines.push(format!("{} spans found no room; times are too low", summary.dropped_spans));
    }
    lines.join("\n")
}

const INSUFFICIENT: &str = "Insufficient measured steps. Increase steps or reduce warmup.";

/// The block of the scaling benchmark. Its throughput uses the average step.
fn scaling_block(config: &TrainConfig, summary: &Summary, outcome: &Outcome) -> String {
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

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Where a rank computes.
pub(crate) fn placement_line(rank: usize, local_rank: usize) -> String {
    let devices = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or("<not set>".into());
    format!("[Rank {rank}] CUDA_VISIBLE_DEVICES={devices}, LOCAL_RANK={local_rank}, device=cpu")
}

/// Lines of as many cells each, set to the right in columns.
pub(crate) fn plain_lines(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| Some(row.get(at)?.len())).max();
    let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A number with its thousands separated.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The number without what lies below its second decimal, such as the noise of a mean of whole numbers.
pub(crate) fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A table whose first `num_left` columns are words, set to the left; the others are numbers.
pub(crate) fn plain_table<const N: usize>(
    names: [&str; N],
    num_left: usize,
    lines: &[[String; N]],
) -> String {
    let widths: [usize; N] = std::array::from_fn(|at| {
        let cells = lines.iter().map(|line| line[at].chars().count());
        cells.chain([names[at].len()]).max().unwrap_or(0)
    });
    let set = |cells: [&str; N]| {
        let padded: [String; N] = std::array::from_fn(|at| match at < num_left {
            true => format!("{:<1$}", cells[at], widths[at]),
            false => format!("{:>1$}", cells[at], widths[at]),
        });
        padded.join("  ").trim_end().to_owned()
    };
    let rule: [String; N] = widths.map(|width| "-".repeat(width));
    let head = [set(names), set(rule.each_ref().map(String::as_str))];
    let body = lines.iter().map(|line| set(line.each_ref().map(String::as_str)));
    head.into_iter().chain(body).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        let all = [0, 7, 999, 1000, 27_400, 1_234_567].map(thousands);
        assert_eq!(all, ["0", "7", "999", "1,000", "27,400", "1,234,567"]);
    }
}
