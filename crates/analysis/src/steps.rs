//! The steps of a trace: its annotations `ProfilerStep#N`, or what was found in their place.
//!
//! A timeline goes in. Its steps come out. The module `hta` decides which of them are analyzed. A trace whose program does not mark
//! steps is searched once, when its file is read: see [`Timeline::find_steps`].

mod find;
mod repeats;

use crate::timeline::{TimeRange, Timeline, TrackId};

/// The steps of a trace in which `ProfilerStep#N` does not mark them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The steps, sorted by start.
    pub steps: Vec<Step>,
    /// The row of the thread that runs them.
    pub lane: TrackId,
    /// Whether the recording may have cut off the last step.
    pub is_last_cut: bool,
    /// How they were found, and how sure that is, in sentences.
    pub words: String,
}

impl Timeline {
    /// Looks for steps: in the spans of a name, if the user gives one, otherwise only if the program does not mark them. Returns
    /// whether the trace has steps. Traces of paceline mark theirs.
    pub fn find_steps(&mut self, name: Option<&str>) -> bool {
        self.found = match name {
            Some(name) => find::named(self, name),
            None if self.run_facts.is_empty() && marked(self).is_empty() => find::unmarked(self),
            None => None,
        };
        self.found.is_some() || name.is_none() && !marked(self).is_empty()
    }
}

/// One step of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number N of `ProfilerStep#N`, or its number among those that were found, from 0.
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

/// The steps of a trace, sorted by start.
pub(crate) fn of(timeline: &Timeline) -> Vec<Step> {
    timeline.found.as_ref().map_or_else(|| marked(timeline), |found| found.steps.clone())
}

/// The steps that a trace marks, sorted by start. PyTorch 1.x wrote steps as operators, so operators count
/// where no annotation names a step.
pub(crate) fn marked(timeline: &Timeline) -> Vec<Step> {
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

/// The steps that are analyzed. Each ends where the next one begins, if there is one. The last of several steps is left out,
/// because it may have been cut off, unless it is to be included.
pub(crate) fn analyzed(timeline: &Timeline, include_last: bool) -> Vec<Step> {
    let mut steps = of(timeline);
    let is_last_cut = timeline.found.as_ref().is_none_or(|found| found.is_last_cut);
    for at in 1..steps.len() {
        let end_ns = steps[at].time.start_ns;
        let time = &mut steps[at - 1].time;
        *time = TimeRange::between(time.start_ns, end_ns);
    }
    if steps.len() > 1 && is_last_cut && !include_last {
        steps.pop();
    }
    steps
}

/// Whether a file has the traces of several ranks: several processes run steps, or a loop of training, or steps overlap. In containers,
/// the processes of all ranks may have one number.
pub(crate) fn are_merged(timeline: &Timeline) -> bool {
    let is_of_loop = |name: &str| number(name).is_some() || find::is_of_loop(name);
    let of_loop: Vec<bool> = timeline.names.iter().map(is_of_loop).collect();
    let host = timeline.annotations.iter().filter(|annotation| !annotation.is_device);
    let spans = host.filter(|of| of_loop[of.name.0 as usize]);
    let mut processes = spans.map(|of| &timeline.lanes[of.lane.0 as usize].pid);
    let first = processes.next();
    let middle_ns = |of: &Step| of.time.start_ns.midpoint(of.time.end_ns());
    processes.any(|of| Some(of) != first)
        || marked(timeline).windows(2).any(|of| of[1].time.start_ns < middle_ns(&of[0]))
}

/// The row of the thread that runs the steps.
pub(crate) fn lane(timeline: &Timeline) -> Option<TrackId> {
    if let Some(found) = &timeline.found {
        return Some(found.lane);
    }
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
