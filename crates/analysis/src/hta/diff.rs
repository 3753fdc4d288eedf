//! The differences between two traces.

use std::collections::BTreeMap;

use super::error::{AnalysisError, by_rank};
use super::options::rounded;
use super::options::{Options, StepChoice};
use super::steps::{Steps, choose};
use super::work::launched;
use crate::steps::Step;
use crate::timeline::{DeviceWork, NameId, TimeRange, Timeline};

/// Where an event ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Operators, calls and annotations.
    Host,
    /// Kernels.
    Device,
}

/// How a name differs between the traces, by HTA's rules, which compare counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    /// Only in the second trace.
    Added,
    /// Only in the first trace.
    Deleted,
    /// In both traces, more often in the second.
    Increased,
    /// In both traces, more often in the first.
    Decreased,
    /// Equally often in both traces.
    Unchanged,
}

impl Change {
    /// HTA's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Deleted => "deleted",
            Self::Increased => "increased",
            Self::Decreased => "decreased",
            Self::Unchanged => "unchanged",
        }
    }
}

/// One name, compared between the traces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffRow {
    /// The name.
    pub name: String,
    /// Where it ran.
    pub side: Side,
    /// How the number of its calls changed.
    pub change: Change,
    /// How often it occurs in the first trace.
    pub control_calls: u64,
    /// How often it occurs in the second trace.
    pub test_calls: u64,
    /// Sum of its durations in the first trace, in nanoseconds.
    pub control_ns: i64,
    /// Sum of its durations in the second trace, in nanoseconds.
    pub test_ns: i64,
}

impl DiffRow {
    /// Number of calls, second minus first.
    pub fn calls(&self) -> i64 {
        self.test_calls as i64 - self.control_calls as i64
    }

    /// Duration, second minus first, in nanoseconds.
    pub fn time_ns(&self) -> i64 {
        self.test_ns - self.control_ns
    }
}

/// Two traces side by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// Every name in either trace, largest change of time first.
    pub rows: Vec<DiffRow>,
    /// Notes for the reader of the figures, in whole sentences.
    pub notes: Vec<String>,
}

/// Compares two runs, as HTA compares traces: what was called, how often, and for how long, in the chosen
/// steps of each run's lowest rank. Of the options, only `rounding` is used. Work of the host belongs to the
/// step in which it began, work of the device to the step in which it was launched. A run without steps is
/// compared as a whole.
pub fn diff(
    control: &[Timeline],
    test: &[Timeline],
    steps: &StepChoice,
    options: &Options,
) -> Result<Diff, AnalysisError> {
    let mut notes = Vec::new();
    let mut sides = [control, test].into_iter().map(|run| {
        let lowest = by_rank(run)?.into_iter().next();
        let (rank, timeline) = lowest.ok_or(AnalysisError::Empty)?;
        let (sums, chosen) = sums_of(timeline, steps, options)?;
        notes.push(match chosen {
            0 => format!("{}: rank {rank}, all of it, as it names no steps.", timeline.source),
            1 => format!("{}: rank {rank}, 1 step.", timeline.source),
            count => format!("{}: rank {rank}, {count} steps.", timeline.source),
        });
        Ok(sums)
    });
    let (Some(control), Some(test)) = (sides.next(), sides.next()) else {
        return Err(AnalysisError::Empty);
    };
    let (control, test) = (control?, test?);
    let mut names: Vec<&(Side, String)> = control.keys().chain(test.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut rows: Vec<DiffRow> = names
        .into_iter()
        .map(|key| {
            let of = |sums: &Sums| sums.get(key).copied().unwrap_or_default();
            let ((control_calls, control_ns), (test_calls, test_ns)) = (of(&control), of(&test));
            let change = match (control_calls, test_calls) {
                (0, _) => Change::Added,
                (_, 0) => Change::Deleted,
                (before, after) if after > before => Change::Increased,
                (before, after) if after < before => Change::Decreased,
                _ => Change::Unchanged,
            };
            let (side, name) = key.clone();
            DiffRow { name, side, change, control_calls, test_calls, control_ns, test_ns }
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.time_ns().abs()));
    drop(sides);
    Ok(Diff { rows, notes })
}

/// Number of calls and total duration in nanoseconds, by side and name.
type Sums = BTreeMap<(Side, String), (u64, i64)>;

/// The sums over the chosen steps of a trace, and the number of these steps.
fn sums_of(
    timeline: &Timeline,
    choice: &StepChoice,
    options: &Options,
) -> Result<(Sums, usize), AnalysisError> {
    let all = Options { include_last_step: true, ..options.clone() };
    let (steps, _) = choose(timeline, &all);
    let has_steps = steps.found > 0;
    let steps = chosen(steps.chosen, choice, &timeline.source)?;
    let counts = |begun_ns: i64| !has_steps || steps.at(begun_ns).is_some();
    let time_of = |time: TimeRange| rounded(time, options.rounding);

    let mut host = vec![(0u64, 0i64); timeline.names.count()];
    let mut device = host.clone();
    let add = |sums: &mut Vec<(u64, i64)>, name: NameId, time: TimeRange| {
        let sum = &mut sums[name.0 as usize];
        *sum = (sum.0 + 1, sum.1 + time.dur_ns);
    };
    let operators = timeline.operators.iter().map(|operator| (operator.name, operator.time));
    let launches = timeline.launches.iter().map(|launch| (launch.name, launch.time));
    let annotations = timeline.annotations.iter().map(|span| (span.name, span.time));
    for (name, time) in operators.chain(launches).chain(annotations) {
        let time = time_of(time);
        if counts(time.start_ns) {
            add(&mut host, name, time);
        }
    }
    let launched = launched(timeline);
    for kernel in &timeline.kernels {
        let time = time_of(kernel.time);
        let launch = kernel.correlation.and_then(|number| launched.get(&number));
        let launch = launch.map(|&launch| time_of(timeline.launches[launch as usize].time));
        // A wait for the whole device belongs to no stream, so it counts for the host.
        let is_host = kernel.work == DeviceWork::Sync && kernel.stream < 0;
        let begun = match launch {
            _ if is_host => Some(time.start_ns),
            Some(launch) => Some(launch.start_ns),
            None => (!has_steps).then_some(time.start_ns),
        };
        if begun.is_some_and(counts) {
            add(if is_host { &mut host } else { &mut device }, kernel.name, time);
        }
    }
    let mut sums = Sums::new();
    for (side, of_side) in [(Side::Host, host), (Side::Device, device)] {
        for (name, sum) in timeline.names.iter().zip(of_side) {
            if sum.0 > 0 {
                sums.insert((side, name.to_owned()), sum);
            }
        }
    }
    Ok((sums, steps.chosen.len()))
}

/// The steps that the choice asks for.
fn chosen(all: Vec<Step>, choice: &StepChoice, file: &str) -> Result<Steps, AnalysisError> {
    let found = all.len();
    let chosen = match choice {
        StepChoice::All => all,
        // HTA takes the step with the lowest number.
        StepChoice::First => all.into_iter().min_by_key(|step| step.number).into_iter().collect(),
        StepChoice::These(numbers) => {
            let has = |number: u64| all.iter().any(|step| step.number == number);
            if let Some(&number) = numbers.iter().find(|&&number| !has(number)) {
                let found: Vec<String> = all.iter().map(|step| step.number.to_string()).collect();
                let found = if found.is_empty() { "none".into() } else { found.join(", ") };
                return Err(AnalysisError::NoStep { file: file.to_owned(), number, found });
            }
            all.into_iter().filter(|step| numbers.contains(&step.number)).collect()
        }
    };
    Ok(Steps { chosen, found })
}
