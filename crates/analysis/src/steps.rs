//! The steps of a trace: its annotations `ProfilerStep#N`.
//!
//! A timeline goes in. Its steps come out. Which of them are analysed is decided in `hta`.

use crate::timeline::{LaneId, TimeRange, Timeline};

/// One `ProfilerStep#N` of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its number N.
    pub number: u64,
    /// When it lasted.
    pub time: TimeRange,
}

/// The number N of `ProfilerStep#N`, if this is the name of a step.
pub(crate) fn number(name: &str) -> Option<u64> {
    name.strip_prefix("ProfilerStep")?.trim_start().strip_prefix('#')?.trim().parse().ok()
}

/// The number of each name of a trace that is one of a step, by [`NameId`](crate::timeline::NameId).
pub(crate) fn numbers(timeline: &Timeline) -> Vec<Option<u64>> {
    timeline.names.iter().map(number).collect()
}

/// The steps that a trace names, by their begin. PyTorch 1.x wrote them as operators.
pub(crate) fn of(timeline: &Timeline) -> Vec<Step> {
    let numbers = numbers(timeline);
    let step = |(name, time): (crate::timeline::NameId, TimeRange)| {
        Some(Step { number: numbers[name.0 as usize]?, time })
    };
    let annotations = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
    let mut steps: Vec<Step> = annotations.filter_map(|a| step((a.name, a.time))).collect();
    if steps.is_empty() {
        steps = timeline.operators.iter().filter_map(|o| step((o.name, o.time))).collect();
    }
    steps.sort_by_key(|step| step.time.start_ns);
    steps
}

/// The thread that takes the steps.
pub(crate) fn lane(timeline: &Timeline) -> Option<LaneId> {
    let numbers = numbers(timeline);
    let mut host = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
    host.find(|a| numbers[a.name.0 as usize].is_some()).map(|annotation| annotation.lane)
}

/// The step, of those sorted by begin, in which a moment lies; what lies after a step and before the next
/// one belongs to the earlier, since work goes on in the background.
pub(crate) fn at(steps: &[Step], at_ns: i64) -> Option<Step> {
    let after = steps.partition_point(|step| step.time.start_ns <= at_ns);
    steps.get(after.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_known_by_their_names() {
        let names = ["ProfilerStep#3", "ProfilerStep #4 ", "ProfilerStep", "ProfilerStep#x", "3"];
        assert_eq!(names.map(number), [Some(3), Some(4), None, None, None]);
    }
}
