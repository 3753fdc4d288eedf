//! The work of a rank in the analyzed steps, in one form for kernels and operators.

use foldhash::HashMap;

use super::collectives::{CollectiveKind, backend_of, kind_of};
use super::kernels::KernelKind;
use super::nesting::{Nested, innermost};
use super::options::{Options, Rules, rounded};
use super::steps;
use super::steps::{Steps, Window};
use crate::timeline::{DeviceWork, NameId, TimeRange, Timeline, TrackId};
use paceline_trace::IntervalSet;

/// The kind of events that count as the work of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The kernels of its device.
    Kernels,
    /// The operators of its threads, because the trace has no kernels. PyTorch's profiler writes such traces
    /// on a CPU. Collectives count as communication, all other operators as computation.
    Operators,
}

/// One run of a kernel or operator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub name: NameId,
    pub kind: KernelKind,
    pub start_ns: i64,
    /// Can be one microsecond before `start_ns` after [`Rules::HtaRounded`].
    pub end_ns: i64,
    /// Its duration. For an operator, without the operators that it called.
    pub dur_ns: i64,
    pub stream: i64,
    /// The call that launched it: an index into the timeline's launches.
    pub launch: Option<u32>,
    /// Index into the timeline's collectives.
    pub collective: Option<u32>,
    /// Index into the timeline's kernels.
    pub kernel: u32,
}

impl Item {
    /// Whether it is a kernel event that stands for a wait (`cuda_sync`).
    pub(super) fn is_wait(&self, timeline: &Timeline) -> bool {
        timeline.kernels.get(self.kernel as usize).is_some_and(|of| of.work == DeviceWork::Sync)
    }

    /// Whether it counts as work: waits do so only to HTA.
    pub(super) fn counts(&self, timeline: &Timeline, options: &Options) -> bool {
        options.rules != Rules::Steps || !self.is_wait(timeline)
    }
}

/// The work of a rank.
#[derive(Debug)]
pub(super) struct Work<'a> {
    pub timeline: &'a Timeline,
    pub options: &'a Options,
    pub source: Source,
    pub steps: Steps,
    pub window: Window,
    /// Sorted by begin.
    pub items: Vec<Item>,
    /// The intervals of the sets below are relative to this time.
    pub origin_ns: i64,
    /// The times in which something of each [`KernelKind`] ran.
    sets: [IntervalSet; 4],
    /// `extent_ns`: from the first start to the last end. `busy_ns`: the part of it in which anything ran.
    pub extent_ns: i64,
    pub busy_ns: i64,
    /// Whether kernels were chosen by their own start, because no launch was found for any of them.
    pub unlaunched: bool,
    /// How many kernels were left out because no launch was found for them, while launches were found for
    /// others.
    pub stray: u64,
    /// Whether the trace gives durations of calls. Some recorders note only when a call was made.
    pub has_timed_calls: bool,
}

impl<'a> Work<'a> {
    /// The work in a trace; `None` if the trace has no work.
    pub(super) fn of(timeline: &'a Timeline, options: &'a Options) -> Option<Self> {
        let (steps, window) = steps::choose(timeline, options);
        let source = if timeline.has_device_work() { Source::Kernels } else { Source::Operators };
        let mut kernels = ChosenKernels::default();
        let (mut items, pieces) = match source {
            Source::Kernels => {
                kernels = chosen_kernels(timeline, options, window);
                (std::mem::take(&mut kernels.items), None)
            }
            Source::Operators => {
                let (items, pieces) = operator_items(timeline, options, window);
                (items, Some(pieces))
            }
        };
        items.sort_by_key(|item| item.start_ns);
        let origin_ns = items.first()?.start_ns;
        let pieces = pieces.unwrap_or_else(|| {
            let work = items.iter().filter(|item| item.counts(timeline, options));
            work.map(|item| (item.kind, item.start_ns, item.end_ns)).collect()
        });
        use KernelKind::{Communication, Computation, Memory, Other};
        let sets = [Computation, Communication, Memory, Other]
            .map(|kind| set_of(&pieces, origin_ns, kind));
        let mut all: Vec<(i64, i64)> = pieces.iter().map(|&(_, start, end)| (start, end)).collect();
        all.sort_unstable();
        let first = all.first()?.0;
        let last = all.iter().map(|&(_, end)| end).max()?;
        Some(Self {
            timeline,
            options,
            source,
            steps,
            window,
            busy_ns: merged_ns(all),
            extent_ns: last - first,
            items,
            origin_ns,
            sets,
            unlaunched: kernels.unlaunched,
            stray: kernels.stray,
            has_timed_calls: timeline.launches.iter().any(|launch| launch.time.dur_ns > 0),
        })
    }

