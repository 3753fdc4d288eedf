//! What a rank worked on in the steps that are looked at, in one form for kernels and for operators.

use std::collections::HashMap;

use super::collectives::{CollectiveKind, backend_of, kind_of};
use super::kernels::KernelKind;
use super::nesting::{Nested, innermost};
use super::options::{Options, Rounding, rounded};
use super::steps;
use super::steps::{Steps, Window};
use crate::timeline::{Collective, DeviceWork, LaneId, NameId, TimeRange, Timeline};
use paceline_trace::{IntervalSet, Span};

/// What is counted as the work of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The kernels of its device.
    Kernels,
    /// The operators of its threads, because the trace has no kernels: PyTorch's profiler on a CPU.
    /// Operators that are collectives count as communication, all others as computation.
    Operators,
}

/// A call of a kernel or operator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub name: NameId,
    pub kind: KernelKind,
    /// Whether it is a wait and no work, for a kernel.
    pub is_sync: bool,
    pub start_ns: i64,
    /// Before the begin by a microsecond where [`Rounding::Hta`] leaves nothing of it.
    pub end_ns: i64,
    /// What counts as its duration: for an operator without those that it called.
    pub dur_ns: i64,
    pub stream: i64,
    /// The call that launched it.
    pub launch: Option<u32>,
    /// Index into the timeline's collectives.
    pub collective: Option<u32>,
    /// Index into the timeline's kernels.
    pub kernel: u32,
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
    /// Moments of the sets count from here.
    pub origin_ns: i64,
    /// When something computed, and so on.
    pub computation: IntervalSet,
    pub communication: IntervalSet,
    pub memory: IntervalSet,
    /// From the first begin to the last end, and the part of it in which anything ran.
    pub extent_ns: i64,
    pub busy_ns: i64,
    /// Whether kernels were chosen by their own begin, because none could be traced to its launch.
    pub unlaunched: bool,
    /// How many kernels were left out because they could not, though others could.
    pub stray: u64,
    /// Whether calls have a duration: a recorder may note nothing but their moments.
    pub has_timed_calls: bool,
}

impl<'a> Work<'a> {
    /// The work in a trace; `None` if there is none.
    pub(super) fn of(timeline: &'a Timeline, options: &'a Options) -> Option<Self> {
        let (steps, window) = steps::choose(timeline, options);
        let has_kernels = timeline.kernels.iter().any(|kernel| kernel.work != DeviceWork::Sync);
        let source = if has_kernels { Source::Kernels } else { Source::Operators };
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
            items.iter().map(|item| (item.kind, item.start_ns, item.end_ns)).collect()
        });
        let set = |kind: KernelKind| set_of(&pieces, origin_ns, kind);
        let (computation, communication, memory) =
            (set(KernelKind::Computation), set(KernelKind::Communication), set(KernelKind::Memory));
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
            computation,
            communication,
            memory,
            unlaunched: kernels.unlaunched,
            stray: kernels.stray,
            has_timed_calls: timeline.launches.iter().any(|launch| launch.time.dur_ns > 0),
        })
    }

    /// Calls that computed, and so on.
    pub(super) fn of_kind(&self, kind: KernelKind) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(move |item| item.kind == kind)
    }

    /// The time in which at least one call of this kind ran, as HTA counts it: a call that
    /// rounding has turned negative takes its microsecond off.
    pub(super) fn merged_ns(&self, kind: KernelKind) -> i64 {
        let set = match kind {
            KernelKind::Computation => &self.computation,
            KernelKind::Communication => &self.communication,
            KernelKind::Memory => &self.memory,
            KernelKind::Other => return merged_ns(self.bounds(kind)),
        };
        match (self.options.rounding, self.source) {
            (Rounding::Hta, Source::Kernels) => merged_ns(self.bounds(kind)),
            _ => set.len_ns() as i64,
        }
    }

    fn bounds(&self, kind: KernelKind) -> Vec<(i64, i64)> {
        self.of_kind(kind).map(|item| (item.start_ns, item.end_ns)).collect()
    }

    /// The collective that an item says it is.
    pub(super) fn collective(&self, item: &Item) -> Option<&'a Collective> {
        self.timeline.collectives.get(item.collective? as usize)
    }

    /// Which collective an item is, from its arguments, else from its name.
    pub(super) fn collective_kind(&self, item: &Item) -> CollectiveKind {
        let told = self.collective(item).and_then(|collective| kind_of(&collective.name));
        told.or_else(|| kind_of(self.timeline.names.text(item.name)))
            .unwrap_or(CollectiveKind::Unknown)
    }

    /// Which of the chosen steps an item belongs to: the one in which it was launched.
    pub(super) fn step_of(&self, item: &Item) -> Option<usize> {
        let begun = match item.launch {
            Some(launch) => self.timeline.launches[launch as usize].time.start_ns,
            None => item.start_ns,
        };
        self.steps.at(begun)
    }
}

/// The length of a union, given sorted by begin. What ends before it begins and touches nothing counts
/// negative, as HTA counts it.
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
    let at = |moment_ns: i64| moment_ns.saturating_sub(origin_ns).max(0) as u64;
    let of_kind = pieces.iter().filter(|piece| piece.0 == kind);
    IntervalSet::union(of_kind.map(|piece| Span { start_ns: at(piece.1), end_ns: at(piece.2) }))
}

/// The kernels that are looked at.
#[derive(Debug, Default)]
pub(super) struct ChosenKernels {
    pub items: Vec<Item>,
    /// See [`Work::unlaunched`].
    pub unlaunched: bool,
    /// See [`Work::stray`].
    pub stray: u64,
}

