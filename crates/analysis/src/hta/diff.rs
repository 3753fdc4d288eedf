//! The differences between two traces.

use std::collections::BTreeMap;

use super::checks::by_rank;
use super::options::rounded;
use super::options::{Options, Rules, StepChoice};
use super::steps::{Steps, choose};
use super::work::launched;
use crate::TraceError;
use crate::steps::Step;
use crate::timeline::{DeviceWork, Kernel, NameId, TimeRange, Timeline};

/// Where an event ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Operators, calls and annotations.
    Host,
    /// Kernels.
    Device,
}

/// Whether a name takes longer in the second trace, by the mean time per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Shift {
    /// It takes longer in the second trace.
    Slower,
    /// It takes longer in the first trace.
    Faster,
    /// It takes equally long in both.
    Equal,
    /// The difference is not larger than that between steps of one run.
    Noise,
    /// A trace has fewer than two steps, so it is not known by how much steps differ.
    Unknown,
}

impl Shift {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Slower => "slower",
            Self::Faster => "faster",
            Self::Equal => "equal",
            Self::Noise => "noise",
            Self::Unknown => "one step",
        }
    }
}

/// A difference of means counts if it is larger than this many times its standard error. Where nothing has changed, and
/// a run has a handful of steps, about one name in fifty exceeds it by chance.
const ERRORS: f64 = 3.0;

/// One name, compared between the traces.
#[derive(Clone, Debug, PartialEq)]
pub struct DiffRow {
    /// The name.
    pub name: String,
    /// Where it ran.
    pub side: Side,
    /// How the number of its calls changed, in HTA's word: `added`, `deleted`, `increased`, `decreased` or `unchanged`.
    pub change: &'static str,
    /// How often it occurs in the first trace.
    pub control_calls: u64,
    /// How often it occurs in the second trace.
    pub test_calls: u64,
    /// Sum of its durations in the first trace, in nanoseconds.
    pub control_ns: i64,
    /// Sum of its durations in the second trace, in nanoseconds.
    pub test_ns: i64,
    /// The standard error of the difference of the mean times per step, in nanoseconds, from the deviation of the
    /// steps of each trace. `None` if a trace has fewer than two steps.
    pub error_ns: Option<f64>,
    /// Whether it takes longer in the second trace.
    pub verdict: Shift,
}

/// Two traces side by side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diff {
    /// Every name in either trace, largest change of the time per step first.
    pub rows: Vec<DiffRow>,
    /// How many steps of the first trace are compared; 1 for a trace that is compared as a whole.
    pub control_steps: usize,
    /// How many steps of the second trace are compared.
    pub test_steps: usize,
    /// Notes for the reader of the figures, in whole sentences.
    pub notes: Vec<String>,
}

impl Diff {
    /// A number of the first trace per step.
    pub fn of_control(&self, sum: f64) -> f64 {
        sum / self.control_steps.max(1) as f64
    }

    /// A number of the second trace per step.
    pub fn of_test(&self, sum: f64) -> f64 {
        sum / self.test_steps.max(1) as f64
    }

    /// Duration per step, second minus first, in nanoseconds.
    pub fn time_ns(&self, row: &DiffRow) -> f64 {
        self.of_test(row.test_ns as f64) - self.of_control(row.control_ns as f64)
    }
}

