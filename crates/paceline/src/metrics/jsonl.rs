//! `metrics.jsonl`: an object per step and per evaluation, a line each, as rank 0 saw them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use super::event::{Evaluation, Event, Listener, StepDone};
use crate::text::ms;
use crate::{Failure, Result};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    file: BufWriter<File>,
}

impl MetricsFile {
    /// Makes the file in a run folder.
    pub fn create(folder: &Path) -> Result<Self> {
        let path = folder.join("metrics.jsonl");
        let file = File::create(&path)
            .map_err(|e| Failure::io(format!("cannot write {}", path.display()), e))?;
        Ok(Self { file: BufWriter::new(file) })
    }

    /// Adds a line, visible at once to whoever follows the file.
    fn add(&mut self, line: &impl Serialize) -> Result<()> {
        let fail = |e: &dyn std::fmt::Display| Failure::io("cannot write metrics.jsonl", e);
        serde_json::to_writer(&mut self.file, line).map_err(|e| fail(&e))?;
        self.file.write_all(b"\n").and_then(|()| self.file.flush()).map_err(|e| fail(&e))
    }
}

impl Listener for MetricsFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Step(step) => self.add(&StepLine::new(step)),
            Event::Evaluated(evaluation) if !evaluation.is_repeated => {
                self.add(&EvaluationLine::new(evaluation))
            }
            _ => Ok(()),
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
    /// The line of a step; steps and epochs count from 1.
    pub fn new(done: &StepDone) -> Self {
        let StepDone { steps, epoch, batches, loss, lr, grad_norm, times, .. } = *done;
        Self {
            step: steps,
            epoch: epoch + 1,
            batch: batches,
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
    pub fn new(evaluation: &Evaluation) -> Self {
        let Evaluation { steps, epoch, sums, .. } = *evaluation;
        Self {
            step: steps,
            epoch: epoch + 1,
            eval_samples: sums.count,
            eval_loss: sums.mean_loss(),
            eval_accuracy: sums.accuracy(),
        }
    }

    /// The same for TensorBoard.
    pub fn scalars(&self) -> [(&'static str, f64); 2] {
        [("evaluation/loss", self.eval_loss), ("evaluation/accuracy", self.eval_accuracy)]
    }
}
