//! The device's part of the graph: kernels, and edges from their calls, from earlier kernels and from what
//! they wait for.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use super::BoundBy;
use super::graph::{Account, Bounds, Graph, Node};
use super::host::Calls;
use crate::hta::KernelKind;
use crate::hta::counters::{enqueued, lengths};
use crate::hta::work::{Work, launched};
use crate::timeline::{DeviceWork, Kernel, NameId, SyncWait, TrackId};

/// A kernel or a wait event of the device.
struct Entry {
    /// Kernels are ordered by their starts, waits by their ends, so that a wait comes after the kernels that
    /// started before it ended.
    order_ns: i64,
    /// Index into the timeline's kernels.
    kernel: u32,
    /// Index among the work's items; `None` for waits for the whole device, which are not items.
    item: Option<usize>,
    /// Index of the call that launched it.
    launch: u32,
}

/// Adds the kernels whose calls are within the bounds, and the waits for them.
pub(super) fn add_device(graph: &mut Graph, work: &Work, bounds: Bounds, calls: &Calls) {
    let entries = entries(work, bounds);
    let mut nodes = HashMap::default();
    for entry in entries.iter().filter(|entry| !is_wait(work, entry)) {
        if let Some(place) = entry.item {
            let item = &work.items[place];
            nodes.insert(place, (graph.node(item.start_ns), graph.node(item.end_ns)));
        }
    }
    let waits = work.timeline.sync_waits.iter().map(|wait| (wait.kernel, *wait)).collect();
    let (launches, lengths) = (Launches::of(work), lengths(work));
    let last = BTreeMap::new();
    let after = HashMap::default();
    let mut device = Device { graph, work, calls, nodes, waits, launches, lengths, last, after };
    for entry in &entries {
        match entry.item {
            Some(place) if !is_wait(work, entry) => device.kernel(place, entry.launch),
            _ => device.wait(entry),
        }
    }
}

fn kernel_of<'w>(work: &'w Work, entry: &Entry) -> &'w Kernel {
    &work.timeline.kernels[entry.kernel as usize]
}

fn is_wait(work: &Work, entry: &Entry) -> bool {
    kernel_of(work, entry).work == DeviceWork::Sync
}

/// The kernels and waits that calls within the bounds caused, in order. A stream wait has an effect on the
/// work that is launched after it, which may be within the bounds even if the wait is not. Stream waits
/// therefore always count.
fn entries(work: &Work, bounds: Bounds) -> Vec<Entry> {
    let timeline = work.timeline;
    let is_stream_wait = |kernel: &Kernel| timeline.names.text(kernel.name) == STREAM_WAIT;
    let mut entries = Vec::new();
    for (place, item) in work.items.iter().enumerate() {
        let Some(launch) = item.launch else { continue };
        let call = timeline.launches[launch as usize].time;
        let counts = bounds.hold_call(work, call)
            || item.is_wait(timeline) && is_stream_wait(&timeline.kernels[item.kernel as usize]);
        if counts {
            let order_ns = if item.is_wait(timeline) { item.end_ns } else { item.start_ns };
            entries.push(Entry { order_ns, kernel: item.kernel, item: Some(place), launch });
        }
    }
    let is_of_device = |kernel: &Kernel| kernel.work == DeviceWork::Sync && kernel.stream < 0;
    let of_device = timeline.kernels.iter().zip(0..).filter(|(kernel, _)| is_of_device(kernel));
    // Few traces have waits of the device, so the map of launches is built only for those.
    let launched = of_device.clone().next().map(|_| launched(timeline)).unwrap_or_default();
    for (kernel, number) in of_device {
        let time = work.rounded(kernel.time);
        let launch = kernel.correlation.and_then(|correlation| launched.get(&correlation));
        if let Some(&launch) = launch
            && bounds.hold(time.start_ns)
            && time.dur_ns > 0
        {
            entries.push(Entry { order_ns: time.end_ns(), kernel: number, item: None, launch });
        }
    }
    entries.sort_by_key(|entry| entry.order_ns);
    entries
}

const STREAM_WAIT: &str = "Stream Wait Event";
const EVENT_SYNC: &str = "Event Sync";
const STREAM_SYNC: &str = "Stream Sync";
const CONTEXT_SYNC: &str = "Context Sync";

/// A wait for the whole device has an edge from this many streams at most, those that ended last. Programs have a few dozen.
const MOST_STREAMS: usize = 256;

/// Items that were put into queues, by stream and in order of their calls.
struct Launches {
    streams: BTreeMap<i64, Vec<(i64, TrackId, usize)>>,
    /// When events were recorded (`cudaEventRecord`), by the correlation number of that call.
    records: HashMap<u64, i64>,
}

impl Launches {
    fn of(work: &Work) -> Self {
        let mut streams: BTreeMap<i64, Vec<(i64, TrackId, usize)>> = BTreeMap::new();
        for (place, at_ns) in enqueued(work) {
            let item = &work.items[place];
            if let Some(launch) = item.launch {
                let lane = work.timeline.launches[launch as usize].lane;
                streams.entry(item.stream).or_default().push((at_ns, lane, place));
            }
        }
        streams.values_mut().for_each(|stream| stream.sort_by_key(|of| of.0));
        let names = &work.timeline.names;
        let marks = work.timeline.launches.iter().filter(|launch| {
            launch.correlation.is_some() && names.text(launch.name) == "cudaEventRecord"
        });
        let records = marks
            .filter_map(|launch| Some((launch.correlation?, work.rounded(launch.time).start_ns)));
        Self { streams, records: records.collect() }
    }