/// Compares two runs, as HTA compares traces: what was called, how often, and for how long, in the chosen
/// steps of each run's lowest rank. If all of several steps are chosen, the last one is left out unless the options
/// include it. Work of the host belongs to the step in which it began, work of the device to the step in which it was
/// launched. The spans of the steps themselves have one name. A run without steps is compared as a whole.
///
/// Runs may have different numbers of steps: counts and times are compared per step.
pub fn diff(
    control: &[Timeline],
    test: &[Timeline],
    steps: &StepChoice,
    options: &Options,
) -> Result<Diff, TraceError> {
    let mut notes = Vec::new();
    let mut side = |run: &[Timeline]| {
        let (rank, timeline) = by_rank(run)?[0];
        let (sums, chosen) = sums_of(timeline, steps, options)?;
        notes.push(match chosen {
            0 => format!("{}: rank {rank}, all of it, as it names no steps.", timeline.source),
            1 => format!("{}: rank {rank}, 1 step.", timeline.source),
            count => format!("{}: rank {rank}, {count} steps.", timeline.source),
        });
        Ok::<_, TraceError>((sums, chosen))
    };
    let ((control, control_steps), (test, test_steps)) = (side(control)?, side(test)?);
    let mut diff = Diff {
        rows: Vec::new(),
        control_steps: control_steps.max(1),
        test_steps: test_steps.max(1),
        notes,
    };
    let mut names: Vec<&(Side, String)> = control.keys().chain(test.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let none = Sum::default();
    let rows = names.into_iter().map(|key| {
        let (first, second) = (control.get(key).unwrap_or(&none), test.get(key).unwrap_or(&none));
        let (side, name) = key.clone();
        let errors = first.error_ns(control_steps).zip(second.error_ns(test_steps));
        let mut row = DiffRow {
            name,
            side,
            change: change(
                first.calls * diff.test_steps as u64,
                second.calls * diff.control_steps as u64,
            ),
            control_calls: first.calls,
            test_calls: second.calls,
            control_ns: first.time_ns,
            test_ns: second.time_ns,
            error_ns: errors.map(|(a, b)| a.hypot(b)),
            verdict: Shift::Unknown,
        };
        row.verdict = verdict(diff.time_ns(&row), row.error_ns);
        row
    });
    let mut rows: Vec<DiffRow> = rows.collect();
    rows.sort_by(|a, b| diff.time_ns(b).abs().total_cmp(&diff.time_ns(a).abs()));
    diff.rows = rows;
    Ok(diff)
}

/// How a name differs by its counts, which must be for equally many steps.
fn change(before: u64, after: u64) -> &'static str {
    match (before, after) {
        (0, _) => "added",
        (_, 0) => "deleted",
        (before, after) if after > before => "increased",
        (before, after) if after < before => "decreased",
        _ => "unchanged",
    }
}

fn verdict(difference_ns: f64, error_ns: Option<f64>) -> Shift {
    match error_ns {
        _ if difference_ns == 0.0 => Shift::Equal,
        None => Shift::Unknown,
        Some(error_ns) if difference_ns.abs() <= ERRORS * error_ns => Shift::Noise,
        Some(_) if difference_ns > 0.0 => Shift::Slower,
        Some(_) => Shift::Faster,
    }
}

/// All calls of one name.
#[derive(Clone, Debug, Default)]
struct Sum {
    calls: u64,
    time_ns: i64,
    /// The time in each step that has some.
    steps: BTreeMap<usize, i64>,
}

impl Sum {
    fn add(&mut self, step: Option<usize>, dur_ns: i64) {
        (self.calls, self.time_ns) = (self.calls + 1, self.time_ns + dur_ns);
        if let Some(step) = step {
            *self.steps.entry(step).or_default() += dur_ns;
        }
    }

    fn merge(&mut self, other: Self) {
        (self.calls, self.time_ns) = (self.calls + other.calls, self.time_ns + other.time_ns);
        for (step, ns) in other.steps {
            *self.steps.entry(step).or_default() += ns;
        }
    }

    /// The standard error of the mean over this many steps; `None` for fewer than two.
    fn error_ns(&self, num_steps: usize) -> Option<f64> {
        if num_steps < 2 {
            return None;
        }
        let count = num_steps as f64;
        let mean = self.steps.values().map(|ns| *ns as f64).sum::<f64>() / count;
        let present: f64 = self.steps.values().map(|ns| (*ns as f64 - mean).powi(2)).sum();
        // Not one number for each step: many names are in few of them.
        let absent = (num_steps - self.steps.len()) as f64 * mean.powi(2);
        Some(((present + absent) / (count - 1.0) / count).sqrt())
    }
}

/// Sums by side and name.
type Sums = BTreeMap<(Side, String), Sum>;

