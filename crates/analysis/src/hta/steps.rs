//! Which steps a trace holds, and which of them are looked at.

use super::options::{Options, rounded};
use crate::steps::{self, Step};
use crate::timeline::Timeline;

/// The steps of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Those that were looked at, in order of time; empty where the trace names none, and was looked at
    /// as a whole.
    pub chosen: Vec<Step>,
    /// How many the trace holds.
    pub found: usize,
}

impl Steps {
    /// Which of the chosen steps lasts at a moment, as an index.
    pub fn at(&self, at_ns: i64) -> Option<usize> {
        let after = self.chosen.partition_point(|step| step.time.start_ns <= at_ns);
        let step = self.chosen.get(after.checked_sub(1)?)?;
        (at_ns < step.time.end_ns()).then_some(after - 1)
    }
}

/// What the host did at these moments is looked at, and what the device did because of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// The whole trace: there are fewer than two steps, so no step can be left out.
    All,
    /// Up to this moment, itself left out.
    Before(i64),
    /// Up to this moment and with it.
    UpTo(i64),
}

impl Window {
    pub(super) fn holds(self, start_ns: i64) -> bool {
        match self {
            Self::All => true,
            Self::Before(end_ns) => start_ns < end_ns,
            Self::UpTo(end_ns) => start_ns <= end_ns,
        }
    }
}

/// The steps of a trace and what of the trace belongs to them, by HTA's rule: of two or more steps the last
/// is left out unless asked for, and with it whatever the host began once the last step had begun, on the
/// host or in the device's view of it. What came before the first step counts.
pub(super) fn choose(timeline: &Timeline, options: &Options) -> (Steps, Window) {
    let mut steps = steps::of(timeline);
    for step in &mut steps {
        step.time = rounded(step.time, options.rounding);
    }
    // In order still: where begins were in order, rounded ones are.
    let numbers = steps::numbers(timeline);
    let of_device = timeline
        .annotations
        .iter()
        .filter(|annotation| annotation.is_device && numbers[annotation.name.0 as usize].is_some());
    let views = of_device.map(|annotation| rounded(annotation.time, options.rounding));
    let all = || steps.iter().map(|step| step.time).chain(views.clone());
    let last_start = all().map(|time| time.start_ns).max().unwrap_or(i64::MIN);
    let last_end = all().map(|time| time.end_ns()).max().unwrap_or(i64::MIN);
    let found = steps.len();
    if found < 2 {
        return (Steps { chosen: steps, found }, Window::All);
    }
    if options.include_last_step {
        return (Steps { chosen: steps, found }, Window::UpTo(last_end));
    }
    steps.pop();
    (Steps { chosen: steps, found }, Window::Before(last_start))
}