    /// The last item of the awaited stream whose call had begun when the awaited event was recorded.
    fn before(&self, wait: &SyncWait) -> Option<usize> {
        let at_ns = *self.records.get(&wait.record)?;
        let stream = self.streams.get(&wait.stream)?;
        let after = stream.partition_point(|of| of.0 <= at_ns);
        Some(stream[after.checked_sub(1)?].2)
    }

    /// The next item of a stream that the same thread launched after this time.
    fn after(&self, stream: i64, lane: TrackId, at_ns: i64) -> Option<usize> {
        let stream = self.streams.get(&stream)?;
        let first = stream.partition_point(|of| of.0 <= at_ns);
        stream[first..].iter().find(|of| of.1 == lane).map(|of| of.2)
    }
}

struct Device<'a> {
    graph: &'a mut Graph,
    work: &'a Work<'a>,
    calls: &'a Calls,
    /// Start and end of kernels, by index among the items.
    nodes: HashMap<usize, (Node, Node)>,
    waits: HashMap<u32, SyncWait>,
    launches: Launches,
    lengths: Vec<Option<(i64, i64)>>,
    /// The end of the last kernel of each stream, and the name to which a gap after it is attributed.
    last: BTreeMap<i64, (Node, NameId)>,
    /// For an item, the item that it has to wait for; both are indices among the items.
    after: HashMap<usize, usize>,
}

impl Device<'_> {
    fn kernel(&mut self, place: usize, launch: u32) {
        let item = &self.work.items[place];
        let Some(&(begin, end)) = self.nodes.get(&place) else { return };
        let name = item.name;
        let bound_by = match item.kind {
            KernelKind::Communication => BoundBy::GpuCommunication,
            _ => BoundBy::GpuCompute,
        };
        self.graph.timed(begin, end, Some(Account { name, bound_by }));
        let waited = self.after.remove(&place).and_then(|other| self.nodes.get(&other));
        let waited = waited.map(|&(_, end)| end);
        if let Some(waited) = waited {
            self.graph.untimed(waited, begin, None);
        }
        let call_ns = self.work.call(launch).start_ns;
        let last = self.last.insert(item.stream, (end, name));
        let is_before = |node: Option<Node>, at_ns: i64, graph: &Graph| {
            node.is_none_or(|node| graph.at_ns(node) < at_ns)
        };
        let found_nothing = self.lengths[place] == Some((1, 0))
            && is_before(last.map(|last| last.0), call_ns, self.graph)
            && is_before(waited, call_ns, self.graph);
        if found_nothing {
            if let Some(&(call, _)) = self.calls.get(&launch) {
                let account = Account { name, bound_by: BoundBy::LaunchDelay };
                self.graph.timed(call, begin, Some(account));
            }
        } else if let Some((last, name)) = last
            && is_before(waited, self.graph.at_ns(last), self.graph)
        {
            let account = Account { name, bound_by: BoundBy::KernelGap };
            self.graph.timed(last, begin, Some(account));
        }
    }

    fn wait(&mut self, entry: &Entry) {
        let kernel = kernel_of(self.work, entry);
        let call = self.work.timeline.launches[entry.launch as usize];
        match self.work.timeline.names.text(kernel.name) {
            STREAM_WAIT => {
                let Some(first) = self.waits.get(&entry.kernel) else { return };
                let call_ns = self.work.rounded(call.time).start_ns;
                let then = self.launches.after(kernel.stream, call.lane, call_ns);
                if let (Some(first), Some(then)) = (self.launches.before(first), then) {
                    self.after.insert(then, first);
                }
            }
            EVENT_SYNC => {
                let first = self.waits.get(&entry.kernel);
                let first = first.and_then(|wait| self.launches.before(wait));
                if let Some(&(_, end)) = first.and_then(|first| self.nodes.get(&first)) {
                    self.sync(end, entry.launch);
                }
            }
            STREAM_SYNC => {
                if let Some(&(end, _)) = self.last.get(&kernel.stream) {
                    self.sync(end, entry.launch);
                }
            }
            CONTEXT_SYNC => {
                let mut ends: Vec<Node> = self.last.values().map(|&(end, _)| end).collect();
                if ends.len() > MOST_STREAMS {
                    ends.sort_by_key(|end| Reverse(self.graph.at_ns(*end)));
                    ends.truncate(MOST_STREAMS);
                }
                ends.into_iter().for_each(|end| self.sync(end, entry.launch));
            }
            _ => {}
        }
    }

    /// Adds the edge of a call that returns only after a kernel has ended.
    fn sync(&mut self, end: Node, launch: u32) {
        if let Some(&(_, returned)) = self.calls.get(&launch) {
            self.graph.untimed(end, returned, None);
        }
    }
}