/// The sums over the chosen steps of a trace, and the number of these steps.
fn sums_of(
    timeline: &Timeline,
    choice: &StepChoice,
    options: &Options,
) -> Result<(Sums, usize), TraceError> {
    let is_all = *choice == StepChoice::All;
    let include_last_step = options.include_last_step || !is_all;
    let (steps, _) = choose(timeline, &Options { include_last_step, ..options.clone() });
    let has_steps = steps.found > 0;
    let steps = chosen(steps.chosen, choice, &timeline.source)?;
    let time_of = |time: TimeRange| rounded(time, options.rules);

    let mut host = vec![Sum::default(); timeline.names.count()];
    let mut device = host.clone();
    let mut add = |side: Side, name: NameId, begun_ns: i64, time: TimeRange| {
        let step = steps.at(begun_ns);
        if step.is_some() || !has_steps {
            let of_side = if side == Side::Host { &mut host } else { &mut device };
            of_side[name.0 as usize].add(step, time.dur_ns);
        }
    };
    let operators = timeline.operators.iter().map(|operator| (operator.name, operator.time));
    let launches = timeline.launches.iter().map(|launch| (launch.name, launch.time));
    // To HTA, the device's view of a span is work of the host, and a wait of a stream is work of the device.
    let as_hta = options.rules != Rules::Steps;
    let annotations = timeline.annotations.iter().filter(|span| as_hta || !span.is_device);
    let annotations = annotations.map(|span| (span.name, span.time));
    for (name, time) in operators.chain(launches).chain(annotations) {
        let time = time_of(time);
        add(Side::Host, name, time.start_ns, time);
    }
    let launched = launched(timeline);
    let counts = |kernel: &&Kernel| as_hta || kernel.work != DeviceWork::Sync || kernel.stream < 0;
    for kernel in timeline.kernels.iter().filter(counts) {
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
        if let Some(begun_ns) = begun {
            add(if is_host { Side::Host } else { Side::Device }, kernel.name, begun_ns, time);
        }
    }
    let mut sums = Sums::new();
    for (side, of_side) in [(Side::Host, host), (Side::Device, device)] {
        for (name, sum) in timeline.names.iter().zip(of_side).filter(|(_, sum)| sum.calls > 0) {
            let is_step = crate::steps::number(name).is_some();
            let name = if is_step { "ProfilerStep" } else { name };
            sums.entry((side, name.to_owned())).or_default().merge(sum);
        }
    }
    Ok((sums, steps.chosen.len()))
}

/// The steps that the choice asks for.
fn chosen(all: Vec<Step>, choice: &StepChoice, file: &str) -> Result<Steps, TraceError> {
    let found = all.len();
    let chosen = match *choice {
        StepChoice::All => all,
        // HTA takes the step with the lowest number.
        StepChoice::First => all.into_iter().min_by_key(|step| step.number).into_iter().collect(),
        StepChoice::One(number) => {
            let numbers: Vec<String> = all.iter().map(|step| step.number.to_string()).collect();
            let found = if numbers.is_empty() { "none".into() } else { numbers.join(", ") };
            let step = all.into_iter().find(|step| step.number == number);
            let missing = || TraceError::Unfit(format!("{file}: no step {number}; it has {found}"));
            vec![step.ok_or_else(missing)?]
        }
    };
    Ok(Steps { chosen, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same error as with a zero for each step without the name, of which no list could be made.
    #[test]
    fn the_error_of_a_name_in_few_steps_needs_only_these() {
        let sum = Sum { steps: BTreeMap::from([(0, 4), (2, 8)]), ..Sum::default() };
        let listed = crate::stats::Summary::of(vec![4.0, 0.0, 8.0, 0.0, 0.0]).unwrap().error();
        assert!((sum.error_ns(5).unwrap() - listed).abs() < 1e-12);
        let of_many = sum.error_ns(1 << 60).unwrap();
        assert!(of_many > 0.0 && of_many < 1e-9, "{of_many}");
        assert_eq!(sum.error_ns(1), None);
    }
}