/// The kernels that HTA looks at; where none can be traced to its launch, those that began in the window.
pub(super) fn chosen_kernels(
    timeline: &Timeline,
    options: &Options,
    window: Window,
) -> ChosenKernels {
    let (items, stray) = kernel_items(timeline, options, window);
    if !items.is_empty() {
        return ChosenKernels { items, unlaunched: false, stray };
    }
    let mut items = all_kernels(timeline, options);
    items.retain(|item| window.holds(item.start_ns));
    ChosenKernels { items, unlaunched: true, stray: 0 }
}

/// The kernels that HTA looks at: where steps are left out, those whose launch belongs to the others;
/// else all of them. Waits that belong to no stream never count. Also, how many kernels ran in the steps that
/// are looked at, but lack a launch.
fn kernel_items(timeline: &Timeline, options: &Options, window: Window) -> (Vec<Item>, u64) {
    let mut items = all_kernels(timeline, options);
    let mut stray = 0;
    if window != Window::All {
        items.retain(|item| {
            let Some(launch) = item.launch else {
                stray += u64::from(!item.is_sync && window.holds(item.start_ns));
                return false;
            };
            let call = timeline.launches[launch as usize].time;
            window.holds(rounded(call, options.rounding).start_ns)
        });
    }
    (items, stray)
}

fn all_kernels(timeline: &Timeline, options: &Options) -> Vec<Item> {
    let launched = launched(timeline);
    let kinds: Vec<KernelKind> = timeline.names.iter().map(KernelKind::of_name).collect();
    let counted = timeline.kernels.iter().enumerate();
    counted
        .filter(|(_, kernel)| kernel.work != DeviceWork::Sync || kernel.stream >= 0)
        .map(|(index, kernel)| {
            let time = rounded(kernel.time, options.rounding);
            Item {
                name: kernel.name,
                kind: kinds[kernel.name.0 as usize],
                is_sync: kernel.work == DeviceWork::Sync,
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

/// Which call a correlation stands for.
pub(super) fn launched(timeline: &Timeline) -> HashMap<u64, u32> {
    let launches = timeline.launches.iter().zip(0u32..);
    launches.filter_map(|(launch, index)| Some((launch.correlation?, index))).collect()
}

/// What an operator counts as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OperatorKind {
    Computation,
    Communication,
    /// A call that hands a collective to another thread, where it shows as an operator of its own.
    Submission,
}

type Pieces = Vec<(KernelKind, i64, i64)>;

/// What each name counts as. A library that communicates on threads of its own shows there what it does
/// (`gloo:all_reduce`); where one does, that is the communication, and what the program's
/// threads call is only how it came about. Else it is what they call, and what an operator of c10d calls in
/// turn only notes its arguments down.
fn operator_kinds(timeline: &Timeline) -> (Vec<OperatorKind>, OperatorKind) {
    let mut seen = vec![false; timeline.names.count()];
    timeline.operators.iter().for_each(|operator| seen[operator.name.0 as usize] = true);
    let occurs = |is: fn(&str) -> bool| {
        timeline.names.iter().zip(&seen).any(|(name, &seen)| seen && is(name))
    };
    let has_transfers = occurs(|name| backend_of(name).is_some());
    let has_c10d = occurs(|name| name.starts_with("c10d::"));
    let if_told = |told: bool| match told {
        true => OperatorKind::Submission,
        false => OperatorKind::Communication,
    };
    let noted = if_told(has_transfers || has_c10d);
    let kind = |name: &str| match name {
        name if backend_of(name).is_some() => OperatorKind::Communication,
        name if name.starts_with("c10d::") => if_told(has_transfers),
        "record_param_comms" => noted,
        _ => OperatorKind::Computation,
    };
    (timeline.names.iter().map(kind).collect(), noted)
}

/// Operators and collectives of threads, and when each kind of them ran: at every moment of a thread its
/// innermost operator.
fn operator_items(timeline: &Timeline, options: &Options, window: Window) -> (Vec<Item>, Pieces) {
    let (kinds, noted) = operator_kinds(timeline);
    let mut items = Vec::new();
    let mut submissions = Vec::new();
    let mut lanes: HashMap<LaneId, Vec<Nested<u32>>> = HashMap::new();
    for operator in &timeline.operators {
        let time = rounded(operator.time, options.rounding);
        if !window.holds(time.start_ns) {
            continue;
        }
        let kind = match (kinds[operator.name.0 as usize], operator.collective) {
            (OperatorKind::Computation, Some(_)) => noted,
            (kind, _) => kind,
        };
        let counts = match kind {
            OperatorKind::Computation => KernelKind::Computation,
            OperatorKind::Communication => KernelKind::Communication,
            OperatorKind::Submission => KernelKind::Other,
        };
        let index = items.len() as u32;
        items.push(host_item(operator.name, counts, time, operator.collective));
        submissions.push(kind == OperatorKind::Submission);
        let (start_ns, end_ns) = (time.start_ns, time.end_ns());
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

/// An item without a device. Its duration is added up from its pieces.
fn host_item(name: NameId, kind: KernelKind, time: TimeRange, collective: Option<u32>) -> Item {
    Item {
        name,
        kind,
        is_sync: false,
        start_ns: time.start_ns,
        end_ns: time.end_ns(),
        dur_ns: 0,
        stream: -1,
        launch: None,
        collective,
        kernel: u32::MAX,
    }
}
