//! Who has met: only ranks that are here, one process for each, also beside the file of a run that was killed. Ranks come at
//! different times; in some runs, a second process comes with the number of a rank, perhaps after the first one has died.

use std::path::Path;
use std::time::Duration;

use paceline_rendezvous::{Rendezvous, RendezvousError, Store};
use paceline_trace::runtime::sleep;
use paceline_trace::simulation::{
    ClusterFault, FaultOfHost, HostProgram, ProcessEnd, SplitMix, run,
};

use crate::excuses::pauses;
use crate::schedules::explore;

const WORLD: usize = 4;
const LIMIT: Duration = Duration::from_secs(20);
/// The latest start of a rank.
const LATEST: Duration = Duration::from_secs(8);
/// How long others may take to notice a death.
const NOTICE: Duration = Duration::from_secs(1);

type End = ProcessEnd<Result<(), RendezvousError>>;

/// When the ranks start, and which rank comes twice, at which time.
#[derive(Debug)]
struct Starts {
    ranks: Vec<Duration>,
    again: Option<(usize, Duration)>,
}

impl Starts {
    fn of(seed: u64) -> Self {
        let mut random = SplitMix(seed ^ 0x57A7);
        let mut time = || Duration::from_nanos(random.time_ns(LATEST.as_nanos() as u64));
        let ranks = (0..WORLD).map(|_| time()).collect();
        let again = time();
        let rank = random.below(2 * WORLD as u64) as usize;
        Self { ranks, again: (1..WORLD).contains(&rank).then_some((rank, again)) }
    }
}

fn program(
    point: &Rendezvous,
    host: usize,
    rank: usize,
    start: Duration,
) -> HostProgram<Result<(), RendezvousError>> {
    let point = point.clone();
    let main = move || {
        sleep(start);
        let _store = Store::open(&point, rank, WORLD, LIMIT)?;
        // The answers of rank 0 leave.
        sleep(NOTICE);
        Ok(())
    };
    HostProgram { host, main: Box::new(main) }
}

/// The rank that a fault has killed, and when, if no other fault can hide its death.
fn only_death(faults: &[FaultOfHost], ends: &[End]) -> Option<(usize, Duration)> {
    let [FaultOfHost { kind: ClusterFault::Kill, at, host, .. }] = faults else { return None };
    matches!(ends[*host], ProcessEnd::Killed).then_some((*host, *at))
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let starts = Starts::of(seed);
    let point = Rendezvous::by_tcp("10.0.0.1", 29_500, "secret");
    // First the second process: a fault kills the latest process of a host.
    let again = starts.again.map(|(rank, start)| program(&point, rank, rank, start));
    let first = (0..WORLD).map(|rank| program(&point, rank, rank, starts.ranks[rank]));
    let programs = again.into_iter().chain(first).collect();
    let mut ends = run(seed, faults, 3 * LIMIT + pauses(faults), programs);
    let again = starts.again.map(|(rank, start)| (rank, start, ends.remove(0)));
    let fails = |how: String| Err(format!("{how}: {starts:?}, {ends:?}, again {again:?}"));
    if ends.iter().any(|end| matches!(end, ProcessEnd::Hung(_))) {
        return fails("a rank hangs".into());
    }
    let has_met = |end: &End| matches!(end, ProcessEnd::Returned(Ok(()), _));
    if let Some((rank, _, end)) = &again
        && has_met(end)
        && has_met(&ends[*rank])
    {
        return fails(format!("two processes are rank {rank}"));
    }
    let mut must_meet = faults.is_empty();
    if let Some((dead, died)) = only_death(faults, &ends) {
        let last = starts.ranks.iter().enumerate().filter(|(rank, _)| *rank != dead);
        let last = last.map(|(_, start)| *start).max().unwrap_or_default();
        let next = again.as_ref().filter(|(rank, ..)| *rank == dead).map(|(_, start, _)| *start);
        let is_early = dead > 0 && died + NOTICE < last;
        if is_early && next.is_none() && ends.iter().any(has_met) {
            return fails(format!("rank {dead} was dead, and others have met it"));
        }
        must_meet = is_early && next.is_some_and(|next| next > died + NOTICE);
    }
    let is_here = |(rank, end): (usize, &End)| {
        has_met(end) || again.as_ref().is_some_and(|of| of.0 == rank && has_met(&of.2))
    };
    if must_meet && !ends.iter().enumerate().all(is_here) {
        return fails("all were here, and not all have met".into());
    }
    Ok(())
}

#[test]
fn only_ranks_that_are_here_meet_and_each_once() {
    explore(WORLD, check);
}

/// All ranks of one host meet by the file, beside whose old version they may come first.
fn check_file(path: &Path, seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let point = Rendezvous::by_file(path);
    let kill = FaultOfHost {
        at: Duration::from_millis(100),
        host: 0,
        kind: ClusterFault::Kill,
        time: Duration::ZERO,
    };
    let old = run(seed, &[kill], LIMIT, vec![program(&point, 0, 0, Duration::ZERO)]);
    assert!(old == [ProcessEnd::Killed] && path.exists(), "{old:?}");
    let starts = Starts::of(seed).ranks;
    let programs = (0..WORLD).map(|rank| program(&point, 0, rank, starts[rank])).collect();
    let ends = run(seed, faults, 3 * LIMIT + pauses(faults), programs);
    let all = ends.iter().all(|end| matches!(end, ProcessEnd::Returned(Ok(()), _)));
    if all { Ok(()) } else { Err(format!("not all have met: {starts:?}, {ends:?}")) }
}

#[test]
fn ranks_meet_by_a_file_that_a_killed_run_has_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    explore(1, |seed, faults| {
        let is_harmless =
            |of: &&FaultOfHost| matches!(of.kind, ClusterFault::Suspend | ClusterFault::Jump);
        let faults: Vec<FaultOfHost> = faults.iter().filter(is_harmless).copied().collect();
        check_file(&path, seed, &faults)
    });
}
