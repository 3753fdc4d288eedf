//! When the units of a sharded model are gathered, and when a pass needs them: means over steps that are alike.
//!
//! Input: the marks that a strategy records on the main track, and the records of operations with their purposes. Output: one line per use of a
//! unit. This file does not know how a strategy decides when to gather.

use paceline_collectives::{OpRecord, Purpose};
use paceline_host::text::ms;
use paceline_strategies::span;
use paceline_trace::SpanTrack;
use serde::{Deserialize, Serialize};

use crate::record::op_moments::OpMoments;

/// A use of a unit in a step. Its times are in milliseconds since the step began, and negative before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GatherMoments {
    /// The number of the unit.
    pub unit: usize,
    /// Whether the backward pass uses it.
    pub is_backward: bool,
    /// Its gather. It has no bytes if the unit was still there and nothing was gathered.
    pub op: OpMoments,
    /// When the pass needed the unit.
    pub needed_ms: f64,
    /// How long the pass waited.
    pub exposed_ms: f64,
}

/// The uses of a step, in order. `records` have the operations that the step before has submitted for this one too. Empty if
/// the strategy gathers nothing.
pub fn uses(begin_ns: u64, track: &SpanTrack, records: &[OpRecord]) -> Vec<GatherMoments> {
    let since = |ns: u64| (ns as f64 - begin_ns as f64) / 1e6;
    let last_ns = next_step_ns(track);
    let mut sent: Vec<&OpRecord> = records
        .iter()
        .filter(|record| {
            matches!(record.purpose, Purpose::Gather(_)) && record.times.submitted_ns < last_ns
        })
        .collect();
    let needed = track.marked(span::GATHER_NEEDED).filter(|mark| mark.at_ns < last_ns);
    let there = track.marked(span::GATHER_THERE).filter(|mark| mark.at_ns < last_ns);
    let backward_ns = track.named(span::BACKWARD).map(|span| span.start_ns).min();
    needed
        .zip(there)
        .map(|(needed, there)| {
            let mut of_use = GatherMoments {
                unit: needed.id,
                is_backward: backward_ns.is_some_and(|begin| needed.at_ns >= begin),
                needed_ms: since(needed.at_ns),
                exposed_ms: ms(there.at_ns - needed.at_ns),
                ..GatherMoments::default()
            };
            let place = sent.iter().position(|of| of.purpose == Purpose::Gather(needed.id));
            let place = place.filter(|at| sent[*at].times.submitted_ns < there.at_ns);
            if let Some(record) = place.map(|at| sent.remove(at)) {
                of_use.op = OpMoments::of(record, since);
            }
            of_use
        })
        .collect()
}

/// The moment from which the operations of a step are for the next one.
pub fn next_step_ns(track: &SpanTrack) -> u64 {
    track.marked(span::NEXT_STEP).next().map_or(u64::MAX, |mark| mark.at_ns)
}

#[cfg(test)]
mod tests {
    use paceline_trace::Span;

    use super::*;
    use crate::record::op_moments::tests::record;

    #[test]
    fn a_use_is_matched_with_its_gather_also_if_the_step_before_sent_it() {
        let mut track = SpanTrack::with_capacity(20);
        track.mark_at(span::GATHER_NEEDED, 7, 1010);
        track.mark_at(span::GATHER_THERE, 7, 1015);
        track.mark_at(span::GATHER_NEEDED, 8, 1100);
        track.mark_at(span::GATHER_THERE, 8, 1101);
        track.push(span::BACKWARD, Span { start_ns: 1200, end_ns: 1400 });
        // Still there from the forward pass.
        track.mark_at(span::GATHER_NEEDED, 8, 1201);
        track.mark_at(span::GATHER_THERE, 8, 1202);
        track.mark_at(span::NEXT_STEP, 0, 1500);
        let records = [
            record(Purpose::Gather(7), [991, 995, 995, 1015]),
            record(Purpose::Bucket(8), [1000, 1001, 1001, 1002]),
            record(Purpose::Gather(8), [1002, 1016, 1016, 1050]),
            // For the next step.
            record(Purpose::Gather(7), [1502, 1503, 1503, 1504]),
        ];
        let uses = uses(1000, &track, &records);
        let times = |at: usize| {
            let GatherMoments { unit, is_backward, op, needed_ms, exposed_ms } = uses[at];
            let times = [op.ready_ms, op.done_ms, needed_ms, exposed_ms];
            (unit, is_backward, times.map(|ms| (ms * 1e6).round()))
        };
        assert_eq!(times(0), (7, false, [-9.0, 15.0, 10.0, 5.0]));
        assert_eq!(times(1), (8, false, [2.0, 50.0, 100.0, 1.0]));
        assert_eq!(times(2), (8, true, [0.0, 0.0, 201.0, 1.0]));
        assert_eq!((uses[1].op.bytes, uses[2].op.bytes, uses.len()), (8, 0, 3));
    }
}
