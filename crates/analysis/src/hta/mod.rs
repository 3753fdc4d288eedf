//! Where the time of each rank went, by the formulas of Holistic Trace Analysis (HTA 0.5.0).
//!
//! The [`Timeline`]s of all ranks and [`Options`] go in. An [`Analysis`] comes out: all figures of HTA for each
//! rank, and the summary [`Row`]. The [`Column`]s of the summary give each figure its name, unit and definition,
//! wherever it is shown. This module reads no files and draws nothing.
//!
//! Times are nanoseconds (`_ns`) on the clock of the rank's own trace. A trace without kernel events,
//! as PyTorch's profiler writes on a CPU, is analysed from its operators, see [`Source`].

mod anatomy;
mod chosen;
mod collectives;
mod columns;
mod counters;
mod critical;
mod diff;
mod idle;
mod kernels;
mod launches;
mod memory;
mod nesting;
mod notes;
mod options;
mod row;
mod steps;
mod temporal;
mod work;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread::{self, ScopedJoinHandle};

use crate::timeline::{TimeRange, Timeline};
use notes::{Note, Notes};
use work::Work;

pub use crate::stats::Summary;
pub use crate::steps::Step;
pub use anatomy::{Anatomy, Part, PartTime, StepAnatomy};
pub(crate) use chosen::Chosen;
pub use collectives::{CollectiveKind, CollectiveTimes, kind_of as collective_kind};
pub use columns::{Column, Unit, columns};
pub use counters::{CopyBandwidth, Point, StreamQueue};
pub use critical::{BoundBy, CriticalPath, EdgeKind, PathEdge, PathName};
pub use diff::{Change, Diff, DiffRow, Side, diff};
pub use idle::{IdleCategory, IdleTime, StreamIdle};
pub use kernels::{KernelKind, KernelStats, KindTime, top as top_kernels};
pub use launches::{LaunchStats, NameLaunches};
pub use memory::MemoryUse;
pub use options::{Kind, Options, Rounding, StepChoice};
pub use row::Row;
pub use steps::Steps;
pub use temporal::{Overlap, Temporal};

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

/// Why there is no analysis.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnalysisError {
    /// There are no traces.
    #[error("there are no traces to analyse")]
    Empty,
    /// A trace does not name its rank.
    #[error("{file}: no rank: neither \"distributedInfo\" in the file nor its path names one")]
    NoRank {
        /// Where the trace was read from.
        file: String,
    },
    /// Two traces are of one rank.
    #[error("{first} and {second} are both of rank {rank}; pass one of them")]
    SameRank {
        /// The rank.
        rank: usize,
        /// Where the first one was read from.
        first: String,
        /// Where the second one was read from.
        second: String,
    },
    /// The times of a trace are outside of any plausible range.
    #[error("{file}: its times reach over more than {LIMIT_YEARS} years, so the file is damaged")]
    Times {
        /// Where the trace was read from.
        file: String,
    },
    /// A trace holds no work in the steps that are looked at.
    #[error(
        "{file}: neither kernels nor operators in the steps that are looked at; profile more than \
             one step, or include the last one"
    )]
    NoWork {
        /// Where the trace was read from.
        file: String,
    },
    /// A trace to compare has none of the steps that were asked for.
    #[error("{file}: no step {number}; it has {found}")]
    NoStep {
        /// Where the trace was read from.
        file: String,
        /// The step that was asked for.
        number: u64,
        /// Those that it has, in words.
        found: String,
    },
}

/// Moments further than this from the clock's zero, and durations whose sum is larger, are taken for damage.
pub(crate) const LIMIT_NS: i64 = 1 << 61;
const LIMIT_YEARS: i64 = LIMIT_NS / (365 * 24 * 3600 * 1_000_000_000);

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

/// Checks that sums and differences of the times of a trace cannot overflow.
pub(crate) fn check_times(timeline: &Timeline) -> Result<(), AnalysisError> {
    let kernels = timeline.kernels.iter().map(|of| of.time);
    let launches = timeline.launches.iter().map(|of| of.time);
    let operators = timeline.operators.iter().map(|of| of.time);
    let annotations = timeline.annotations.iter().map(|of| of.time);
    let samples = timeline.memory.iter().map(|of| TimeRange { start_ns: of.at_ns, dur_ns: 0 });
    let mut times = kernels.chain(launches).chain(operators).chain(annotations).chain(samples);
    let mut sum_ns = 0i64;
    let is_sound = times.all(|time| {
        sum_ns = sum_ns.saturating_add(time.dur_ns);
        time.start_ns.unsigned_abs() < LIMIT_NS as u64 && (0..LIMIT_NS).contains(&time.dur_ns)
    });
    if is_sound && sum_ns < LIMIT_NS {
        Ok(())
    } else {
        Err(AnalysisError::Times { file: timeline.source.clone() })
    }
}

/// Traces in order of rank, with believable times.
fn by_rank(timelines: &[Timeline]) -> Result<BTreeMap<usize, &Timeline>, AnalysisError> {
    let mut by_rank: BTreeMap<usize, &Timeline> = BTreeMap::new();
    for timeline in timelines {
        let file = || timeline.source.clone();
        let rank = timeline.rank.ok_or_else(|| AnalysisError::NoRank { file: file() })?;
        if let Some(first) = by_rank.insert(rank, timeline) {
            let first = first.source.clone();
            return Err(AnalysisError::SameRank { rank, first, second: file() });
        }
        check_times(timeline)?;
    }
    if by_rank.is_empty() { Err(AnalysisError::Empty) } else { Ok(by_rank) }
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
    /// Kernels by name, all of them, longest total first; see [`top_kernels`] for the longest few.
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

/// What is counted as the work of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The kernels of its device.
    Kernels,
    /// The operators of its threads, because the trace has no kernels: PyTorch's profiler on a CPU.
    /// Operators that are collectives count as communication, all others as computation.
    Operators,
}
