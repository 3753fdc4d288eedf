//! Why an analysis failed, and the checks that traces must pass before they are analyzed.
//!
//! Input: timelines. Output: the same timelines in order of rank, or an error that names the file.

use std::collections::BTreeMap;
use std::fmt;

use crate::timeline::{TimeRange, Timeline};

/// Why an analysis failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
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
    /// Two traces belong to the same rank.
    #[error("{first} and {second} are both of rank {rank}; pass one of them")]
    SameRank {
        /// The rank.
        rank: usize,
        /// Where the first one was read from.
        first: String,
        /// Where the second one was read from.
        second: String,
    },
    /// The times of a trace are outside any plausible range.
    #[error("{file}: its times reach over more than {LIMIT_YEARS} years, so the file is damaged")]
    Times {
        /// Where the trace was read from.
        file: String,
    },
    /// A trace has no work in the analyzed steps.
    #[error(
        "{file}: neither kernels nor operators in the steps that are looked at; profile more than \
             one step, or include the last one"
    )]
    NoWork {
        /// Where the trace was read from.
        file: String,
    },
    /// A trace to be compared lacks a requested step.
    #[error("{file}: no step {number}; it has {found}")]
    NoStep {
        /// Where the trace was read from.
        file: String,
        /// The requested step.
        number: u64,
        /// The steps that the trace has, in words.
        found: String,
    },
}

impl fmt::Debug for AnalysisError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A trace is considered damaged if one of its times is further than this from the zero of its clock, or if
/// the sum of its durations is larger than this. In nanoseconds.
pub(crate) const LIMIT_NS: i64 = 1 << 61;
const LIMIT_YEARS: i64 = LIMIT_NS / (365 * 24 * 3600 * 1_000_000_000);

/// Checks that sums and differences of a trace's times cannot overflow.
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

/// The traces in order of rank. Fails if two traces have the same rank, if a trace names no rank, or if its
/// times are implausible.
pub(super) fn by_rank(timelines: &[Timeline]) -> Result<BTreeMap<usize, &Timeline>, AnalysisError> {
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
