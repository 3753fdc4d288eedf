//! The backward passes of PyTorch that a trace shows without naming them.
//!
//! `loss.backward()` leaves no span of its own. Autograd records each function that it evaluates, on the thread that called
//! it or on threads of its own. In the second case, nothing at all is recorded on the thread that runs the step. Input: a
//! timeline. Output: when that thread was in a backward pass, and when it waited there for communication. This module does
//! not know which steps are analyzed.

use crate::hta::backend_of;
use crate::steps;
use crate::timeline::{TimeRange, Timeline};

/// The prefix of the names under which autograd records its functions.
const FUNCTION: &str = "autograd::engine::evaluate_function";

/// A backward pass, as seen from the thread that runs the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackwardPass {
    /// From the start of its first function to the end of its last.
    pub(crate) time: TimeRange,
    /// After it, until the collectives end that run on other threads, if the thread of the steps does nothing else: the call
    /// returns only then. May be empty.
    pub(crate) wait: TimeRange,
}

/// All backward passes, by start. Two functions belong to one pass if the thread of the steps begins nothing else between
/// them.
pub(crate) fn passes(timeline: &Timeline) -> Vec<BackwardPass> {
    let names = &timeline.names;
    let is_function: Vec<bool> = names.iter().map(|name| name.starts_with(FUNCTION)).collect();
    let of_autograd = |operator: &&crate::timeline::Operator| is_function[operator.name.0 as usize];
    let ends = |time: TimeRange| (time.start_ns, time.end_ns());
    let mut functions: Vec<(i64, i64)> =
        timeline.operators.iter().filter(of_autograd).map(|operator| ends(operator.time)).collect();
    functions.sort_unstable();
    let Some(lane) = steps::lane(timeline).filter(|_| !functions.is_empty()) else {
        return Vec::new();
    };
    let others = timeline.operators.iter().filter(|operator| !of_autograd(operator));
    let others = others.filter(|operator| operator.lane == lane).map(|operator| operator.time);
    let named = timeline.annotations.iter().filter(|span| !span.is_device && span.lane == lane);
    let mut begins: Vec<i64> =
        others.chain(named.map(|span| span.time)).map(|time| time.start_ns).collect();
    begins.sort_unstable();
    let next = |at_ns: i64| begins.get(begins.partition_point(|begin| *begin < at_ns)).copied();
    let mut passes: Vec<(i64, i64)> = Vec::new();
    for (start_ns, end_ns) in functions {
        match passes.last_mut() {
            Some(last) if next(last.1).is_none_or(|begin_ns| begin_ns >= start_ns) => {
                last.1 = last.1.max(end_ns);
            }
            _ => passes.push((start_ns, end_ns)),
        }
    }
    let is_transfer: Vec<bool> = names.iter().map(|name| backend_of(name).is_some()).collect();
    let elsewhere = timeline.operators.iter().filter(|operator| operator.lane != lane);
    let transfers = elsewhere.filter(|operator| is_transfer[operator.name.0 as usize]);
    let mut transfers: Vec<(i64, i64)> = transfers.map(|operator| ends(operator.time)).collect();
    transfers.sort_unstable();
    // When all transfers up to this one had ended.
    let mut done_ns = i64::MIN;
    for transfer in &mut transfers {
        done_ns = done_ns.max(transfer.1);
        transfer.1 = done_ns;
    }
    let pass = |(start_ns, end_ns): (i64, i64)| {
        let until_ns = next(end_ns).unwrap_or(end_ns);
        let begun = transfers.partition_point(|transfer| transfer.0 < until_ns);
        let done_ns = begun.checked_sub(1).map_or(end_ns, |last| transfers[last].1);
        let wait = TimeRange::between(end_ns, done_ns.min(until_ns));
        BackwardPass { time: TimeRange::between(start_ns, end_ns), wait }
    };
    passes.into_iter().map(pass).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, timeline};
    use crate::timeline::TrackId;

    /// Moves the operators whose names begin so to another row.
    fn on(mut timeline: Timeline, begin: &str, lane: u32) -> Timeline {
        let names = &timeline.names;
        let moved = |name| names.text(name).starts_with(begin);
        let moved: Vec<bool> = timeline.operators.iter().map(|of| moved(of.name)).collect();
        let operators = timeline.operators.iter_mut().zip(moved).filter(|of| of.1);
        operators.for_each(|(operator, _)| operator.lane = TrackId(lane));
        timeline
    }

    fn step() -> Timeline {
        let function = |timeline: Timeline, start_us: i64, end_us: i64| {
            timeline.operator(&format!("{FUNCTION}: MulBackward0"), start_us, end_us)
        };
        let timeline = timeline(0).step(0, 0, 100).operator("aten::mul", 0, 20);
        let timeline = function(function(timeline, 22, 40), 41, 50);
        // A second micro-batch.
        let timeline = timeline.operator("aten::mul", 51, 60);
        let timeline = function(function(timeline, 61, 70), 66, 69);
        timeline.operator("gloo:all_reduce", 45, 75).operator("gloo:all_reduce", 76, 80).operator(
            "aten::add_",
            85,
            95,
        )
    }

    fn told(timeline: &Timeline) -> Vec<[i64; 4]> {
        let us = |pass: BackwardPass| {
            [pass.time.start_ns, pass.time.end_ns(), pass.wait.start_ns, pass.wait.end_ns()]
                .map(|ns| ns / 1000)
        };
        passes(timeline).into_iter().map(us).collect()
    }

    #[test]
    fn passes_are_found_on_any_thread_with_the_wait_at_their_end() {
        let timeline = on(step(), "gloo:", 2);
        let expected = [[22, 50, 50, 51], [61, 70, 70, 80]];
        assert_eq!(told(&timeline), expected);
        assert_eq!(told(&on(timeline, FUNCTION, 1)), expected);
    }

    #[test]
    fn without_autograd_steps_or_transfers_nothing_is_made_up() {
        assert_eq!(told(&timeline(0).step(0, 0, 100).operator("aten::mul", 0, 20)), [[0; 4]; 0]);
        let without_step = timeline(0).operator(&format!("{FUNCTION}: A"), 0, 20);
        assert_eq!(told(&without_step), [[0; 4]; 0]);
        let alone = timeline(0).step(0, 0, 100).operator(&format!("{FUNCTION}: A"), 5, 20);
        assert_eq!(told(&alone), [[5, 20, 20, 20]]);
    }
}
