//! The events of training, and the listeners that receive them.
//!
//! The trainer knows only [`Listeners`], nothing of the console, files, TensorBoard or the profiler. A listener knows no
//! other listener.

use std::time::Duration;

use paceline_checkpoint::progress::{EpochSums, Evaluation, LossScaling, Progress};
use paceline_collectives::{Group, OpRecord};
use paceline_failure::Result;
use paceline_kernels::Compute;
use paceline_model::Model;
use paceline_strategies::{ActionTimes, Digested, StepLoss};
use paceline_trace::{Span, SpanTrack};

use crate::figures::facts::Facts;
use crate::record::rank_report::RankReport;
use crate::record::times::StepTimes;

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The name of its host.
    pub host: String,
    /// A line that says on which device it computes.
    pub device: String,
}

/// An event. Steps, epochs and ranks count from 0 here; texts for people count from 1.
#[derive(Debug)]
pub enum Event<'a> {
    /// The ranks have met.
    Placed {
        /// The ranks.
        group: &'a Group,
        /// Where each rank is, in rank order.
        placements: &'a [Placed],
    },
    /// The model is built.
    Built(&'a Model),
    /// Training begins, at the start or where the checkpoint ended.
    Begun {
        /// The progress at that point.
        progress: Progress,
        /// Number of samples before that position in the data.
        samples_before: u64,
    },
    /// The ranks have met again, as others than before.
    Regrouped(&'a Regrouped),
    /// An epoch begins.
    EpochBegun {
        /// Which one.
        epoch: u64,
    },
    /// A step is about to begin.
    StepBegun {
        /// Its number in this run.
        number: u64,
        /// The ranks.
        group: &'a Group,
        /// The threads of this rank.
        compute: &'a Compute,
    },
    /// A step, counted from 1, and the tensors of each rank. Only rank 0 gets this event.
    Passes(u64, &'a [Vec<Digested>]),
    /// A step is done.
    Step(&'a StepDone<'a>),
    /// The test set has been evaluated.
    Evaluated(Evaluation),
    /// A language model has made a text. Only rank 0 gets this event.
    Sampled {
        /// Optimizer steps so far.
        steps: u64,
        /// The text, with the beginning that it was given.
        text: &'a str,
    },
    /// The run ends before its last step, because the evaluation loss no longer falls.
    EarlyStop {
        /// Optimizer steps so far.
        steps: u64,
        /// The lowest loss.
        best: f64,
        /// Optimizer steps before the evaluation with the lowest loss.
        best_steps: u64,
    },
    /// An epoch is done, or the run ends within it.
    EpochEnded {
        /// Which one.
        epoch: u64,
        /// The sums over its samples.
        sums: EpochSums,
        /// Whether the model classifies.
        has_classes: bool,
        /// The batches that were trained, if the run ends within it.
        cut_after: Option<usize>,
        /// Its time, evaluations included.
        took: Duration,
    },
    /// A checkpoint is being written; the last one of a run is complete.
    Saved(Save),
    /// The last step is done. The group has all ranks.
    TrainingEnded(&'a Group),
    /// Everything is done. Only rank 0 gets this event: it has the reports of all ranks.
    Ended(&'a Facts<'a>),
}

impl Event<'_> {
    /// The optimizer steps and the epoch of an event that has a line in files: a step, an evaluation that is not repeated, a save, or
    /// a change of the ranks.
    pub fn position(&self) -> Option<(u64, u64)> {
        match self {
            Self::Step(of) => Some((of.steps, of.epoch)),
            Self::Evaluated(of) if !of.is_repeated => Some((of.steps, of.epoch)),
            Self::Saved(of) => Some((of.steps, of.epoch)),
            Self::Regrouped(of) => Some((of.steps, of.epoch)),
            _ => None,
        }
    }
}

/// A checkpoint that is being written.
#[derive(Clone, Copy, Debug)]
pub struct Save {
    /// Optimizer steps before it.
    pub steps: u64,
    /// The epoch of the last of these steps, from 0.
    pub epoch: u64,
    /// The time for which training has waited.
    pub took: Duration,
}

/// The ranks that go on after some were lost or have joined. Members have numbers that are never given twice.
#[derive(Clone, Debug)]
pub struct Regrouped {
    /// Optimizer steps before it.
    pub steps: u64,
    /// The epoch of the last of these steps, from 0.
    pub epoch: u64,
    /// How many ranks go on.
    pub ranks: usize,
    /// How many others are there and not needed, because the mesh or the tree of sums has no place for them.
    pub idle: usize,
    /// The members that are there no more.
    pub lost: Vec<u64>,
    /// Those that are new.
    pub joined: Vec<u64>,
    /// From the end of the last complete step until training goes on.
    pub took: Duration,
}

/// A step that is done.
#[derive(Clone, Copy, Debug)]
pub struct StepDone<'a> {
    /// Its number in this run.
    pub number: u64,
    /// Optimizer steps so far, those of earlier runs included.
    pub steps: u64,
    /// Its epoch.
    pub epoch: u64,
    /// Number of batches of the epoch that are done.
    pub batches: usize,
    /// Loss and counts.
    pub loss: &'a StepLoss,
    /// Whether the model classifies.
    pub has_classes: bool,
    /// The learning rate that it used.
    pub lr: f64,
    /// The norm of the gradients before clipping, if they are clipped or the loss is scaled, and nothing overflowed.
    pub grad_norm: Option<f64>,
    /// The loss scale after the step, if the loss is scaled.
    pub scaling: Option<LossScaling>,
    /// The time at which its batches were requested, in nanoseconds.
    pub asked_ns: u64,
    /// The time from the arrival of the batches to the end of the optimizer.
    pub whole: Span,
    /// Where its time went.
    pub times: StepTimes,
    /// The spans of the main thread.
    pub track: &'a SpanTrack,
    /// The operations of this rank.
    pub records: &'a [OpRecord],
    /// The actions of this rank as a part of a pipeline, in order.
    pub actions: &'a [ActionTimes],
    /// The ranks.
    pub group: &'a Group,
    /// The threads of this rank.
    pub compute: &'a Compute,
    /// The digests of all gradients and weights by the number of the parameter, if the run watches them.
    pub digests: Option<&'a [[u64; 2]]>,
}

impl StepDone<'_> {
    /// Whether the update was skipped, because gradients overflowed.
    pub fn is_skipped(&self) -> bool {
        self.scaling.is_some() && self.grad_norm.is_none()
    }
}

/// Something that receives events.
pub trait Listener {
    /// Called for each event, in the same order on all ranks, so it may communicate.
    fn on(&mut self, event: &Event) -> Result<()>;

    /// Adds its data to the report of its rank, once training has ended.
    fn add_to(&self, _report: &mut RankReport) {}
}

/// All listeners of a rank.
#[derive(Default)]
pub struct Listeners<'a>(Vec<Box<dyn Listener + 'a>>);

impl<'a> Listeners<'a> {
    /// Adds a listener, called after those before.
    pub fn add(&mut self, listener: impl Listener + 'a) {
        self.0.push(Box::new(listener));
    }

    /// Passes an event to all listeners, up to the first one that fails.
    pub fn tell(&mut self, event: Event) -> Result<()> {
        self.0.iter_mut().try_for_each(|listener| listener.on(&event))
    }

    /// Calls [`Listener::add_to`] of all.
    pub fn add_to(&self, report: &mut RankReport) {
        self.0.iter().for_each(|listener| listener.add_to(report));
    }
}
