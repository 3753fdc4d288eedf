//! The host's part of the graph: the operators and calls of each thread, their nesting and their order.

use std::collections::BTreeMap;

use foldhash::HashMap;

use super::BoundBy;
use super::graph::{Account, Bounds, Graph, Node};
use crate::hta::work::Work;
use crate::timeline::{NameId, TimeRange, TrackId};

/// Calls that return only when the device is done. Their waiting is due to the device's work, so it adds no
/// time to the path. Copies are on the list because even asynchronous copies may wait.
const BLOCKING: [&str; 6] = [
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
];

/// Start and end of the calls that are in the graph, by index among the timeline's launches.
pub(super) type Calls = HashMap<u32, (Node, Node)>;

/// An operator, call or span of a thread.
#[derive(Clone, Copy)]
struct Frame {
    name: NameId,
    time: TimeRange,
    /// Its start and end in the graph. Spans that the program named have none, but they are the parents of
    /// what ran within them.
    nodes: Option<(Node, Node)>,
}

/// Adds the operators and calls of all threads within the bounds. Returns the nodes of the calls.
pub(super) fn add_host(graph: &mut Graph, work: &Work, bounds: Bounds) -> Calls {
    let timeline = work.timeline;
    let mut lanes: BTreeMap<TrackId, Vec<Frame>> = BTreeMap::new();
    let mut calls = Calls::default();
    let nodes =
        |graph: &mut Graph, time: TimeRange| (graph.node(time.start_ns), graph.node(time.end_ns()));
    for operator in &timeline.operators {
        let time = work.rounded(operator.time);
        if bounds.hold(time.start_ns) && time.dur_ns > 0 {
            let frame = Frame { name: operator.name, time, nodes: Some(nodes(graph, time)) };
            lanes.entry(operator.lane).or_default().push(frame);
        }
    }
    for (launch, number) in timeline.launches.iter().zip(0..) {
        if bounds.hold_call(work, launch.time) {
            let time = work.rounded(launch.time);
            let ends = nodes(graph, time);
            calls.insert(number, ends);
            let frame = Frame { name: launch.name, time, nodes: Some(ends) };
            lanes.entry(launch.lane).or_default().push(frame);
        }
    }
    for span in timeline.annotations.iter().filter(|span| !span.is_device) {
        let time = work.rounded(span.time);
        if bounds.hold(time.start_ns) && time.dur_ns > 0 {
            let frame = Frame { name: span.name, time, nodes: None };
            lanes.entry(span.lane).or_default().push(frame);
        }
    }
    let names = timeline.names.iter();
    let is_blocking: Vec<bool> = names.map(|name| BLOCKING.contains(&name)).collect();
    for frames in lanes.values_mut() {
        frames.sort_by_key(|frame| (frame.time.start_ns, std::cmp::Reverse(frame.time.end_ns())));
        let mut thread = Thread {
            graph,
            is_blocking: &is_blocking,
            open: vec![],
            depth: 0,
            last: None,
            last_top: None,
        };
        frames.iter().for_each(|&frame| thread.enter(frame));
        thread.exit_until(i64::MAX);
    }
    calls
}

/// Walks through the frames of one thread in order of time.
struct Thread<'a> {
    graph: &'a mut Graph,
    is_blocking: &'a [bool],
    open: Vec<Frame>,
    /// Number of open frames that are part of the graph.
    depth: usize,
    /// The node before, while a frame of the graph is open.
    last: Option<Last>,
    /// The end of the last top-level frame.
    last_top: Option<Node>,
}

#[derive(Clone, Copy)]
struct Last {
    node: Node,
    is_begin: bool,
    name: NameId,
    parent: Option<NameId>,
}

impl Thread<'_> {
    fn enter(&mut self, frame: Frame) {
        self.exit_until(frame.time.start_ns);
        if let Some((begin, _)) = frame.nodes {
            if let (0, Some(before)) = (self.depth, self.last_top) {
                self.graph.untimed(before, begin, None);
            }
            self.depth += 1;
            if let Some(last) = self.last {
                // The time between two frames belongs to their parent.
                let name = if last.is_begin { Some(last.name) } else { last.parent };
                self.graph.timed(last.node, begin, account(name));
            }
            let parent = self.open.last().map(|around| around.name);
            self.last = Some(Last { node: begin, is_begin: true, name: frame.name, parent });
        }
        self.open.push(frame);
    }

    /// Leaves the frames that end by this time.
    fn exit_until(&mut self, at_ns: i64) {
        while let Some(frame) = self.open.pop_if(|frame| frame.time.end_ns() <= at_ns) {
            let Some((_, end)) = frame.nodes else { continue };
            self.depth -= 1;
            if let Some(last) = self.last {
                let name = account(Some(if last.is_begin { last.name } else { frame.name }));
                if self.is_blocking[frame.name.0 as usize] {
                    self.graph.untimed(last.node, end, name)
                } else {
                    self.graph.timed(last.node, end, name)
                }
            }
            let parent = self.open.last().map(|around| around.name);
            let last = Last { node: end, is_begin: false, name: frame.name, parent };
            (self.last, self.last_top) =
                if self.depth == 0 { (None, Some(end)) } else { (Some(last), self.last_top) };
        }
    }
}

fn account(name: Option<NameId>) -> Option<Account> {
    name.map(|name| Account { name, bound_by: BoundBy::Cpu })
}
