//! What a run says: on the console while it runs and when it ends, and in its metrics.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use paceline_collectives::Group;
use paceline_model::Model;
use paceline_strategies::StepLoss;
use serde::Serialize;

use crate::Result;
use crate::config::TrainConfig;
use crate::metrics::meter::StepTimes;
use crate::metrics::summary::{Outcome, Summary, scaling_block, summary_block};
use crate::model_settings::ModelSettings;
use crate::profile;
use crate::run::progress::{EpochSums, Progress};
use crate::text::{ms, placement_line, plural, thousands};

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
        Self {
            speaks,
            bar,
            num_epochs: config.epochs,
            per_step: config.strategy.accumulate,
            has_classes: config.model.has_classes(),
        }
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
        let layout = &model.layout;
        self.say(format!(
            "Parameters: {}, gradients: {:.2} MB",
            thousands(layout.num_params() as u64),
            layout.num_trained_params() as f64 * 4.0 / 1e6
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
        if let Some(profile) = &config.profile {
            self.say(profile::advice(&profile.folder));
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
    sync_ms: f64,
    optimizer_ms: f64,
    comm_exposed_ms: f64,
    comm_hidden_ms: f64,
    comm_wait_ms: f64,
    comm_move_ms: f64,
    comm_ops: u64,
    /// The messages of this rank's operations.
    comm_mb: f64,
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
            sync_ms: ms(times.sync),
            optimizer_ms: ms(times.optimizer),
            comm_exposed_ms: ms(times.exposed),
            comm_hidden_ms: ms(times.hidden),
            comm_wait_ms: ms(times.wait),
            comm_move_ms: ms(times.moving),
            comm_ops: times.ops,
            comm_mb: times.bytes as f64 / 1e6,
        }
    }

    /// The same for TensorBoard, which draws a curve for each name and a section for each word before the
    /// slash. The accuracy is only there for models that classify.
    pub fn scalars(&self, has_classes: bool) -> Vec<(&'static str, f64)> {
        let samples = self.samples as f64;
        let mut scalars = vec![("train/loss", self.loss)];
        if has_classes {
            scalars.push(("train/accuracy", self.correct / samples));
        }
        scalars.push(("train/learning_rate", self.lr));
        scalars.extend(self.grad_norm.map(|norm| ("train/grad_norm", norm)));
        scalars.extend([
            ("train/epoch", self.epoch as f64),
            ("speed/step_ms", self.step_ms),
            ("speed/data_ms", self.data_ms),
            ("speed/samples_per_s", samples / self.step_ms * 1e3),
            ("anatomy/forward_ms", self.forward_ms),
            ("anatomy/backward_ms", self.backward_ms),
            ("anatomy/sync_ms", self.sync_ms),
            ("anatomy/optimizer_ms", self.optimizer_ms),
            ("anatomy/exposed_ms", self.comm_exposed_ms),
            ("communication/hidden_ms", self.comm_hidden_ms),
            ("communication/wait_ms", self.comm_wait_ms),
            ("communication/move_ms", self.comm_move_ms),
            ("communication/operations", self.comm_ops as f64),
            ("communication/mb", self.comm_mb),
        ]);
        scalars
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

    /// The same for TensorBoard.
    pub fn scalars(&self) -> [(&'static str, f64); 2] {
        [("evaluation/loss", self.eval_loss), ("evaluation/accuracy", self.eval_accuracy)]
    }
}
