//! The steps of a rank as its trace shows them, in the form in which they are replayed: the calls of the host and the work of
//! the device, each with what it had to wait for.
//!
//! Input: a timeline. Output: a [`Recorded`]. A trace does not say why something began when it began. It is inferred, by the
//! rules below, and the rest of the delay is kept as it was:
//!
//! - A call follows the call, on any thread that launches work, that ended last before it. The time between is the host's.
//! - Work follows the work before it on its stream, and its launch. If it begins later than these explain, and work of another
//!   stream ended shortly before, it follows that too.
//! - A collective follows the computation that was launched before it, as c10d makes it do. The first kernel of an optimizer
//!   step follows all collectives before it.
//! - A call that waits returns after the work that ended last before it returned. So does a slow launch into a long queue.
//!
//! A trace without kernels, as PyTorch writes it on a CPU, has operators instead of calls, and transfers of the backend's
//! threads instead of work.

use foldhash::{HashMap, HashSet};

use super::code::Code;
use super::collectives::elem_bytes;
use super::names::Class;
use crate::hta::{CollectiveKind, Options, backend_of, collective_kind};
use crate::steps;
use crate::timeline::{Collective, NameId, TimeRange, Timeline, TrackId};

/// The kind of a call of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// It launched work.
    Launch,
    /// It waited for work.
    Wait,
    /// It took memory from the driver, or gave it back.
    Allocate,
    /// An operator of a trace without kernels.
    Operator,
    /// The start of a step, or the end of the last one.
    Mark,
}

/// A call of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) name: NameId,
    pub(super) kind: CallKind,
    pub(super) time: TimeRange,
    pub(super) lane: TrackId,
    /// The call that it follows.
    pub(super) before: Option<u32>,
    /// The work that had to end before the call returned.
    pub(super) waits_for: Option<u32>,
    /// The work that had to end before the call began.
    pub(super) after: Option<u32>,
    /// The innermost operator or span around it, in [`Recorded::frames`].
    pub(super) frame: Option<u32>,
}

impl Call {
    /// A call that follows and waits for nothing yet.
    pub(super) fn new(name: NameId, kind: CallKind, time: TimeRange, lane: TrackId) -> Self {
        Self { name, kind, time, lane, before: None, waits_for: None, after: None, frame: None }
    }
}

/// A piece of work of the device, or a transfer by a thread of the backend.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) name: NameId,
    pub(super) class: Class,
    pub(super) time: TimeRange,
    pub(super) stream: i64,
    /// The bytes of a copy; 0 if the trace does not give them.
    pub(super) bytes: u64,
    pub(super) collective: Option<u32>,
    /// The call that launched it, and by how much it began later at least.
    pub(super) call: Option<u32>,
    pub(super) launch_ns: i64,
    /// The work before it on its stream, and the gap between.
    pub(super) before: Option<u32>,
    pub(super) gap_ns: i64,
    /// Work of other streams that had to end before it, and by how much it began later at least.
    pub(super) after: [Option<u32>; 2],
    pub(super) after_ns: [i64; 2],
    /// The index of its step; `None` before the first one.
    pub(super) step: Option<u32>,
    /// Whether it runs beside the steps, on a stream that not every step uses, such as that of the copy of a checkpoint. A step does
    /// not end with it: calls that wait for it show if one needs it.
    pub(super) is_beside: bool,
}

impl Work {
    /// It begins at least `ns` after other work has ended.
    pub(super) fn follow(&mut self, place: usize, other: u32, ns: i64) {
        (self.after[place], self.after_ns[place]) = (Some(other), ns);
    }
}

/// An operator or a span on a thread of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) name: NameId,
    pub(super) time: TimeRange,
    pub(super) parent: Option<u32>,
}

/// Work by the time of its launch, see [`Recorded::by_launch`].
pub(super) struct ByLaunch(Vec<(i64, u32)>);

impl ByLaunch {
    /// The work that was launched from one moment until before another.
    pub(super) fn between(&self, begin_ns: i64, end_ns: i64) -> impl Iterator<Item = usize> {
        let at = |ns: i64| self.0.partition_point(|(launched_ns, _)| *launched_ns < ns);
        let range = at(begin_ns)..at(end_ns).max(at(begin_ns));
        self.0[range].iter().map(|(_, work)| *work as usize)
    }
}

