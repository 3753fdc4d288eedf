//! The data sets of a run, opened once per process.
//!
//! Whoever checks a run opens them, and hands them to the ranks of its process. It knows nothing of what they
//! hold.

use std::sync::Arc;

use paceline_data::Dataset;

/// Opened data sets. A clone shares them.
#[derive(Clone)]
pub struct OpenData {
    /// What is trained on.
    pub train: Arc<dyn Dataset>,
    /// What is evaluated on, if the run evaluates.
    pub test: Option<Arc<dyn Dataset>>,
}
