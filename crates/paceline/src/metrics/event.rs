//! What happens during training, and who is told.
//!
//! The trainer tells [`Listeners`] of each step, epoch, evaluation and save, and knows nothing else of the
//! console, of files, of TensorBoard or of the profiler. A listener knows nothing of the other ones.

use std::time::Duration;

use paceline_collectives::{Group, OpRecord};
use paceline_model::Model;
use paceline_strategies::StepLoss;
use paceline_trace::{Span, SpanTrack};

use super::facts::Facts;
use super::meter::StepTimes;
use super::rank_report::RankReport;
use crate::Result;
use crate::run::progress::{EpochSums, Evaluation, Progress};

/// Something that happened. Steps, epochs and ranks count from 0 here; what people read counts from 1.
#[derive(Debug)]
pub enum Event<'a> {
    /// The ranks have met.
    Placed {
        /// The ranks.
        group: &'a Group,
        /// On rank 0 a line for each rank that says where it computes.
        placements: &'a [String],
    },
    /// The model is built.
    Built(&'a Model),
    /// Training begins where the checkpoint, if there is one, ends.
    Begun {
        /// Where that is.
        progress: Progress,
        /// Samples that lie before that place in the data.
        samples_before: u64,
    },
    /// An epoch begins.
    EpochBegun {
        /// Which one.
        epoch: u64,
        /// Its batches.
        num_batches: usize,
    },
    /// A step is about to begin.
    StepBegun {
        /// Its number in this run.
        number: u64,
        /// The ranks.
        group: &'a Group,
    },
    /// A step is done.
    Step(StepDone<'a>),
    /// The test set has been evaluated.
    Evaluated(Evaluation),
    /// An epoch is done.
    EpochEnded {
        /// Which one.
        epoch: u64,
        /// Its samples.
        sums: EpochSums,
        /// Its time, evaluations included.
        took: Duration,
    },
    /// A checkpoint has been saved.
    Saved {
        /// Optimizer steps before it.
        steps: u64,
        /// The time that all ranks spent on it.
        took: Duration,
    },
    /// The last step is done. The group is that of the ranks.
    TrainingEnded(&'a Group),
    /// Everything is done. Only rank 0 is told, since the reports of the ranks are gathered there.
    Ended(&'a Facts<'a>),
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
    /// Batches of the epoch that are done.
    pub batches: usize,
    /// Loss and counts.
    pub loss: &'a StepLoss,
    /// Whether the model classifies.
    pub has_classes: bool,
    /// The learning rate that it used.
    pub lr: f64,
    /// The norm of the gradients before they were clipped, if they were to be.
    pub grad_norm: Option<f64>,
    /// When its batches were asked for.
    pub asked_ns: u64,
    /// From the batches being there to the end of the optimizer.
    pub whole: Span,
    /// Where its time went.
    pub times: StepTimes,
    /// What the main thread recorded.
    pub track: &'a SpanTrack,
    /// The operations of this rank.
    pub records: &'a [OpRecord],
    /// The ranks.
    pub group: &'a Group,
}

/// Whoever wants to know what happens.
pub trait Listener {
    /// Something happened. Listeners on all ranks are told in the same order, so that this may
    /// communicate.
    fn on(&mut self, event: &Event) -> Result<()>;

    /// Adds what this listener knows to the report of its rank, once training has ended.
    fn add_to(&self, _report: &mut RankReport) {}
}

/// All listeners of a rank.
#[derive(Default)]
pub struct Listeners<'a>(Vec<Box<dyn Listener + 'a>>);

impl<'a> Listeners<'a> {
    /// Adds a listener. Listeners are told in the order in which they were added.
    pub fn add(&mut self, listener: impl Listener + 'a) {
        self.0.push(Box::new(listener));
    }

    /// Tells all listeners of an event. The first one that fails ends it.
    pub fn tell(&mut self, event: Event) -> Result<()> {
        self.0.iter_mut().try_for_each(|listener| listener.on(&event))
    }

    /// Adds what the listeners know to the report of their rank.
    pub fn add_to(&self, report: &mut RankReport) {
        self.0.iter().for_each(|listener| listener.add_to(report));
    }
}