    /// A time range, rounded as the options ask for.
    pub(super) fn rounded(&self, time: TimeRange) -> TimeRange {
        rounded(time, self.options.rules)
    }

    /// When a call ran, by its index.
    pub(super) fn call(&self, launch: u32) -> TimeRange {
        self.rounded(self.timeline.launches[launch as usize].time)
    }

    /// The items of one kind.
    pub(super) fn of_kind(&self, kind: KernelKind) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(move |item| item.kind == kind)
    }

    /// The time in which at least one item of this kind ran, computed as HTA does: an item whose duration
    /// became negative by rounding is subtracted.
    pub(super) fn merged_ns(&self, kind: KernelKind) -> i64 {
        match (self.options.rules, self.source) {
            (Rules::HtaRounded, Source::Kernels) => merged_ns(self.bounds(kind)),
            _ => self.times(kind).len_ns() as i64,
        }
    }

    /// The times in which something of this kind ran, relative to [`Work::origin_ns`].
    pub(super) fn times(&self, kind: KernelKind) -> &IntervalSet {
        &self.sets[kind as usize]
    }

    fn bounds(&self, kind: KernelKind) -> Vec<(i64, i64)> {
        self.of_kind(kind).map(|item| (item.start_ns, item.end_ns)).collect()
    }

    /// Which collective an item is: from its arguments, or from its name if they do not say.
    pub(super) fn collective_kind(&self, item: &Item) -> CollectiveKind {
        let described = item.collective.map(|at| &self.timeline.collectives[at as usize]);
        let kind = described.and_then(|collective| kind_of(&collective.name));
        kind.or_else(|| kind_of(self.timeline.names.text(item.name)))
            .unwrap_or(CollectiveKind::Unknown)
    }

    /// The index of the chosen step to which an item belongs: the step in which it was launched, or in which
    /// it started if its launch is not known.
    pub(super) fn step_of(&self, item: &Item) -> Option<usize> {
        let begun = match item.launch {
            Some(launch) => self.timeline.launches[launch as usize].time.start_ns,
            None => item.start_ns,
        };
        self.steps.at(begun)
    }
}

/// The length of the union of intervals, which must be sorted by start. As in HTA, an interval that ends
/// before it starts and touches no other counts as negative.
fn merged_ns(sorted: impl IntoIterator<Item = (i64, i64)>) -> i64 {
    let mut length = 0;
    let mut group: Option<(i64, i64)> = None;
    for (start, end) in sorted {
        group = Some(match group {
            Some((first, last)) if start <= last => (first, last.max(end)),
            Some((first, last)) => {
                length += last - first;
                (start, end)
            }
            None => (start, end),
        });
    }
    length + group.map_or(0, |(first, last)| last - first)
}

fn set_of(pieces: &[(KernelKind, i64, i64)], origin_ns: i64, kind: KernelKind) -> IntervalSet {
    let of_kind = pieces.iter().filter(|piece| piece.0 == kind);
    IntervalSet::union(of_kind.map(|of| TimeRange::between(of.1, of.2).since(origin_ns)))
}

/// The kernels to analyze.
#[derive(Debug, Default)]
pub(super) struct ChosenKernels {
    pub items: Vec<Item>,
    /// See [`Work::unlaunched`].
    pub unlaunched: bool,
    /// See [`Work::stray`].
    pub stray: u64,
}

/// The kernels to analyze: in a window only those that were launched in it, otherwise all. If that leaves none, because no kernel
/// has a known launch, those that started in the window. Waits that belong to no stream are left out.
pub(super) fn chosen_kernels(
    timeline: &Timeline,
    options: &Options,
    window: Window,
) -> ChosenKernels {
    let (mut items, mut stray) = (all_kernels(timeline, options), 0);
    if window != Window(None) {
        items.retain(|item| {
            let Some(launch) = item.launch else {
                stray += u64::from(!item.is_wait(timeline) && window.holds(item.start_ns));
                return false;
            };
            let call = timeline.launches[launch as usize].time;
            window.holds(rounded(call, options.rules).start_ns)
        });
    }
    if items.iter().any(|item| item.counts(timeline, options)) {
        return ChosenKernels { items, unlaunched: false, stray };
    }
    let mut items = all_kernels(timeline, options);
    items.retain(|item| window.holds(item.start_ns));
    ChosenKernels { items, unlaunched: true, stray: 0 }
}

