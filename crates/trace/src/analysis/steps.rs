//! Which steps a trace holds, and which of them are looked at.

use super::{Options, work};
use crate::timeline::{Stretch, Timeline};

/// One `ProfilerStep#N` of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its number N.
    pub number: u64,
    /// When it lasted.
    pub time: Stretch,
}

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
    /// Any: there are no two steps, so none of them can be left out.
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

/// The number N of `ProfilerStep#N`.
pub(super) fn step_number(name: &str) -> Option<u64> {
    name.strip_prefix("ProfilerStep")?.trim_start().strip_prefix('#')?.trim().parse().ok()
}

/// The steps of a trace and what of the trace belongs to them, by HTA's rule: of two or more steps the last
/// is left out unless asked for, and with it whatever the host began once the last step had begun, on the
/// host or in the device's view of it. What came before the first step counts.
pub(super) fn choose(timeline: &Timeline, options: &Options) -> (Steps, Window) {
    let mut steps = Vec::new();
    let (mut last_start, mut last_end) = (i64::MIN, i64::MIN);
    for annotation in &timeline.annotations {
        let Some(number) = step_number(timeline.names.text(annotation.name)) else { continue };
        let time = work::rounded(annotation.time, options.rounding);
        last_start = last_start.max(time.start_ns);
        last_end = last_end.max(time.end_ns());
        if !annotation.is_device {
            steps.push(Step { number, time });
        }
    }
    steps.sort_by_key(|step| step.time.start_ns);
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
