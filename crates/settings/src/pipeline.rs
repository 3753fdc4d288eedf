//! The stages of a pipeline.

use std::sync::Arc;

use paceline_strategies::Stages;
use paceline_strategies::schedule::{Costs, named};
use serde::Serialize;

/// The schedule and the cut that the ranks choose once they have measured.
pub const AUTO: &str = "auto";

/// How a model is divided into stages, and in which order they run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PipelineConfig {
    /// The name of the schedule, or `auto` until the ranks have chosen one.
    pub schedule: &'static str,
    /// How the model is cut.
    pub cut: Cut,
    /// The first block of each stage but the first one; empty until the ranks have chosen.
    pub begins_at: Vec<usize>,
    /// The units of these blocks.
    pub begins: Vec<String>,
    /// The measured costs of the stages, in milliseconds, from which a schedule may make its lists; without them, stages count as
    /// equal.
    #[serde(skip)]
    pub costs: Option<Costs>,
    /// The objective computes the gradients of its parameters with its loss.
    pub head_at_once: bool,
    /// The most that a rank may keep of micro-batches in flight.
    pub memory_bytes: Option<u64>,
    /// The schedules that the ranks have chosen from, the best first.
    pub candidates: Vec<Candidate>,
    /// Whether the gradients of micro-batches are added up in their order, as in one process.
    pub adds_in_order: bool,
}

/// How a model is cut into stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// The user has said where.
    ByHand,
    /// By counted floating-point operations.
    Counted,
    /// By measured times, for the schedule that runs.
    Measured,
}

/// A schedule that ranks can choose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Its name.
    pub schedule: &'static str,
    /// The time from step to step, by rehearsal.
    pub step_ms: f64,
    /// The most that a rank keeps of micro-batches in flight.
    pub kept_bytes: u64,
}

impl PipelineConfig {
    /// The step by rehearsal of the chosen schedule, in milliseconds, if the ranks have measured.
    pub fn rehearsed_ms(&self) -> Option<f64> {
        self.candidates.iter().find(|of| of.schedule == self.schedule).map(|of| of.step_ms)
    }

    /// The stages of a step of so many micro-batches. `None` until the ranks have chosen a schedule.
    pub fn stages(&self, micro_batches: usize) -> Option<Stages> {
        Some(Stages {
            schedule: Arc::new(named(self.schedule)?),
            cut: self.begins_at.clone(),
            micro_batches,
            costs: self.costs.clone(),
            head_at_once: self.head_at_once,
        })
    }

    /// Whether the ranks have to measure before they can begin.
    pub fn is_open(&self) -> bool {
        self.begins_at.is_empty() || self.schedule == AUTO
    }
}
