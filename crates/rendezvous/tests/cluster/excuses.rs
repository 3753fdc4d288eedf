//! Which faults excuse a failure. Rank and host have the same number.

use std::fmt::Debug;
use std::time::Duration;

use paceline_trace::simulation::{ClusterFault, FaultOfHost, ProcessEnd};

/// Interruptions that no limit ends, all together.
const SHORT: Duration = Duration::from_secs(2);

/// The store, in errors of ranks that have not met there.
const STORE: &str = "could not meet the others at 10.0.0.1:29500";

/// How long the cluster may stand still.
pub fn pauses(faults: &[FaultOfHost]) -> Duration {
    let pauses = faults.iter().map(|fault| match fault.kind {
        ClusterFault::Freeze | ClusterFault::Suspend => fault.at + fault.time,
        _ => Duration::ZERO,
    });
    pauses.max().unwrap_or_default()
}

/// How long hosts are away, all together.
pub fn interruptions(faults: &[FaultOfHost]) -> Duration {
    let interruptions = faults.iter().map(|fault| match fault.kind {
        ClusterFault::Freeze | ClusterFault::Cut => fault.time,
        _ => Duration::ZERO,
    });
    interruptions.sum()
}

/// Whether all must succeed, unless a process is killed.
pub fn are_short(faults: &[FaultOfHost]) -> bool {
    interruptions(faults) < SHORT
}

/// Whether this rank measures times as the others do.
pub fn is_clock_right(rank: usize, faults: &[FaultOfHost]) -> bool {
    faults.iter().all(|fault| match fault.kind {
        ClusterFault::Freeze | ClusterFault::Jump => fault.host != rank,
        kind => !matches!(kind, ClusterFault::Suspend),
    })
}

/// The first rank that `by` blames at `at` for nothing: no fault explains why it is missed, and it has not ended before.
///
/// A rank that a fault of host 0 keeps waiting at the store is not at its listener yet, so others are right that it does not answer
/// there (seed 1092 of checkpoints).
pub fn wrongly_blamed<R: Debug>(
    culprits: &[usize],
    (by, at): (usize, Duration),
    faults: &[FaultOfHost],
    ends: &[ProcessEnd<R>],
) -> Option<usize> {
    let explains = |fault: &FaultOfHost, rank: usize| match fault.kind {
        ClusterFault::Kill | ClusterFault::Freeze | ClusterFault::Slow => fault.host == rank,
        ClusterFault::Cut => [rank, by].contains(&fault.host),
        ClusterFault::Jump | ClusterFault::Suspend => false,
    };
    let has_ended = |rank: usize| match &ends[rank] {
        ProcessEnd::Returned(_, before) => *before < at,
        ProcessEnd::Killed | ProcessEnd::Hung(_) => true,
    };
    let says = |rank: usize, place: &str| format!("{:?}", ends[rank]).contains(place);
    let holds_store = |fault: &FaultOfHost| {
        fault.host == 0 && matches!(fault.kind, ClusterFault::Freeze | ClusterFault::Cut)
    };
    let is_at_store =
        |rank: usize| says(by, "listener") && says(rank, STORE) && faults.iter().any(holds_store);
    let is_explained = |rank: usize| faults.iter().any(|fault| explains(fault, rank));
    let is_wrong = |rank: &usize| !has_ended(*rank) && !is_explained(*rank) && !is_at_store(*rank);
    culprits.iter().copied().find(is_wrong)
}
