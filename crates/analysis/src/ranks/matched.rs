//! Matches the collectives of different ranks, and finds how long each rank waited in them.
//!
//! Input: timelines and their clocks. Output: [`MatchedCollective`]s with times on the reference clock. Each is
//! one collective as several ranks saw it, with the arrival of each rank. Messages between two ranks are left
//! out, because they concern only these two.

use std::collections::HashMap;

use super::clock::{Clocks, rank_of};
use crate::hta::CollectiveKind::{self, AllToAll};
use crate::hta::{Chosen, KernelKind, backend_of, collective_kind, launched};
use crate::steps;
use crate::timeline::{Collective, Kernel, NameId, TimeRange, Timeline, TrackId};

/// The part of one rank in a collective. Times are nanoseconds of the reference clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Index of the timeline.
    pub place: usize,
    /// The rank.
    pub rank: usize,
    /// When the collective began on this rank.
    pub start_ns: i64,
    /// When the collective ended on this rank.
    pub end_ns: i64,
    /// How long the rank waited for the last rank, in nanoseconds. Never longer than the collective took.
    pub wait_ns: i64,
    /// Nanoseconds in the queue, until earlier operations were done, if the trace gives them.
    pub queue_ns: Option<i64>,
}

impl Arrival {
    /// Nanoseconds in which data moved: the duration without the wait.
    pub fn transfer_ns(&self) -> i64 {
        self.end_ns.saturating_sub(self.start_ns).saturating_sub(self.wait_ns)
    }
}

/// A collective that appears in the traces of two ranks or more.
#[derive(Clone, Debug, PartialEq)]
pub struct MatchedCollective {
    /// The name in the traces.
    pub name: String,
    /// The group of ranks, if the traces name it.
    pub group: Option<String>,
    /// The number of the collective in the sequence of its group, if the traces give it.
    pub seq: Option<u64>,
    /// The number of the step in which the last rank arrived.
    pub step: Option<u64>,
    /// How many elements a rank sends or receives, whichever is more, if the traces tell.
    pub num_elems: Option<u64>,
    /// Whether the transport measured on each rank when the last rank arrived, so that the clocks do not matter. Otherwise
    /// [`Arrival::wait_ns`] is the latest start of the collective on any rank, minus the rank's own start, on aligned clocks.
    pub is_measured: bool,
    /// Whether all ranks of the group have a trace of the collective. `true` if the traces do not give the size of
    /// the group.
    pub is_complete: bool,
    /// The ranks, in the order of the timelines.
    pub arrivals: Vec<Arrival>,
    /// Index in `arrivals` of the rank that arrived last.
    last: usize,
}

impl MatchedCollective {
    /// The rank that arrived last, which is the rank that waited least. If several ranks waited equally long, the
    /// rank among them that began latest.
    pub fn last(&self) -> &Arrival {
        &self.arrivals[self.last]
    }

    /// How much later the last rank arrived than the rank before it, in nanoseconds. The ranks could gain this
    /// time if the two arrived together.
    pub fn lead_ns(&self) -> i64 {
        let others = self.arrivals.iter().enumerate().filter(|&(i, _)| i != self.last);
        let second = others.map(|(_, arrival)| arrival.wait_ns).min();
        second.map_or(0, |wait_ns| wait_ns - self.last().wait_ns)
    }

    /// How long the last rank made the others wait: the sum of their waits in nanoseconds, each minus the
    /// wait of the last rank itself.
    pub fn made_wait_ns(&self) -> i64 {
        let least_ns = self.last().wait_ns;
        let waits = self.arrivals.iter().map(|arrival| arrival.wait_ns - least_ns);
        waits.fold(0, i64::saturating_add)
    }
}

/// All collectives of some timelines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MatchedCollectives {
    /// The collectives that two ranks or more have, in the order in which their last rank arrived.
    pub all: Vec<MatchedCollective>,
    /// Number of collectives that could not be matched, counted per rank: no other rank has a trace of the
    /// collective, or it has no sequence number and the ranks called different numbers of such collectives in
    /// a step.
    pub num_unmatched: usize,
}

