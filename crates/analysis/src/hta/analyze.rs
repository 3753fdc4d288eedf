//! The analysis of all ranks of a run.
//!
//! The timelines and options go in. An [`Analysis`] comes out, for which each rank is analysed on a thread of its
//! own. The formulas are in the other files of this folder.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread::{self, ScopedJoinHandle};

use super::anatomy::{self, Anatomy};
use super::collectives::{CollectiveKind, CollectiveTimes};
use super::columns::Column;
use super::counters::{self, CopyBandwidth, StreamQueue};
use super::critical::{self, CriticalPath};
use super::error::{AnalysisError, by_rank};
use super::idle::{self, StreamIdle};
use super::kernels::{self, KernelStats, KindTime};
use super::launches::LaunchStats;
use super::memory::MemoryUse;
use super::notes::{self, Note, Notes};
use super::options::{Kind, Options};
use super::row::Row;
use super::steps::Steps;
use super::temporal::{Overlap, Temporal};
use super::work::{Source, Work};
use crate::timeline::Timeline;

/// The figures of a run.
#[derive(Clone, Debug)]
pub struct Analysis {
    /// Which columns and panels fit the run.
    pub kind: Kind,
    /// One per rank, in order of ranks.
    pub ranks: Vec<RankAnalysis>,
    /// What a reader of the figures should know, in whole sentences; empty where nothing is special.
    pub notes: Vec<String>,
}

/// Analyses the traces of a run, at most one per rank, in any order; as many at a time as there are processors.
pub fn analyze(timelines: &[Timeline], options: &Options) -> Result<Analysis, AnalysisError> {
    let timelines: Vec<(usize, &Timeline)> = by_rank(timelines)?.into_iter().collect();
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    let mut ranks = Vec::with_capacity(timelines.len());
    let mut notes = Notes::default();
    let mut is_sharding = false;
    for some in timelines.chunks(at_once) {
        let analysed: Vec<_> = thread::scope(|scope| {
            let start = |&(rank, timeline)| scope.spawn(move || of_rank(rank, timeline, options));
            let threads: Vec<_> = some.iter().map(start).collect();
            threads.into_iter().map(ScopedJoinHandle::join).collect()
        });
        for rank in analysed {
            let rank = rank.unwrap_or_else(|panic| resume_unwind(panic))?;
            rank.notes.iter().for_each(|&note| notes.add(note, rank.analysis.rank));
            is_sharding |= rank.is_sharding;
            ranks.push(rank.analysis);
        }
    }
    let kind = options.kind.unwrap_or(if is_sharding { Kind::Sharding } else { Kind::Ddp });
    Ok(Analysis { kind, ranks, notes: notes.sentences() })
}

/// A rank, and what it says about the run.
struct Analysed {
    analysis: RankAnalysis,
    notes: Vec<Note>,
    is_sharding: bool,
}

fn of_rank(rank: usize, timeline: &Timeline, options: &Options) -> Result<Analysed, AnalysisError> {
    let no_work = || AnalysisError::NoWork { file: timeline.source.clone() };
    let work = &Work::of(timeline, options).ok_or_else(no_work)?;
    let temporal = Temporal::of(work);
    let overlap = Overlap::of(work);
    let kernels = kernels::by_name(work);
    let collectives = CollectiveTimes::of(work);
    let memory = MemoryUse::of(timeline);
    let row = Row::of(rank, &temporal, &overlap, &kernels, &collectives, memory.as_ref());
    let critical_path = critical::of_step(work);
    let mut notes = notes::of_work(work);
    if critical_path == Err(critical::Circular) {
        notes.push(Note::Circular);
    }
    let is_sharding = is_sharding(timeline, &collectives);
    let analysis = RankAnalysis {
        rank,
        file: timeline.source.clone(),
        source: work.source,
        steps: work.steps.clone(),
        row,
        temporal,
        overlap,
        kinds: kernels::by_kind(work),
        kernels,
        idle: idle::of_streams(work),
        launches: LaunchStats::of(work),
        queues: counters::queues(work),
        copies: counters::copies(work),
        collectives,
        memory,
        anatomy: Anatomy::of(work),
        critical_path: critical_path.ok().flatten(),
    };
    Ok(Analysed { analysis, notes, is_sharding })
}

/// Sharded training scatters sums of gradients or sends parameters round. A few all-gathers prove nothing,
/// as ranks also gather statistics and figures; they do where they take longer than all-reduces.
fn is_sharding(timeline: &Timeline, collectives: &CollectiveTimes) -> bool {
    let time_ns = |kind| collectives.time_ns(kind);
    collectives.calls(CollectiveKind::ReduceScatter) > 0
        || time_ns(CollectiveKind::AllGather) > time_ns(CollectiveKind::AllReduce)
        || anatomy::has_sharding(timeline)
}

impl Analysis {
    /// The mean of a figure over the ranks that have it; `None` if no rank has it.
    pub fn mean(&self, column: &Column) -> Option<f64> {
        let values: Vec<f64> =
            self.ranks.iter().filter_map(|rank| (column.get)(&rank.row)).collect();
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
    /// What was counted as its work.
    pub source: Source,
    /// Which steps were looked at.
    pub steps: Steps,
    /// Its line in the summary.
    pub row: Row,
    /// Idle, computing, or neither.
    pub temporal: Temporal,
    /// How much of communication is hidden behind computation.
    pub overlap: Overlap,
    /// Time by kind of kernel, longest first, with every combination that ran at the same time.
    pub kinds: Vec<KindTime>,
    /// Kernels by name, all of them, longest total first; see [`top_kernels`](super::top_kernels) for the longest few.
    pub kernels: Vec<KernelStats>,
    /// Why each stream was idle.
    pub idle: Vec<StreamIdle>,
    /// What it took to launch kernels; `None` where the trace shows no launches.
    pub launches: Option<LaunchStats>,
    /// Work that was launched and not begun, per stream.
    pub queues: Vec<StreamQueue>,
    /// Bandwidth of copies, per kind of copy.
    pub copies: Vec<CopyBandwidth>,
    /// Time in collectives by kind.
    pub collectives: CollectiveTimes,
    /// Memory in use; `None` where the trace has no samples.
    pub memory: Option<MemoryUse>,
    /// What the steps consist of; `None` where the trace has no steps.
    pub anatomy: Option<Anatomy>,
    /// The longest chain of dependent work in one step.
    pub critical_path: Option<CriticalPath>,
}
