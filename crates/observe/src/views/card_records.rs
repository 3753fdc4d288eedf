//! The records of the vendor's profiler about this rank's card while steps are recorded.
//!
//! Without its library a trace has the times of our own events of the card, and says why.

use paceline_cuda::Card;
use paceline_cuda::cupti::ActivityRecorder;
use paceline_trace::ActivityRecord;

/// The records of a card.
#[derive(Debug)]
pub(super) struct CardRecords {
    card: Card,
    recorder: Option<ActivityRecorder>,
    /// Why there are none.
    missing: Option<String>,
    /// How many were lost.
    pub(super) lost: u64,
}

impl CardRecords {
    pub(super) fn new(card: Card) -> Self {
        Self { card, recorder: None, missing: None, lost: 0 }
    }

    /// Begins to record.
    pub(super) fn begin(&mut self) {
        let started = ActivityRecorder::start(&self.card);
        self.recorder = started.map_err(|error| self.missing = Some(error.to_string())).ok();
    }

    /// Ends it. Returns the records.
    pub(super) fn end(&mut self) -> Vec<ActivityRecord> {
        let Some(recorder) = self.recorder.take() else { return Vec::new() };
        let finished = recorder.finish();
        let (activities, lost) =
            finished.map_err(|error| self.missing = Some(error.to_string())).unwrap_or_default();
        self.lost += lost;
        activities
    }

    /// Why there are no records, for the trace.
    pub(super) fn missing(&self) -> Option<String> {
        self.missing.clone()
    }
}
