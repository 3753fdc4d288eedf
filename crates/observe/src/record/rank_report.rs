//! The report of a rank when training has ended. Rank 0 gathers these reports once.

use std::io;
use std::path::PathBuf;

use paceline_analysis::limit::Operations;
use paceline_host::{resources, streams};
use paceline_trace::SpanTrack;
use serde::{Deserialize, Serialize};

use crate::record::card_use::CardUse;
use crate::record::memory::RankMemory;
use crate::record::meter::Meter;
use crate::record::readiness::AlikeSteps;
use crate::record::steps::StepLog;

/// The report of one rank at the end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RankReport {
    /// The measured steps.
    pub steps: StepLog,
    /// Means over the steps that are alike.
    pub alike: AlikeSteps,
    /// Memory by phase and category.
    pub memory: RankMemory,
    /// Proportional set size in bytes.
    pub resident_bytes: u64,
    /// Number of spans, marks and operations that were lost because their buffers were full.
    pub dropped_spans: u64,
    /// The trace that was written.
    pub trace: Option<PathBuf>,
    /// The files that were to be written and could not be, in words. The run could do without.
    pub missing_files: Vec<String>,
    /// Digest of this rank's parameters.
    pub weights_sha256: String,
    /// The most floating-point operations per second that this rank's threads can make, as measured before its first step.
    pub peak_flops_per_s: f64,
    /// The operations of the recorded steps, if the run was profiled.
    pub operations: Operations,
    /// The percentage of the measured steps in which the main thread had no core, if the kernel says.
    pub cpu_wait_pct: Option<f64>,
    /// The driver's data about the card, if this rank computes on one.
    pub card: Option<CardUse>,
}

/// Warns that a file that the run can do without could not be written. `what` names it with its file. Returns the loss and
/// its reason, in words, for the report of the rank.
pub fn do_without(what: &str, error: &io::Error) -> String {
    let missing = format!("{what}: {error}");
    streams::stderr().line(&format!("warning: cannot write {missing}; the run goes on without"));
    missing
}

impl RankReport {
    /// The report of this rank now, without a trace.
    pub fn new(
        steps: StepLog,
        meter: &Meter,
        memory: RankMemory,
        track: &SpanTrack,
        weights_sha256: String,
    ) -> Self {
        Self {
            steps,
            dropped_spans: track.dropped() + meter.num_lost,
            alike: meter.alike(),
            memory,
            resident_bytes: resources::resident_bytes().unwrap_or(0),
            weights_sha256,
            ..Self::default()
        }
    }
}
