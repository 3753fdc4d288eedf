//! The critical path of one rank by HTA's rules: the longest chain of work in which each piece had to wait
//! for the one before.
//!
//! The nodes of the graph are the starts and ends of operators, calls and kernels. The nested operators and
//! calls of a thread form a chain, and so do the kernels of a stream. A call leads to its kernel if the
//! stream had nothing else to do, and synchronization leads from a kernel back to a call. The time between
//! two top-level operators of a thread belongs to no edge, so the path can be shorter than the step.

mod device;
mod graph;
mod host;

use std::collections::BTreeMap;

use super::work::Work;
use super::{Rules, Source, Step};
use crate::timeline::NameId;
use device::add_device;
use graph::{Account, Bounds, Edge, Graph};
use host::add_host;

/// The limit of a piece of the path, in HTA's categories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BoundBy {
    /// An operator or a call on the host.
    Cpu,
    /// A kernel that does not communicate.
    GpuCompute,
    /// A communication kernel.
    GpuCommunication,
    /// A gap between two kernels of a stream.
    KernelGap,
    /// The delay between a call and its kernel.
    LaunchDelay,
}

impl BoundBy {
    /// HTA's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu_bound",
            Self::GpuCompute => "gpu_compute_bound",
            Self::GpuCommunication => "gpu_communication_bound",
            Self::KernelGap => "gpu_kernel_kernel_overhead",
            Self::LaunchDelay => "gpu_kernel_launch_overhead",
        }
    }
}

/// A piece of the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathEdge {
    /// The limit of the piece; `None` for dependencies and synchronization, which take no time.
    pub bound_by: Option<BoundBy>,
    /// The name to which its time is attributed: of an operator, call, span or kernel. The time of a gap is
    /// attributed to the kernel before it, that of a launch delay to the kernel after it. Empty for an edge
    /// that takes no time.
    pub name: String,
    /// Its length on the path, in nanoseconds.
    pub dur_ns: i64,
}

/// All pieces of the path with one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathName {
    /// The name.
    pub name: String,
    /// The limit of these pieces.
    pub bound_by: BoundBy,
    /// Number of pieces.
    pub pieces: u64,
    /// Sum of their lengths, in nanoseconds.
    pub time_ns: i64,
}

/// The critical path through one step.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticalPath {
    /// The step's number; `None` if the whole trace was analyzed.
    pub step: Option<u64>,
    /// Its length, in nanoseconds.
    pub total_ns: i64,
    /// Its pieces, in order.
    pub edges: Vec<PathEdge>,
    /// Time in nanoseconds for each limit, largest first.
    pub by_bound: Vec<(BoundBy, i64)>,
    /// Time by name, largest first.
    pub by_name: Vec<PathName>,
}

/// There is no critical path, because the graph has a cycle: some work waits for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Circular;

/// The critical path of the first step, or of the whole trace if it has no steps. `None` if the trace has no kernels.
pub(super) fn of_step(work: &Work) -> Result<Option<CriticalPath>, Circular> {
    if work.source == Source::Operators {
        return Ok(None);
    }
    let (step, bounds) = match work.steps.chosen.first() {
        Some(&Step { number, time }) => {
            // The first moment of the next step belongs to it; HTA's steps share it.
            let shared_ns = i64::from(work.options.rules == Rules::Steps);
            (Some(number), Bounds { from_ns: time.start_ns, to_ns: time.end_ns() - shared_ns })
        }
        None => (None, Bounds { from_ns: i64::MIN, to_ns: i64::MAX }),
    };
    let mut graph = Graph::default();
    let calls = add_host(&mut graph, work, bounds);
    add_device(&mut graph, work, bounds, &calls);
    let path = graph.longest_path().ok_or(Circular)?;
    Ok(Some(CriticalPath::of(work, step, &path)))
}

impl CriticalPath {
    fn of(work: &Work, step: Option<u64>, path: &[Edge]) -> Self {
        let mut bounds: BTreeMap<BoundBy, i64> = BTreeMap::new();
        let mut names: BTreeMap<(NameId, BoundBy), (u64, i64)> = BTreeMap::new();
        let mut edges = Vec::with_capacity(path.len());
        for edge in path {
            if let Some(Account { name, bound_by }) = edge.account {
                *bounds.entry(bound_by).or_default() += edge.dur_ns;
                let sum = names.entry((name, bound_by)).or_default();
                *sum = (sum.0 + 1, sum.1 + edge.dur_ns);
            }
            edges.push(PathEdge {
                bound_by: edge.account.map(|of| of.bound_by),
                name: edge.account.map_or("", |of| work.timeline.names.text(of.name)).to_owned(),
                dur_ns: edge.dur_ns,
            });
        }
        let mut by_bound: Vec<_> = bounds.into_iter().collect();
        by_bound.sort_by_key(|of| std::cmp::Reverse(of.1));
        let by_name = names.into_iter().map(|((name, bound_by), (pieces, time_ns))| PathName {
            name: work.timeline.names.text(name).to_owned(),
            bound_by,
            pieces,
            time_ns,
        });
        let mut by_name: Vec<PathName> = by_name.collect();
        by_name.sort_by(|a, b| b.time_ns.cmp(&a.time_ns).then_with(|| a.name.cmp(&b.name)));
        let total_ns = edges.iter().map(|edge| edge.dur_ns).sum();
        Self { step, total_ns, edges, by_bound, by_name }
    }
}
