//! Asks the driver now and then how busy this rank's card is and how much of its memory is used.
//!
//! Input: the ends of measured steps. Output: a part of the rank's report. The driver's numbers are about a period of up to a
//! second, so a question between two steps is about both.

use std::time::{Duration, Instant};

use paceline_cuda::Card;
use paceline_cuda::nvml::CardMonitor;
use paceline_failure::Result;
use paceline_observe::figures::event::{Event, Listener};
use paceline_observe::record::card_use::CardUse;
use paceline_observe::record::rank_report::RankReport;

/// The least time between two questions.
const INTERVAL: Duration = Duration::from_millis(100);

/// Watches the card of a rank.
#[derive(Debug)]
pub(crate) struct CardWatch {
    monitor: Option<CardMonitor>,
    warmup_steps: u64,
    asked: Option<Instant>,
    card: CardUse,
}

impl CardWatch {
    /// Watches a card in the steps after the first `warmup_steps`.
    pub(crate) fn new(card: &Card, warmup_steps: u64) -> Self {
        let mut of_card = CardUse::default();
        let monitor =
            CardMonitor::open(card).map_err(|error| of_card.is_missing(error.to_string()));
        Self { monitor: monitor.ok(), warmup_steps, asked: None, card: of_card }
    }
}

impl Listener for CardWatch {
    fn on(&mut self, event: &Event) -> Result<()> {
        let (Event::Step(step), Some(monitor)) = (event, &self.monitor) else { return Ok(()) };
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= INTERVAL);
        if step.number >= self.warmup_steps && is_due {
            self.asked = Some(Instant::now());
            let words = |error: paceline_cuda::CudaError| error.to_string();
            self.card.add(monitor.busy_pct().map_err(words), monitor.used_bytes().map_err(words));
        }
        Ok(())
    }

    fn add_to(&self, report: &mut RankReport) {
        report.card = Some(self.card.clone());
    }
}
