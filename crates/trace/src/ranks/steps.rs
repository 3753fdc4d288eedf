//! The steps of a trace, by its annotations `ProfilerStep#N`.

use crate::timeline::{Stretch, Timeline};

/// What PyTorch's profiler, and ours, call a step.
const PREFIX: &str = "ProfilerStep#";

/// The steps of one rank, in order of time.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps(Vec<(u64, Stretch)>);

impl Steps {
    /// The steps that a trace names. PyTorch 1.x wrote them as operators.
    pub(super) fn of(timeline: &Timeline) -> Self {
        let numbers: Vec<Option<u64>> = timeline.names.iter().map(number).collect();
        let number = |name: crate::timeline::NameId| numbers[name.0 as usize];
        let annotations = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
        let mut steps: Vec<(u64, Stretch)> = annotations
            .filter_map(|annotation| Some((number(annotation.name)?, annotation.time)))
            .chain(timeline.operators.iter().filter_map(|op| Some((number(op.name)?, op.time))))
            .collect();
        steps.sort_unstable_by_key(|&(number, time)| (time, number));
        steps.dedup_by_key(|&mut (number, _)| number);
        Self(steps)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Stretch)> {
        self.0.iter().copied()
    }

    /// When a step lasted.
    pub(super) fn get(&self, number: u64) -> Option<Stretch> {
        self.iter().find(|&(n, _)| n == number).map(|(_, time)| time)
    }

    /// The step in which a moment lies; what lies after a step and before the next one belongs to the
    /// earlier, since work goes on in the background.
    pub(super) fn at(&self, at_ns: i64) -> Option<u64> {
        let after = self.0.partition_point(|&(_, time)| time.start_ns <= at_ns);
        Some(self.0.get(after.checked_sub(1)?)?.0)
    }
}

/// The number of a step, if this is the name of one.
pub(super) fn number(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.trim().parse().ok()
}
