//! The causes of lost time, one file each, and [`interrupted`], which three of them need.
//!
//! A finder gets a rank's steps and a plan. It returns [`Found`], or `None` if the trace does not show the cause: the evidence,
//! the lines of Python, and two plans with the cause taken away. It does not judge whether the gain is worth a change.

mod allocation;
pub(super) mod buckets;
mod copies;
mod elementwise;
mod exposed;
mod first_bucket;
mod gathers;
mod host_bound;
mod interrupted;
mod layout;
mod loader;
mod no_sync;
mod optimizer;
pub(super) mod pipeline;
mod small_collectives;
pub(super) mod straggler;
mod synchronizations;
mod tensor_cores;
mod zeroing;

use std::collections::HashMap;

use serde::Serialize;

use super::names::brief;
use super::recorded::{Call, Recorded, Work};
use super::replay::Plan;
use crate::timeline::TimeRange;

/// The cause of lost time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The loop waits for the next batch.
    Loader,
    /// Memory is taken from the driver and given back in every step.
    Allocation,
    /// The host waits for the device.
    Synchronizations,
    /// Batches are copied from pageable memory, or the host waits for copies.
    Copies,
    /// Gradients are set to zero by kernels.
    Zeroing,
    /// The optimizer launches a kernel for each parameter and operation.
    Optimizer,
    /// Images are converted between NCHW and NHWC.
    Layout,
    /// Products of f32 do not use tensor cores.
    TensorCores,
    /// Chains of element-wise kernels.
    Elementwise,
    /// Gradients are exchanged after every micro-batch.
    NoSync,
    /// Parameters are gathered while the device waits.
    Gathers,
    /// Many small collectives.
    SmallCollectives,
    /// The first bucket is sent late.
    FirstBucket,
    /// Communication during which nothing is computed.
    Exposed,
    /// The device waits for launches.
    HostBound,
    /// One rank makes the others wait.
    Straggler,
    /// Stages of a pipeline differ.
    Pipeline,
}

impl Cause {
    /// Its name in files, and a few words for people.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Loader => ("loader", "The loop waits for the data loader"),
            Self::Allocation => ("allocation", "Memory is allocated in the loop"),
            Self::Synchronizations => {
                ("synchronizations", "The host waits for the device in the loop")
            }
            Self::Copies => (
                "copies",
                "Batches are copied from pageable memory, or the host waits for the copies",
            ),
            Self::Zeroing => ("zeroing", "Gradients are set to zero by kernels"),
            Self::Optimizer => ("optimizer", "The optimizer is not fused"),
            Self::Layout => ("layout", "Images are converted between NCHW and NHWC"),
            Self::TensorCores => ("tensor_cores", "Products of f32 run without tensor cores"),
            Self::Elementwise => ("elementwise", "Element-wise operations are not fused"),
            Self::NoSync => ("no_sync", "Gradients are exchanged after every micro-batch"),
            Self::Gathers => ("gathers", "The device waits for gathered parameters"),
            Self::SmallCollectives => ("small_collectives", "Many small collectives"),
            Self::FirstBucket => ("first_bucket", "The first bucket is sent late"),
            Self::Exposed => ("exposed", "Communication is exposed"),
            Self::HostBound => ("host_bound", "The device waits for launches"),
            Self::Straggler => ("straggler", "One rank makes the others wait"),
            Self::Pipeline => ("pipeline", "The stages of the pipeline are unequal"),
        }
    }

    /// A few words for people.
    pub fn title(self) -> &'static str {
        self.names().1
    }

    /// Its name in files.
    pub fn key(self) -> &'static str {
        self.names().0
    }

    /// Whether the trace determines the gain of its removal. The time of other code is not in the trace.
    pub fn is_determined(self) -> bool {
        let runs_other_code = matches!(
            self,
            Self::Optimizer
                | Self::Layout
                | Self::TensorCores
                | Self::Elementwise
                | Self::HostBound
        );
        !runs_other_code
    }
}

/// A cause as one rank shows it.
pub(super) struct Found {
    /// A title instead of the cause's own.
    pub(super) title: Option<String>,
    /// The lines to write in the program.
    pub(super) change: String,
    /// The evidence in a sentence.
    pub(super) text: String,
    /// The names that take the time, with nanoseconds.
    pub(super) what: HashMap<String, i64>,
    /// Where it is longest.
    pub(super) at: Option<TimeRange>,
    /// The steps if the change does as little as can be expected of it.
    pub(super) least: Plan,
    /// The steps if the change does as much as can be expected of it.
    pub(super) most: Plan,
}

/// Finds a cause in the steps of a rank, on top of a plan.
pub(super) type Finder = fn(&Recorded, &Plan) -> Option<Found>;

/// All causes that a rank shows by itself. Special ones come before general ones, which count only the rest.
pub(super) const FINDERS: [(Cause, Finder); 15] = [
    (Cause::Loader, loader::find),
    (Cause::Allocation, allocation::find),
    (Cause::Synchronizations, synchronizations::find),
    (Cause::Copies, copies::find),
    (Cause::Zeroing, zeroing::find),
    (Cause::Optimizer, optimizer::find),
    (Cause::Layout, layout::find),
    (Cause::TensorCores, tensor_cores::find),
    (Cause::Elementwise, elementwise::find),
    (Cause::NoSync, no_sync::find),
    (Cause::Gathers, gathers::find),
    (Cause::SmallCollectives, small_collectives::find),
    (Cause::FirstBucket, first_bucket::find),
    (Cause::Exposed, exposed::find),
    (Cause::HostBound, host_bound::find),
];

/// The sums of a finder: how often, for how long, by which names, and where it is longest.
#[derive(Default)]
struct Tally {
    count: usize,
    total_ns: i64,
    what: HashMap<String, i64>,
    longest: Option<TimeRange>,
}

impl Tally {
    fn add(&mut self, name: String, time: TimeRange) {
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(time.dur_ns);
        *self.what.entry(name).or_default() += time.dur_ns;
        if self.longest.is_none_or(|longest| longest.dur_ns < time.dur_ns) {
            self.longest = Some(time);
        }
    }

    fn add_work(&mut self, of: &Recorded, work: &Work) {
        self.add(brief(of.text(work.name)), work.time);
    }

    /// A call, under the name of the outermost operator of PyTorch around it.
    fn add_call(&mut self, of: &Recorded, call: &Call) {
        let names = of.around(call).map(|frame| of.text(frame.name));
        let name = names.filter(|name| name.starts_with("aten::")).last();
        self.add(name.unwrap_or(of.text(call.name)).to_owned(), call.time);
    }

    /// Per step: how often, and how many milliseconds.
    fn per_step(&self, of: &Recorded) -> (f64, f64) {
        (of.per_step(self.count as f64), of.per_step(self.total_ns as f64 / 1e6))
    }

    /// The finding, with this evidence and change.
    fn found(self, text: String, change: impl Into<String>, [least, most]: [Plan; 2]) -> Found {
        let Self { what, longest: at, .. } = self;
        Found { title: None, change: change.into(), text, what, at, least, most }
    }
}

/// The longest time in which a host prepares a launch. A longer time before it has another cause, which no change of the launches
/// takes away: a lock, a message, work of the program itself.
const PREPARED_NS: i64 = 200_000;

/// The host's time before a launch without the part that prepared it.
fn unprepared(lag_ns: i64) -> i64 {
    (lag_ns - PREPARED_NS).max(lag_ns.min(0))
}

/// A duration made shorter by a factor.
fn scaled(ns: i64, by: f64) -> i64 {
    (ns as f64 * by).round() as i64
}
