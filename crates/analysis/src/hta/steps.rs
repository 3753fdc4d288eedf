//! The steps of a trace, and which of them are analyzed.

use super::options::{Options, rounded};
use crate::steps::{self, Step};
use crate::timeline::Timeline;

/// The steps of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The analyzed steps, in order of time; empty if the trace names no steps and is analyzed as a whole.
    pub chosen: Vec<Step>,
    /// How many steps the trace has.
    pub found: usize,
}

impl Steps {
    /// The index of the chosen step in which a time lies.
    pub fn at(&self, at_ns: i64) -> Option<usize> {
        let after = self.chosen.partition_point(|step| step.time.start_ns <= at_ns);
        let step = self.chosen.get(after.checked_sub(1)?)?;
        (at_ns < step.time.end_ns()).then_some(after - 1)
    }
}

/// The part of a trace that is analyzed: the host's work that began before this time, and the device's work that follows from
/// it. `None`: the whole trace, because there are fewer than two steps, so no step can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window(pub(super) Option<i64>);

impl Window {
    pub(super) fn holds(self, start_ns: i64) -> bool {
        self.0.is_none_or(|end_ns| start_ns < end_ns)
    }
}

/// Chooses the steps to analyze, and the window that goes with them, by HTA's rule. The last of two or more
/// steps is left out unless the options include it. The window then ends at the last start of a step, on the
/// host or in the device's annotations of steps. Work before the first step counts.
pub(super) fn choose(timeline: &Timeline, options: &Options) -> (Steps, Window) {
    let mut steps = steps::of(timeline);
    for step in &mut steps {
        step.time = rounded(step.time, options.rounding);
    }
    // Still sorted: rounding keeps the order of the starts.
    let numbers = steps::numbers(timeline);
    let of_device = timeline
        .annotations
        .iter()
        .filter(|annotation| annotation.is_device && numbers[annotation.name.0 as usize].is_some());
    let views = of_device.map(|annotation| rounded(annotation.time, options.rounding));
    let all = steps.iter().map(|step| step.time).chain(views);
    let end_ns = if options.include_last_step {
        all.map(|time| time.end_ns().saturating_add(1)).max()
    } else {
        all.map(|time| time.start_ns).max()
    };
    let found = steps.len();
    if found < 2 {
        return (Steps { chosen: steps, found }, Window(None));
    }
    steps.truncate(if options.include_last_step { found } else { found - 1 });
    (Steps { chosen: steps, found }, Window(end_ns))
}
