//! The analysis of all ranks of a run.
//!
//! Input: the timelines and the options. Output: an [`Analysis`]. As many ranks are
//! analyzed at a time as there are cores. The formulas are in the other files of this folder.

use super::anatomy::{self, Anatomy};
use super::checks::by_rank;
use super::collectives::{CollectiveKind, CollectiveTimes};
use super::counters::{self, CopyBandwidth, StreamQueue};
use super::critical::{self, CriticalPath};
use super::idle::{self, StreamIdle};
use super::kernels::{self, KernelKind, KernelStats};
use super::launches::LaunchStats;
use super::memory::MemoryUse;
use super::notes;
use super::options::{Kind, Options};
use super::steps::Steps;
use super::temporal::{Overlap, Temporal};
use super::work::{Source, Work};
use crate::TraceError;
use crate::read::on_all_cores;
use crate::table::Column;
use crate::timeline::Timeline;
use paceline_files::printable;

/// The figures of a run.
#[derive(Clone, Debug)]
pub struct Analysis {
    /// Decides which columns and panels are shown.
    pub kind: Kind,
    /// One per rank, in order of ranks.
    pub ranks: Vec<RankAnalysis>,
    /// Notes for the reader of the figures, in whole sentences; empty if there is nothing to note.
    pub notes: Vec<String>,
}

/// Analyzes the traces of a run: at most one per rank, in any order. As many ranks are analyzed at a time as
/// there are processors.
pub fn analyze(timelines: &[Timeline], options: &Options) -> Result<Analysis, TraceError> {
    let timelines = by_rank(timelines)?;
    let mut ranks = Vec::with_capacity(timelines.len());
    let mut notes = Vec::with_capacity(timelines.len());
    let mut is_sharding = false;
    let analyzed = on_all_cores(&timelines, |(_, &(rank, of))| of_rank(rank, of, options));
    for rank in analyzed {
        let rank = rank?;
        notes.push((rank.analysis.rank, rank.notes));
        is_sharding |= rank.is_sharding;
        ranks.push(rank.analysis);
    }
    let kind = options.kind.unwrap_or(if is_sharding { Kind::Sharding } else { Kind::Ddp });
    Ok(Analysis { kind, ranks, notes: notes::sentences(&notes) })
}

/// The analysis of a rank, with its findings about the whole run.
struct Analyzed {
    analysis: RankAnalysis,
    notes: notes::Applies,
    is_sharding: bool,
}

fn of_rank(rank: usize, timeline: &Timeline, options: &Options) -> Result<Analyzed, TraceError> {
    let no_work = || {
        if timeline.extent().is_none() {
            let is_of_pytorch = timeline.base_ns.is_some()
                || !timeline.devices.is_empty()
                || !timeline.code.is_empty()
                || timeline.skipped.contains_key("python_function");
            let other = timeline.skipped.iter().max_by_key(|of| of.1).filter(|_| !is_of_pytorch);
            let what = match other {
                Some((kind, count)) => format!(
                    "no event of PyTorch's profiler, but {count} of kind \"{}\": it is a trace of another program, or of \
                     PyTorch before 1.8",
                    printable(kind)
                ),
                None => "nothing was recorded, neither kernels nor operators: the program has to compute while the profiler \
                         is active"
                    .to_owned(),
            };
            return TraceError::Unfit(format!("{}: {what}", timeline.source));
        }
        TraceError::Unfit(format!(
            "{}: neither kernels nor operators in the steps that are looked at; profile more than one step, or include the \
             last one",
            timeline.source
        ))
    };
    let work = &Work::of(timeline, options).ok_or_else(no_work)?;
    let collectives = CollectiveTimes::of(work);
    let critical_path = critical::of_step(work);
    let notes = notes::of_rank(work, critical_path == Err(critical::Circular));
    let is_sharding = is_sharding(timeline, &collectives);
    let analysis = RankAnalysis {
        rank,
        file: timeline.source.clone(),
        source: work.source,
        steps: work.steps.clone(),
        temporal: Temporal::of(work),
        overlap: Overlap::of(work),
        kinds: kernels::by_kind(work),
        kernels: kernels::by_name(work),
        idle: idle::of_streams(work),
        launches: LaunchStats::of(work),
        queues: counters::queues(work),
        copies: counters::copies(work),
        collectives,
        memory: MemoryUse::of(timeline),
        anatomy: Anatomy::of(work),
        critical_path: critical_path.ok().flatten(),
    };
    Ok(Analyzed { analysis, notes, is_sharding })
}

/// Whether a rank ran sharded training. Sharded training reduce-scatters gradients or sends parameters to all
/// ranks. A few all-gathers prove nothing, because every kind of run may gather statistics. They are evidence
/// if they take longer than the all-reduces.
fn is_sharding(timeline: &Timeline, collectives: &CollectiveTimes) -> bool {
    let time_ns = |kind| collectives.time_ns(kind);
    collectives.calls(CollectiveKind::ReduceScatter) > 0
        || time_ns(CollectiveKind::AllGather) > time_ns(CollectiveKind::AllReduce)
        || anatomy::has_sharding(timeline)
}

impl Analysis {
    /// The mean of a figure over the ranks that have it; `None` if no rank has it.
    pub fn mean(&self, column: &Column<RankAnalysis>) -> Option<f64> {
        let values: Vec<f64> =
            self.ranks.iter().filter_map(|rank| column.cell(rank).number()).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}

/// The figures of one rank.
#[derive(Clone, Debug)]
pub struct RankAnalysis {
    /// The rank.
    pub rank: usize,
    /// Where its trace was read from.
    pub file: String,
    /// Whether kernels or operators were counted as its work.
    pub source: Source,
    /// The analyzed steps.
    pub steps: Steps,
    /// The time in which the device computed, did other work, or was idle.
    pub temporal: Temporal,
    /// How much of the communication was hidden by computation.
    pub overlap: Overlap,
    /// The time in nanoseconds in which kernels of exactly these kinds ran, longest first: HTA's kernel breakdown. Kinds are
    /// one, two or all three of computation, communication and memory, in this order.
    pub kinds: Vec<(Vec<KernelKind>, i64)>,
    /// All kernels by name, longest total first. [`top_kernels`](super::top_kernels) returns the longest few.
    pub kernels: Vec<KernelStats>,
    /// Why each stream was idle.
    pub idle: Vec<StreamIdle>,
    /// Durations and delays of kernel launches; `None` if the trace shows no launches.
    pub launches: Option<LaunchStats>,
    /// Number of kernels that were launched and had not started, per stream.
    pub queues: Vec<StreamQueue>,
    /// Bandwidth of copies, per kind of copy.
    pub copies: Vec<CopyBandwidth>,
    /// Time in collectives by kind.
    pub collectives: CollectiveTimes,
    /// Memory in use; `None` if the trace has no samples of it.
    pub memory: Option<MemoryUse>,
    /// The parts of the steps; `None` if the trace has no steps.
    pub anatomy: Option<Anatomy>,
    /// The longest chain of dependent work in one step.
    pub critical_path: Option<CriticalPath>,
}