/// Sorts a list, and returns the new place of each of its elements.
pub(super) fn sort_by_key<T: Copy, K: Ord>(all: &mut Vec<T>, key: impl Fn(&T) -> K) -> Vec<u32> {
    let mut sorted: Vec<u32> = (0..all.len() as u32).collect();
    sorted.sort_by_key(|&at| key(&all[at as usize]));
    let mut new = vec![0; sorted.len()];
    for (place, &at) in sorted.iter().enumerate() {
        new[at as usize] = place as u32;
    }
    *all = sorted.iter().map(|&at| all[at as usize]).collect();
    new
}

/// When something happens in a replay, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Return(u32),
    Begin(u32),
    Work(u32),
}

/// Where steps begin.
#[derive(Default)]
pub(super) struct Marks {
    /// The calls that mark the start of each step, and the end of the last one.
    pub(super) calls: Vec<u32>,
    /// When the device had done all work of earlier steps.
    pub(super) done_ns: i64,
}

/// The ranks of a run, as far as its traces say.
pub(super) fn world_size(timelines: &[Timeline]) -> usize {
    let groups = timelines.iter().flat_map(|of| &of.collectives).filter_map(|of| of.group_size);
    let groups = groups.filter_map(|size| usize::try_from(size).ok());
    timelines.iter().filter_map(|of| of.world_size).chain(groups).max().unwrap_or(1)
}

/// The steps of a rank.
pub(super) struct Recorded<'a> {
    pub(super) timeline: &'a Timeline,
    pub(super) rank: usize,
    pub(super) steps: Vec<TimeRange>,
    pub(super) calls: Vec<Call>,
    pub(super) works: Vec<Work>,
    pub(super) frames: Vec<Frame>,
    pub(super) marks: Marks,
    pub(super) order: Vec<Event>,
    pub(super) context: TraceFacts,
}

/// Facts about the trace as a whole.
pub(super) struct TraceFacts {
    /// Whether every rank of the run has a trace. Otherwise time in collectives may be waiting for a rank that is not seen.
    pub(super) has_all_ranks: bool,
    pub(super) code: Code,
    /// The collective that each name means, by [`NameId`].
    kinds: Vec<Option<CollectiveKind>>,
}

impl<'a> Recorded<'a> {
    /// Reads a timeline. `None` if the trace has no work whose launch is known.
    pub(super) fn of(timeline: &'a Timeline, rank: usize, options: &Options) -> Option<Self> {
        let named = steps::analyzed(timeline, options.include_last_step);
        let mut steps: Vec<TimeRange> = named.into_iter().map(|step| step.time).collect();
        if steps.is_empty() {
            let (start_ns, end_ns) = timeline.extent()?;
            steps = vec![TimeRange { start_ns, dur_ns: end_ns.saturating_sub(start_ns) }];
        }
        let mut this = Self {
            timeline,
            rank,
            steps,
            calls: Vec::new(),
            works: Vec::new(),
            frames: Vec::new(),
            marks: Marks::default(),
            order: Vec::new(),
            context: TraceFacts {
                has_all_ranks: true,
                code: Code::of(timeline),
                kinds: timeline.names.iter().map(collective_kind).collect(),
            },
        };
        if this.on_device() {
            this.add_launches()
        } else {
            this.add_operators()
        }
        let is_known = this.works.iter().any(|work| work.call.is_some()) || !this.on_device();
        if this.calls.len() <= this.marks.calls.len() || !is_known {
            return None;
        }
        this.connect_calls();
        this.connect_works();
        this.find_beside();
        this.marks.done_ns = this.done_before();
        this.put_in_order();
        Some(this)
    }

    fn find_beside(&mut self) {
        let mut of_streams: HashMap<i64, HashSet<u32>> = HashMap::default();
        for work in &self.works {
            of_streams.entry(work.stream).or_default().extend(work.step);
        }
        of_streams.retain(|_, steps| steps.len() == self.steps.len());
        if self.on_device() && !of_streams.is_empty() {
            for work in &mut self.works {
                work.is_beside = !of_streams.contains_key(&work.stream);
            }
        }
    }

    /// Whether the trace has kernels.
    pub(super) fn on_device(&self) -> bool {
        self.timeline.has_device_work()
    }

    /// Whether `torch.compile` has a compiler for the card: Triton needs compute capability 7.0.
    pub(super) fn can_compile(&self) -> bool {
        self.timeline.compute_major.is_none_or(|major| major >= 7)
    }