fn all_kernels(timeline: &Timeline, options: &Options) -> Vec<Item> {
    let launched = launched(timeline);
    let kind_of = match options.rules {
        Rules::Steps => KernelKind::of_kernel,
        Rules::Hta | Rules::HtaRounded => KernelKind::of_name,
    };
    let kinds: Vec<KernelKind> = timeline.names.iter().map(kind_of).collect();
    let counted = timeline.kernels.iter().enumerate();
    counted
        .filter(|(_, kernel)| kernel.work != DeviceWork::Sync || kernel.stream >= 0)
        .map(|(index, kernel)| {
            let time = rounded(kernel.time, options.rules);
            Item {
                name: kernel.name,
                kind: kinds[kernel.name.0 as usize],
                start_ns: time.start_ns,
                end_ns: time.end_ns(),
                dur_ns: time.dur_ns,
                stream: kernel.stream,
                launch: kernel.correlation.and_then(|number| launched.get(&number).copied()),
                collective: kernel.collective,
                kernel: index as u32,
            }
        })
        .collect()
}

/// The index of the call that launched the kernel with each correlation number: the last one of several, as in HTA.
pub(crate) fn launched(timeline: &Timeline) -> HashMap<u64, u32> {
    let launches = timeline.launches.iter().zip(0u32..);
    launches.filter_map(|(launch, index)| Some((launch.correlation?, index))).collect()
}

/// The kind of work that an operator counts as. `None` for a call that hands a collective to another thread, on which the
/// collective appears as an operator of its own.
type OperatorKind = Option<KernelKind>;

type Pieces = Vec<(KernelKind, i64, i64)>;

/// How each name counts, and how an operator counts that is known as a collective only by its arguments.
/// There are three cases. A library that communicates on its own threads records each operation there
/// (`gloo:all_reduce`); if the trace has such operations, they are the communication, and the calls that
/// submitted them are not. Otherwise the operators of c10d are the communication, and `record_param_comms`,
/// which they call, only records their arguments. Without either, `record_param_comms` is the communication.
fn operator_kinds(timeline: &Timeline) -> (Vec<OperatorKind>, OperatorKind) {
    let mut seen = vec![false; timeline.names.count()];
    timeline.operators.iter().for_each(|operator| seen[operator.name.0 as usize] = true);
    let occurs = |is: fn(&str) -> bool| {
        timeline.names.iter().zip(&seen).any(|(name, &seen)| seen && is(name))
    };
    let has_transfers = occurs(|name| backend_of(name).is_some());
    let has_c10d = occurs(|name| name.starts_with("c10d::"));
    let unless = |is_elsewhere: bool| (!is_elsewhere).then_some(KernelKind::Communication);
    let noted = unless(has_transfers || has_c10d);
    let kind = |name: &str| match name {
        name if backend_of(name).is_some() => Some(KernelKind::Communication),
        name if name.starts_with("c10d::") => unless(has_transfers),
        "record_param_comms" => noted,
        _ => Some(KernelKind::Computation),
    };
    (timeline.names.iter().map(kind).collect(), noted)
}

/// The operators of all threads as items, and the pieces of time in which they ran. At every moment, only the
/// innermost operator of a thread runs.
fn operator_items(timeline: &Timeline, options: &Options, window: Window) -> (Vec<Item>, Pieces) {
    let (kinds, noted) = operator_kinds(timeline);
    let mut items = Vec::new();
    let mut submissions = Vec::new();
    let mut lanes: HashMap<TrackId, Vec<Nested<u32>>> = HashMap::default();
    for operator in &timeline.operators {
        let time = rounded(operator.time, options.rules);
        if !window.holds(time.start_ns) {
            continue;
        }
        let kind = match (kinds[operator.name.0 as usize], operator.collective) {
            (Some(KernelKind::Computation), Some(_)) => noted,
            (kind, _) => kind,
        };
        let index = items.len() as u32;
        let (start_ns, end_ns) = (time.start_ns, time.end_ns());
        items.push(Item {
            name: operator.name,
            kind: kind.unwrap_or(KernelKind::Other),
            start_ns,
            end_ns,
            // Added up from its pieces below.
            dur_ns: 0,
            stream: -1,
            launch: None,
            collective: operator.collective,
            kernel: u32::MAX,
        });
        submissions.push(kind.is_none());
        lanes.entry(operator.lane).or_default().push(Nested { start_ns, end_ns, what: index });
    }
    let mut pieces = Pieces::new();
    for spans in lanes.values_mut() {
        innermost(spans, |piece| {
            let item = &mut items[piece.what as usize];
            item.dur_ns += piece.end_ns - piece.start_ns;
            if !submissions[piece.what as usize] {
                pieces.push((item.kind, piece.start_ns, piece.end_ns));
            }
        });
    }
    // A call that only hands work over is neither computation nor communication.
    let mut submissions = submissions.into_iter();
    items.retain(|_| submissions.next() == Some(false));
    (items, pieces)
}
