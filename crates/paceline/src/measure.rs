//! What each step cost: from spans and records of operations to times that add up.

use std::collections::BTreeMap;

use paceline_collectives::{OpRecord, OpTimes};
use paceline_memory::{Allocator, Category};
use paceline_strategies::span;
use paceline_trace::{IntervalSet, Lane, Span};
use serde::{Deserialize, Serialize};

use crate::resources;

/// The times of one step on one rank, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// From the batch being there to the end of the optimizer.
    pub step: u64,
    /// Waiting for the batch, before the step.
    pub data: u64,
    /// Forward pass and loss.
    pub forward: u64,
    /// Backward pass, without what it was blocked on communication.
    pub backward: u64,
    /// Optimizer.
    pub optimizer: u64,
    /// The main thread was blocked on communication.
    pub exposed: u64,
    /// Communication ran while the main thread computed.
    pub hidden: u64,
    /// Communication waited for the slowest rank.
    pub wait: u64,
    /// Communication moved and reduced data.
    pub moving: u64,
}

impl StepTimes {
    /// The main thread computed.
    pub fn compute(&self) -> u64 {
        self.forward + self.backward + self.optimizer
    }
}

/// Turns what a step recorded into times.
#[derive(Debug)]
pub struct Meter {
    records: Vec<OpRecord>,
}

impl Meter {
    /// A meter with room for the records of a step.
    pub fn new() -> Self {
        Self { records: Vec::with_capacity(1000) }
    }

    /// Where a group's records of the step go: see `Group::fresh_records`.
    pub fn records(&mut self) -> &mut Vec<OpRecord> {
        &mut self.records
    }

    /// The times of the step that `whole` spans, from the main lane's spans and the records.
    pub fn take(&mut self, whole: Span, data_ns: u64, lane: &mut Lane) -> StepTimes {
        let exposed = IntervalSet::union(lane.named(span::EXPOSED));
        let busy = |name: &str| IntervalSet::union(lane.named(name)).difference(&exposed);
        let (forward, backward) = (busy(span::FORWARD), busy(span::BACKWARD));
        let optimizer = busy(span::OPTIMIZER);
        let computing = [span::FORWARD, span::BACKWARD, span::OPTIMIZER];
        let computing = IntervalSet::union(computing.iter().flat_map(|name| lane.named(name)))
            .difference(&exposed);
        let communicating = IntervalSet::union(self.records.iter().map(|record| Span {
            start_ns: record.times.started_ns,
            end_ns: record.times.finished_ns,
        }));
        let total = |part: fn(&OpTimes) -> u64| self.records.iter().map(|r| part(&r.times)).sum();
        let times = StepTimes {
            step: whole.len_ns(),
            data: data_ns,
            forward: forward.len_ns(),
            backward: backward.len_ns(),
            optimizer: optimizer.len_ns(),
            exposed: exposed.len_ns(),
            hidden: communicating.intersection(&computing).len_ns(),
            wait: total(OpTimes::wait_ns),
            moving: total(OpTimes::move_ns),
        };
        self.records.clear();
        lane.clear();
        times
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

/// The entry of all categories together, beside those of each.
pub const TOTAL: &str = "total";

/// What one rank has to say at the end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// The steps that count, in order.
    pub steps: Vec<StepTimes>,
    /// The most bytes alive at once, by category.
    pub peak_bytes: BTreeMap<String, u64>,
    /// Proportional set size in bytes.
    pub resident_bytes: u64,
    /// Spans that found no room.
    pub dropped_spans: u64,
}

impl RankReport {
    /// The report of this rank now.
    pub fn new(steps: Vec<StepTimes>, allocator: &Allocator, lane: &Lane) -> Self {
        let peak =
            |category: Category| (category.name().to_owned(), allocator.usage(category).peak_bytes);
        let mut peak_bytes: BTreeMap<_, _> = Category::ALL.into_iter().map(peak).collect();
        peak_bytes.insert(TOTAL.into(), allocator.total().peak_bytes);
        let resident_bytes = resources::resident_bytes().unwrap_or(0);
        Self { steps, peak_bytes, resident_bytes, dropped_spans: lane.dropped() }
    }
}

/// The value below which the given part of `values` lies (nearest rank); zero for none.
pub fn quantile(values: &[u64], part: f64) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use paceline_collectives::OpKind;

    use super::*;

    #[test]
    fn the_times_of_a_step_add_up() {
        let mut lane = Lane::with_capacity(10);
        let span = |start_ns, end_ns| Span { start_ns, end_ns };
        lane.push(span::FORWARD, span(0, 100));
        lane.push(span::BACKWARD, span(100, 300));
        lane.push(span::EXPOSED, span(250, 260));
        lane.push(span::EXPOSED, span(300, 340));
        lane.push(span::OPTIMIZER, span(340, 350));
        let mut meter = Meter::new();
        meter.records().push(OpRecord {
            kind: OpKind::AllReduce,
            seq: 0,
            bytes: 8,
            times: OpTimes {
                submitted_ns: 140,
                started_ns: 150,
                present_ns: 200,
                finished_ns: 320,
            },
        });
        let times = meter.take(span(0, 360), 7, &mut lane);
        assert_eq!((times.step, times.data), (360, 7));
        assert_eq!((times.forward, times.backward, times.optimizer), (100, 190, 10));
        assert_eq!((times.exposed, times.hidden), (50, 140));
        assert_eq!((times.wait, times.moving), (50, 120));
        assert_eq!(meter.take(span(0, 1), 0, &mut lane).compute(), 0);
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        assert_eq!(quantile(&[5, 1, 9], 0.5), 5);
        assert_eq!(quantile(&[4, 1, 2, 3], 0.5), 2);
        assert_eq!(quantile(&(1..=200).collect::<Vec<_>>(), 0.99), 198);
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