/// Finds the collectives that timelines have in common.
///
/// Two collectives match if their group, name and sequence number are equal. Without sequence numbers, the
/// n-th calls of a name in a group match, counted within a step, or within the trace if it has no steps. The
/// collectives are taken from kernels if all traces have such kernels, otherwise from the backend's own
/// events (such as `gloo:all_reduce`), otherwise from the operators that called them.
pub fn match_collectives(timelines: &[Timeline], clocks: &Clocks) -> MatchedCollectives {
    match_chosen(timelines, clocks, &everything(timelines))
}

fn everything(timelines: &[Timeline]) -> Vec<Chosen> {
    timelines.iter().map(Chosen::everything).collect()
}

/// Like [`match_collectives`], but only for the chosen collectives.
pub(super) fn match_chosen(
    timelines: &[Timeline],
    clocks: &Clocks,
    chosen: &[Chosen],
) -> MatchedCollectives {
    let mut by_key: HashMap<Key, Vec<(Operation, Arrival)>> = HashMap::new();
    let mut num_unmatched = 0;
    for (place, operations) in operations(timelines, chosen).into_iter().enumerate() {
        let (clock, rank) = (&clocks.ranks[place], rank_of(timelines, place));
        for mut operation in operations {
            let time = operation.time;
            let start_ns = clock.align(time.start_ns);
            // With a clock that seems to run backward, a collective must still not end before it begins.
            let end_ns = clock.align(time.end_ns()).max(start_ns);
            let wait_ns = operation.wait_ns().unwrap_or_default().clamp(0, end_ns - start_ns);
            let queue_ns = operation.said.and_then(|said| said.queue_ns);
            let arrival = Arrival { place, rank, start_ns, end_ns, wait_ns, queue_ns };
            match operation.key.take() {
                Some(key) => by_key.entry(key).or_default().push((operation, arrival)),
                None => num_unmatched += 1,
            }
        }
    }
    let mut all = Vec::with_capacity(by_key.len());
    for (key, arrivals) in by_key {
        if arrivals.len() < 2 {
            num_unmatched += arrivals.len();
            continue;
        }
        all.push(matched(key, arrivals));
    }
    let arrived =
        |collective: &MatchedCollective| (collective.last().start_ns, collective.last().end_ns);
    all.sort_unstable_by(|a: &MatchedCollective, b: &MatchedCollective| {
        arrived(a)
            .cmp(&arrived(b))
            .then_with(|| (&a.group, a.seq, &a.name).cmp(&(&b.group, b.seq, &b.name)))
    });
    MatchedCollectives { all, num_unmatched }
}

fn matched(key: Key, seen: Vec<(Operation, Arrival)>) -> MatchedCollective {
    let is_measured = seen.iter().all(|(operation, _)| operation.wait_ns().is_some());
    let said = || seen.iter().filter_map(|(operation, _)| operation.said);
    let size = said().filter_map(|said| said.group_size).max();
    let mut arrivals: Vec<Arrival> = seen.iter().map(|(_, arrival)| *arrival).collect();
    let latest_ns = arrivals.iter().map(|arrival| arrival.start_ns).max().unwrap_or_default();
    if !is_measured {
        for arrival in &mut arrivals {
            // With inexact clocks, the last start may be later than the end on this rank.
            arrival.wait_ns = (latest_ns.min(arrival.end_ns) - arrival.start_ns).max(0);
        }
    }
    let order = |arrival: &Arrival| (arrival.wait_ns, std::cmp::Reverse(arrival.start_ns));
    let last = (0..arrivals.len()).min_by_key(|&i| order(&arrivals[i])).unwrap_or_default();
    MatchedCollective {
        seq: key.seq,
        name: key.name,
        group: key.group,
        step: seen[last].0.step,
        num_elems: said().filter_map(|said| said.in_elems.max(said.out_elems)).max(),
        is_measured,
        is_complete: size.is_none_or(|size| arrivals.len() as u64 >= size),
        arrivals,
        last,
    }
}

/// The end of each collective on each timeline's own clock. If some collectives end on all ranks at about the
/// same time, the result has only these.
pub(super) fn ends(timelines: &[Timeline]) -> Vec<HashMap<Key, i64>> {
    let operations = operations(timelines, &everything(timelines));
    let any = operations.iter().flatten().any(|operation| ends_together(&operation.name));
    let ends = operations.into_iter().map(|operations| {
        let kept = operations.into_iter().filter(|op| !any || ends_together(&op.name));
        kept.filter_map(|op| Some((op.key?, op.time.end_ns()))).collect()
    });
    ends.collect()
}

