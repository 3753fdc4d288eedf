//! The data sets of a run, opened once per process.
//!
//! The code that checks a run opens them and passes them to the ranks of its process. This file does not
//! know their contents.

use std::sync::Arc;

use paceline_data::Dataset;

/// Opened data sets. A clone shares them.
#[derive(Clone)]
pub struct OpenData {
    /// The data set to train on.
    pub train: Arc<dyn Dataset>,
    /// The data set to evaluate on, if the run evaluates.
    pub test: Option<Arc<dyn Dataset>>,
}
