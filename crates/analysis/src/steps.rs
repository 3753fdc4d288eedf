//! The steps of a trace: its annotations `ProfilerStep#N`.
//!
//! A timeline goes in. Its steps come out. The module `hta` decides which of them are analyzed.

use foldhash::HashMap;

use crate::timeline::{TimeRange, Timeline, TrackId};

/// One `ProfilerStep#N` of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number N.
    pub number: u64,
    /// Its start and duration.
    pub time: TimeRange,
}

/// The number N if `name` has the form `ProfilerStep#N`, otherwise `None`.
pub(crate) fn number(name: &str) -> Option<u64> {
    name.strip_prefix("ProfilerStep")?.trim_start().strip_prefix('#')?.trim().parse().ok()
}

/// For each name of a trace, by [`NameId`](crate::timeline::NameId): its step number if it names a step.
pub(crate) fn numbers(timeline: &Timeline) -> Vec<Option<u64>> {
    timeline.names.iter().map(number).collect()
}

/// The steps that a trace names, sorted by start. PyTorch 1.x wrote steps as operators, so operators count
/// where no annotation names a step.
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

/// The steps that are analyzed, and when the last of them ends: as any step, where the next one begins, if there is one. The last
/// of several steps is left out, because it may have been cut off, unless it is to be included.
pub(crate) fn analyzed(timeline: &Timeline, include_last: bool) -> (Vec<Step>, i64) {
    let mut steps = of(timeline);
    let end_ns = if steps.len() > 1 && !include_last {
        steps.pop().map(|step| step.time.start_ns)
    } else {
        steps.last().map(|step| step.time.end_ns())
    };
    (steps, end_ns.unwrap_or(i64::MAX))
}

/// Two processes that run the same step, if a file has the traces of several ranks.
pub(crate) fn merged(timeline: &Timeline) -> Option<[&str; 2]> {
    let numbers = numbers(timeline);
    let mut first: HashMap<u64, &str> = HashMap::default();
    let host = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
    let mut steps = host.filter_map(|of| Some((numbers[of.name.0 as usize]?, of.lane)));
    steps.find_map(|(number, lane)| {
        let pid = timeline.lanes[lane.0 as usize].pid.as_str();
        let other = *first.entry(number).or_insert(pid);
        (other != pid).then_some([other, pid])
    })
}

/// The row of the thread that runs the steps.
pub(crate) fn lane(timeline: &Timeline) -> Option<TrackId> {
    let numbers = numbers(timeline);
    let mut host = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
    host.find(|a| numbers[a.name.0 as usize].is_some()).map(|annotation| annotation.lane)
}

/// The step in which a moment lies; `None` before the first step. `steps` must be sorted by start. A moment
/// between two steps belongs to the earlier step, since its work goes on in the background.
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