/// Identifies a collective on several ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    group: Option<String>,
    name: String,
    /// Its number in the group's sequence, if the trace gives it.
    seq: Option<u64>,
    /// Otherwise the number of its step; `None` before the first step.
    step: Option<u64>,
    /// Its index among the collectives with the same values above.
    nth: u32,
}

/// A collective of one rank, on its own clock.
struct Operation<'a> {
    /// `None` if it cannot be matched to a collective of the other ranks.
    key: Option<Key>,
    name: String,
    time: TimeRange,
    step: Option<u64>,
    said: Option<&'a Collective>,
}

impl Operation<'_> {
    fn wait_ns(&self) -> Option<i64> {
        self.said?.wait_ns
    }
}

/// The kind of events from which collectives are read.
#[derive(Clone, Copy)]
enum EventKind {
    Kernels,
    BackEnd,
    Operators,
}

/// The collectives of all timelines, each list sorted by time. Uses the first kind of events that all
/// timelines have.
fn operations<'a>(timelines: &'a [Timeline], chosen: &[Chosen]) -> Vec<Vec<Operation<'a>>> {
    let read = |kind| -> Vec<_> {
        let all = timelines.iter().zip(chosen);
        all.map(|(timeline, chosen)| list(timeline, chosen, kind)).collect()
    };
    let mut found = Vec::new();
    for kind in [EventKind::Kernels, EventKind::BackEnd, EventKind::Operators] {
        let lists = read(kind);
        if lists.iter().all(|list| !list.is_empty()) {
            return distinct(lists);
        }
        found.push(lists);
    }
    // Some rank has no collectives in any kind of events, so use the kind that most ranks have.
    let most = found.into_iter().max_by_key(|lists| lists.iter().filter(|l| !l.is_empty()).count());
    distinct(most.unwrap_or_default())
}

/// The collectives of one timeline, from one kind of events. The step of each is the one in which the host
/// began it.
fn list<'a>(timeline: &'a Timeline, chosen: &Chosen, kind: EventKind) -> Vec<Operation<'a>> {
    let collective = |id: Option<u32>| id.and_then(|id| timeline.collectives.get(id as usize));
    let mut events: Vec<(TimeRange, i64, &str, Option<&'a Collective>)> = Vec::new();
    if let EventKind::Kernels = kind {
        let all_to_alls = all_to_alls(timeline);
        for (kernel, index) in timeline.kernels.iter().zip(0u32..) {
            let is_all_to_all = all_to_alls.binary_search(&index).is_ok();
            let name = if is_all_to_all { ALL_TO_ALL } else { timeline.names.text(kernel.name) };
            if (kernel.collective.is_some() || is_all_to_all || is_collective_kernel(name))
                && let Some(begun_ns) = chosen.kernel(index, kernel)
            {
                events.push((kernel.time, begun_ns, name, collective(kernel.collective)));
            }
        }
    } else {
        let own: Vec<bool> = timeline.names.iter().map(|of| backend_of(of).is_some()).collect();
        let operators = timeline.operators.iter().map(|o| (o.time, o.name, o.collective));
        let annotations = timeline.annotations.iter().filter(|a| !a.is_device);
        let all = operators.chain(annotations.map(|a| (a.time, a.name, None)));
        let is_it = |name: NameId, id: Option<u32>| match kind {
            EventKind::BackEnd => own[name.0 as usize],
            _ => id.is_some(),
        };
        for (time, name, id) in all.filter(|of| is_it(of.1, of.2) && chosen.holds(of.0.start_ns)) {
            events.push((time, time.start_ns, timeline.names.text(name), collective(id)));
        }
    }
    events.sort_by_key(|&(time, _, name, _)| (time, name));
    let operation =
        |(time, begun_ns, name, said): (TimeRange, i64, &str, Option<&'a Collective>)| {
            let called = said.map(|said| said.name.as_str()).filter(|name| !name.is_empty());
            let name = called.unwrap_or(name).to_owned();
            let ranks = said.and_then(|said| said.group_ranks.clone());
            let group = said.and_then(|said| said.group.clone()).or(ranks);
            let seq = said.and_then(|said| said.seq);
            let step = steps::at(&chosen.steps, begun_ns).map(|step| step.number);
            // The index is set later, by `distinct`.
            let key = Key {
                group,
                name: name.clone(),
                seq,
                step: step.filter(|_| seq.is_none()),
                nth: 0,
            };
            Operation { key: Some(key), name, time, step, said }
        };
    events.into_iter().map(operation).filter(|operation| !is_message(&operation.name)).collect()
}

