//! The checks that traces must pass before they are analyzed.
//!
//! Input: timelines. Output: the same timelines in order of rank, or an error that names the file.

use std::collections::BTreeMap;

use crate::TraceError;
use crate::timeline::{TimeRange, Timeline};

/// A trace is considered damaged if one of its times is further than this from the zero of its clock, or if
/// the sum of its durations is larger than this. In nanoseconds.
pub(crate) const LIMIT_NS: i64 = 1 << 61;
const LIMIT_YEARS: i64 = LIMIT_NS / (365 * 24 * 3600 * 1_000_000_000);

/// Checks that sums and differences of a trace's times cannot overflow.
pub(crate) fn check_times(timeline: &Timeline) -> Result<(), TraceError> {
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
        Err(TraceError::Unfit(format!(
            "{}: its times reach over more than {LIMIT_YEARS} years, so the file is damaged",
            timeline.source
        )))
    }
}

/// The traces in order of rank, at least one. Fails if there is none, if two traces have the same rank, if a trace names no rank, or if its
/// times are implausible.
pub(super) fn by_rank(timelines: &[Timeline]) -> Result<Vec<(usize, &Timeline)>, TraceError> {
    let mut by_rank: BTreeMap<usize, &Timeline> = BTreeMap::new();
    for timeline in timelines {
        let file = &timeline.source;
        let Some(rank) = timeline.rank else {
            return Err(TraceError::Unfit(format!(
                "{file}: no rank: neither \"distributedInfo\" in the file nor its path names one"
            )));
        };
        if let Some(first) = by_rank.insert(rank, timeline) {
            let first = &first.source;
            return Err(TraceError::Unfit(format!(
                "{first} and {file} are both of rank {rank}; pass one of them"
            )));
        }
        check_times(timeline)?;
    }
    if by_rank.is_empty() {
        return Err(TraceError::Unfit("there are no traces to analyse".to_owned()));
    }
    Ok(by_rank.into_iter().collect())
}
