//! The stages of a pipeline.

use serde::Serialize;

/// How a model is divided into stages, and in which order they run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PipelineConfig {
    /// The name of the schedule.
    pub schedule: &'static str,
    /// The first block of each stage but the first one.
    pub cut: Vec<usize>,
    /// The units of these blocks.
    pub begins: Vec<String>,
    /// Whether the gradients of micro-batches are added up in their order, as in one process.
    pub adds_in_order: bool,
}