/// Numbers the collectives that would otherwise have the same key. Removes the keys of collectives without
/// sequence numbers that the ranks did not call equally often.
fn distinct(mut lists: Vec<Vec<Operation<'_>>>) -> Vec<Vec<Operation<'_>>> {
    let mut of_lists: Vec<HashMap<Key, u32>> = vec![HashMap::new(); lists.len()];
    for (list, counts) in lists.iter_mut().zip(&mut of_lists) {
        for key in list.iter_mut().filter_map(|operation| operation.key.as_mut()) {
            let count = counts.entry(key.clone()).or_default();
            key.nth = *count;
            *count += 1;
        }
    }
    let is_ambiguous = |key: &Key| {
        if key.seq.is_some() {
            return false;
        }
        let zeroth = Key { nth: 0, ..key.clone() };
        let mut numbers = of_lists.iter().filter_map(|counts| counts.get(&zeroth));
        let first = numbers.next();
        numbers.any(|number| Some(number) != first)
    };
    for operation in lists.iter_mut().flatten() {
        operation.key.take_if(|key| is_ambiguous(key));
    }
    lists
}

/// Whether a kernel communicates, judged by its name.
pub(super) fn is_collective_kernel(name: &str) -> bool {
    let is_of_nccl = name.starts_with("nccl") || name.contains("ncclKernel");
    is_of_nccl || KernelKind::of_kernel(name) == KernelKind::Communication
}

/// The name of an all-to-all whose kernel only sends and receives.
const ALL_TO_ALL: &str = "all_to_all";

/// The kernels without a description that an all-to-all launched, by index, ascending. Their names are those of messages. Only the
/// span `nccl:all_to_all` around the launch tells them apart.
fn all_to_alls(timeline: &Timeline) -> Vec<u32> {
    let is_it: Vec<bool> = timeline
        .names
        .iter()
        .map(|name| backend_of(name).is_some() && collective_kind(name) == Some(AllToAll))
        .collect();
    let spans = timeline.annotations.iter().filter(|of| !of.is_device && is_it[of.name.0 as usize]);
    let mut spans: Vec<(TrackId, TimeRange)> = spans.map(|of| (of.lane, of.time)).collect();
    if spans.is_empty() {
        return Vec::new();
    }
    spans.sort_unstable();
    let calls = launched(timeline);
    let is_within = |kernel: &Kernel| {
        let call = calls.get(&kernel.correlation?)?;
        let call = &timeline.launches[*call as usize];
        let begun =
            spans.partition_point(|of| (of.0, of.1.start_ns) <= (call.lane, call.time.start_ns));
        let (lane, span) = spans[begun.checked_sub(1)?];
        Some(lane == call.lane && call.time.start_ns < span.end_ns())
    };
    let kernels = timeline.kernels.iter().zip(0u32..);
    let undescribed = kernels.filter(|(of, _)| of.collective.is_none());
    let of_nccl = undescribed.filter(|(of, _)| is_collective_kernel(timeline.names.text(of.name)));
    of_nccl.filter(|(of, _)| is_within(of) == Some(true)).map(|(_, index)| index).collect()
}

/// Whether an operation connects only two ranks.
fn is_message(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("send") || name.contains("recv")
}

/// Whether the collective ends on no rank before all ranks have arrived. This is so if every rank needs data
/// from every other rank.
fn ends_together(name: &str) -> bool {
    use CollectiveKind::{AllGather, AllReduce, Barrier, ReduceScatter};
    let kind = collective_kind(name);
    kind.is_some_and(|of| [AllReduce, AllGather, ReduceScatter, AllToAll, Barrier].contains(&of))
}
