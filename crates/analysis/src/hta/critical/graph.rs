//! The graph of the critical path: nodes, edges, and the search for the longest path.

use super::BoundBy;
use crate::hta::work::Work;
use crate::timeline::{NameId, TimeRange};

/// The time range of the graph. Host events belong to it if they start between `from_ns` and `to_ns`, both
/// included.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) from_ns: i64,
    pub(super) to_ns: i64,
}

impl Bounds {
    pub(super) fn hold(self, at_ns: i64) -> bool {
        self.from_ns <= at_ns && at_ns <= self.to_ns
    }

    /// Whether a call belongs to the graph. Like HTA, leaves out calls that took no time. If no call of the
    /// trace has a duration, its recorder does not measure them, and none is left out for that reason.
    pub(super) fn hold_call(self, work: &Work, call: TimeRange) -> bool {
        let time = work.rounded(call);
        self.hold(time.start_ns) && (time.dur_ns > 0 || !work.has_timed_calls)
    }
}

/// The number of a node. A node is a moment in the trace.
pub(super) type Node = u32;

/// The name and the limit to which the time of an edge is attributed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    pub(super) name: NameId,
    pub(super) bound_by: BoundBy,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    pub(super) from: Node,
    pub(super) to: Node,
    pub(super) dur_ns: i64,
    /// `None` if one only has to wait for the other.
    pub(super) account: Option<Account>,
}

/// The nodes, numbered as they were added, and the edges between them.
#[derive(Debug, Default)]
pub(super) struct Graph {
    at_ns: Vec<i64>,
    edges: Vec<Edge>,
}

impl Graph {
    pub(super) fn node(&mut self, at_ns: i64) -> Node {
        self.at_ns.push(at_ns);
        (self.at_ns.len() - 1) as Node
    }

    pub(super) fn at_ns(&self, node: Node) -> i64 {
        self.at_ns[node as usize]
    }

    /// Adds an edge that is as long as the time between its ends, or takes no time if they are out of order.
    pub(super) fn timed(&mut self, from: Node, to: Node, account: Option<Account>) {
        let dur_ns = (self.at_ns(to) - self.at_ns(from)).max(0);
        self.edges.push(Edge { from, to, dur_ns, account });
    }

    /// Adds an edge that takes no time.
    pub(super) fn untimed(&mut self, from: Node, to: Node, account: Option<Account>) {
        self.edges.push(Edge { from, to, dur_ns: 0, account });
    }

    /// The edges of the path with the largest total duration, in order. If several paths into a node are
    /// equally long, the edge that was added first wins. `None` if the graph has a cycle.
    pub(super) fn longest_path(&self) -> Option<Vec<Edge>> {
        let nodes = self.at_ns.len();
        let (starts, outgoing) = self.outgoing();
        let mut missing = vec![0u32; nodes];
        self.edges.iter().for_each(|edge| missing[edge.to as usize] += 1);
        let mut ready: Vec<Node> =
            (0..nodes as Node).filter(|&node| missing[node as usize] == 0).collect();
        let mut best: Vec<(i64, Option<u32>)> = vec![(0, None); nodes];
        let mut done = 0;
        while let Some(&node) = ready.get(done) {
            done += 1;
            let length_ns = best[node as usize].0;
            let (first, last) = (starts[node as usize], starts[node as usize + 1]);
            for &number in &outgoing[first..last] {
                let edge = &self.edges[number as usize];
                let way = (length_ns + edge.dur_ns, Some(number));
                let to = edge.to as usize;
                let is_longer = way.0 > best[to].0;
                let is_earlier = way.0 == best[to].0 && best[to].1.is_none_or(|of| number < of);
                if is_longer || is_earlier {
                    best[to] = way;
                }
                missing[to] -= 1;
                if missing[to] == 0 {
                    ready.push(edge.to);
                }
            }
        }
        if done < nodes {
            return None;
        }
        let longest = best.iter().map(|way| way.0).max().unwrap_or(0);
        let mut way = best.iter().find(|way| way.0 == longest).and_then(|way| way.1);
        let mut path = Vec::new();
        while let Some(number) = way {
            let edge = self.edges[number as usize];
            path.push(edge);
            way = best[edge.from as usize].1;
        }
        path.reverse();
        Some(path)
    }

    /// The indices of the edges, grouped by the node that they leave, and where the group of each node
    /// starts.
    fn outgoing(&self) -> (Vec<usize>, Vec<u32>) {
        let mut starts = vec![0usize; self.at_ns.len() + 1];
        self.edges.iter().for_each(|edge| starts[edge.from as usize + 1] += 1);
        for node in 1..starts.len() {
            starts[node] += starts[node - 1];
        }
        let mut next = starts.clone();
        let mut outgoing = vec![0; self.edges.len()];
        for (edge, number) in self.edges.iter().zip(0u32..) {
            outgoing[next[edge.from as usize]] = number;
            next[edge.from as usize] += 1;
        }
        (starts, outgoing)
    }
}