    pub(super) fn text(&self, name: NameId) -> &'a str {
        self.timeline.names.text(name)
    }

    /// The part of the trace that is replayed.
    pub(super) fn window(&self) -> (i64, i64) {
        let last = self.steps.last().map_or(0, TimeRange::end_ns);
        (self.steps.first().map_or(0, |step| step.start_ns), last)
    }

    pub(super) fn holds(&self, at_ns: i64) -> bool {
        let (begin_ns, end_ns) = self.window();
        (begin_ns..end_ns).contains(&at_ns)
    }

    /// The step in which a moment lies.
    pub(super) fn step_at(&self, at_ns: i64) -> Option<u32> {
        self.steps.partition_point(|step| step.start_ns <= at_ns).checked_sub(1).map(|at| at as u32)
    }

    /// The operators and spans around a call, the innermost first.
    pub(super) fn around(&self, call: &Call) -> impl Iterator<Item = &Frame> {
        let frame = |of: Option<u32>| of.map(|of| &self.frames[of as usize]);
        std::iter::successors(frame(call.frame), move |of| frame(of.parent))
    }

    /// Whether a span or operator whose name has this prefix is around a call.
    pub(super) fn is_within(&self, call: &Call, begin: &str) -> bool {
        self.around(call).any(|frame| self.text(frame.name).starts_with(begin))
    }

    /// Whether work was launched within such a span or operator.
    pub(super) fn is_launched_within(&self, work: &Work, begin: &str) -> bool {
        work.call.is_some_and(|call| self.is_within(&self.calls[call as usize], begin))
    }

    /// Which collective a piece of communication is: by its arguments, by the call that launched it, or by its name. A kernel
    /// of NCCL that sends and receives may be an all-to-all.
    pub(super) fn collective(&self, work: &Work) -> CollectiveKind {
        let described = self.described(work).and_then(|of| collective_kind(&of.name));
        let kind = |name: NameId| self.context.kinds[name.0 as usize];
        let launched = || {
            let call = &self.calls[work.call? as usize];
            let is_of_host = |name: &str| backend_of(name).is_some() || name.starts_with("c10d::");
            let mut names = self.around(call).map(|frame| frame.name);
            names.find_map(|name| kind(name).filter(|_| is_of_host(self.text(name))))
        };
        described.or_else(launched).or_else(|| kind(work.name)).unwrap_or(CollectiveKind::Unknown)
    }

    /// The description of a piece of communication in the trace.
    pub(super) fn described(&self, work: &Work) -> Option<&Collective> {
        Some(&self.timeline.collectives[work.collective? as usize])
    }

    /// The larger buffer of a collective, if the trace gives its size.
    pub(super) fn collective_bytes(&self, work: &Work) -> Option<u64> {
        let of = self.described(work)?;
        let bytes = elem_bytes(of.dtype.as_deref()?)?;
        of.in_elems.max(of.out_elems)?.checked_mul(bytes)
    }

    /// The first work that each call launched.
    pub(super) fn launched(&self) -> Vec<Option<u32>> {
        let mut launched = vec![None; self.calls.len()];
        for (work, at) in self.works.iter().zip(0u32..) {
            if let Some(call) = work.call {
                launched[call as usize].get_or_insert(at);
            }
        }
        launched
    }

    /// All work whose launch is known, by the time of the launch.
    pub(super) fn by_launch(&self) -> ByLaunch {
        let launched = self.works.iter().zip(0u32..).filter_map(|(work, at)| {
            work.call.map(|call| (self.calls[call as usize].time.start_ns, at))
        });
        let mut all: Vec<(i64, u32)> = launched.collect();
        all.sort_unstable();
        ByLaunch(all)
    }

    /// Whether a step counts in means: not the first one of several.
    pub(super) fn counts(&self, step: Option<u32>) -> bool {
        step.is_some_and(|step| step as usize >= self.first_steps())
    }

    /// The mean over the steps that count.
    pub(super) fn per_step(&self, sum: f64) -> f64 {
        sum / (self.steps.len() - self.first_steps()) as f64
    }

    fn put_in_order(&mut self) {
        let mut order: Vec<(i64, Event)> = Vec::new();
        for (call, at) in self.calls.iter().zip(0u32..) {
            order.push((call.time.start_ns, Event::Begin(at)));
            if call.waits_for.is_some() {
                order.push((call.time.end_ns(), Event::Return(at)));
            }
        }
        for (work, at) in self.works.iter().zip(0u32..) {
            let call_ns =
                work.call.map_or(i64::MIN, |call| self.calls[call as usize].time.start_ns);
            order.push((work.time.start_ns.max(call_ns), Event::Work(at)));
        }
        order.sort_unstable();
        self.order = order.into_iter().map(|(_, event)| event).collect();
    }
}
