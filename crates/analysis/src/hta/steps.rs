//! The steps of a trace, and which of them are analyzed.

use super::options::{Options, Rules, rounded};
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

/// The part of a trace that is analyzed: the host's work that began from the first moment until before the second, and the
/// device's work that follows from it. `None`: the whole trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window(pub(super) Option<(i64, i64)>);

impl Window {
    pub(super) fn holds(self, start_ns: i64) -> bool {
        self.0.is_none_or(|(from_ns, end_ns)| from_ns <= start_ns && start_ns < end_ns)
    }
}

/// Chooses the steps to analyze, and the window that goes with them. The last of two or more steps is left out unless the options
/// include it.
pub(super) fn choose(timeline: &Timeline, options: &Options) -> (Steps, Window) {
    if options.rules != Rules::Steps {
        return choose_as_hta(timeline, options);
    }
    let found = steps::of(timeline).len();
    let chosen = steps::analyzed(timeline, options.include_last_step);
    let ends = chosen.first().zip(chosen.last());
    let window = Window(ends.map(|(first, last)| (first.time.start_ns, last.time.end_ns())));
    (Steps { chosen, found }, window)
}

/// The same by HTA's rule. The window ends at the last start of a step, on the host or in the device's annotations of steps. Work
/// before the first step counts, and everything if no step can be left out.
fn choose_as_hta(timeline: &Timeline, options: &Options) -> (Steps, Window) {
    let mut steps = steps::marked(timeline);
    for step in &mut steps {
        step.time = rounded(step.time, options.rules);
    }
    // Still sorted: rounding keeps the order of the starts.
    let numbers = steps::numbers(timeline);
    let of_device = timeline
        .annotations
        .iter()
        .filter(|annotation| annotation.is_device && numbers[annotation.name.0 as usize].is_some());
    let views = of_device.map(|annotation| rounded(annotation.time, options.rules));
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
    (Steps { chosen: steps, found }, Window(end_ns.map(|end_ns| (i64::MIN, end_ns))))
}
