//! Which faults excuse a failure. Rank and host have the same number.

use std::time::Duration;

use paceline_trace::simulation::{ClusterFault, FaultOfHost, ProcessEnd};

/// Interruptions that no limit ends, all together.
const SHORT: Duration = Duration::from_secs(2);

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
pub fn wrongly_blamed<R>(
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
    let is_wrong =
        |rank: &usize| !has_ended(*rank) && !faults.iter().any(|fault| explains(fault, *rank));
    culprits.iter().copied().find(is_wrong)
}
