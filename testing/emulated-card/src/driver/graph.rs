//! Captured work: its order, and runs that keep to it.
//!
//! A capture collects the work of one or more streams with its dependencies. A run takes the nodes in any order that
//! the dependencies allow, so a missing wait within a capture is found too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::ThreadId;

use crate::boundary::Status;

use super::work::CardWork;

/// A captured piece of work.
#[derive(Clone)]
pub struct GraphNode {
    pub work: CardWork,
    /// The nodes that come before it.
    pub after: Vec<usize>,
}

/// Captured work that can be launched.
pub type Graph = Arc<[GraphNode]>;

/// A graph while it runs.
#[derive(Clone)]
pub struct GraphRun {
    graph: Graph,
    done: Vec<bool>,
}

impl GraphRun {
    /// A run that has not begun.
    pub fn new(graph: Graph) -> Self {
        let done = vec![false; graph.len()];
        Self { graph, done }
    }

    /// The nodes whose predecessors are done.
    pub fn ready(&self) -> Vec<usize> {
        let is_ready = |k: &usize| {
            !self.done[*k] && self.graph[*k].after.iter().all(|before| self.done[*before])
        };
        (0..self.graph.len()).filter(is_ready).collect()
    }

    /// The work of a node.
    pub fn work(&self, node: usize) -> &CardWork {
        &self.graph[node].work
    }

    /// Notes that a node is done.
    pub fn finish(&mut self, node: usize) {
        self.done[node] = true;
    }

    /// Whether all nodes are done.
    pub fn is_done(&self) -> bool {
        self.done.iter().all(|done| *done)
    }
}

/// Which calls of other threads a capture forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls of every thread.
    Global,
    /// Unsafe calls of the thread that captures.
    ThreadLocal,
    Relaxed,
}

/// A capture that has begun.
pub struct StreamCapture {
    pub origin: usize,
    pub mode: CaptureMode,
    pub thread: ThreadId,
    /// Why nothing can be captured any more.
    pub invalid: bool,
    nodes: Vec<GraphNode>,
    /// For each stream that takes part the nodes that its next work comes after.
    fronts: BTreeMap<usize, Vec<usize>>,
}

impl StreamCapture {
    /// An empty capture.
    pub fn new(origin: usize, mode: CaptureMode) -> Self {
        let fronts = BTreeMap::from([(origin, Vec::new())]);
        let thread = std::thread::current().id();
        Self { origin, mode, thread, invalid: false, nodes: Vec::new(), fronts }
    }

    /// Whether it forbids unsafe calls of this thread.
    pub fn forbids(&self, thread: ThreadId) -> bool {
        match self.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => self.thread == thread,
            CaptureMode::Relaxed => false,
        }
    }

    /// The streams that take part.
    pub fn streams(&self) -> Vec<usize> {
        self.fronts.keys().copied().collect()
    }

    /// Adds work of a stream.
    pub fn push(&mut self, stream: usize, work: CardWork) {
        let front = self.fronts.entry(stream).or_default();
        let after = std::mem::replace(front, vec![self.nodes.len()]);
        self.nodes.push(GraphNode { work, after });
    }

    /// The nodes that an event covers if it is recorded now.
    pub fn front(&self, stream: usize) -> Vec<usize> {
        self.fronts.get(&stream).cloned().unwrap_or_default()
    }

    /// Lets a stream wait for nodes. A stream that does not take part yet begins to.
    pub fn join(&mut self, stream: usize, nodes: &[usize]) {
        let front = self.fronts.entry(stream).or_default();
        front.extend(nodes);
        front.sort_unstable();
        front.dedup();
    }

    /// The graph, if every stream was joined to the first one.
    pub fn finish(self) -> Result<Graph, Status> {
        let mut joined = BTreeSet::new();
        let mut open = self.front(self.origin);
        while let Some(node) = open.pop() {
            if joined.insert(node) {
                open.extend(&self.nodes[node].after);
            }
        }
        if self.fronts.values().flatten().all(|node| joined.contains(node)) {
            Ok(self.nodes.into())
        } else {
            Err(Status::CAPTURE_UNJOINED)
        }
    }
}
