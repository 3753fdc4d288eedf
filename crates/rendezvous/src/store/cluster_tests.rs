//! Ranks of a simulated cluster meet at the store of torchrun's agent, under faults of theirs.

#[path = "../../tests/cluster/excuses.rs"]
mod excuses;
#[path = "../../tests/cluster/schedules.rs"]
mod schedules;

use std::time::Duration;

use excuses::{are_short, is_clock_right, pauses, wrongly_blamed};
use paceline_trace::runtime::{now, sleep};
use paceline_trace::simulation::{FaultOfHost, HostProgram, ProcessEnd, run};
use schedules::explore;

use super::Store;
use super::agent_tests::fake_agent;
use crate::{Rendezvous, RendezvousError};

const WORLD: usize = 3;
const LIMIT: Duration = Duration::from_secs(10);
/// How much longer than its limit a rank may wait for an answer that depends on no other rank.
const GRACE: Duration = Duration::from_secs(36);
/// The time that [`meet`] may take, with an answer of the agent missing at each step.
const ALL: Duration = Duration::from_secs(200);

/// The numbers of all ranks, or an error, with the time from the start until it came if the agent was asked only once.
type Met = Result<Vec<usize>, (RendezvousError, Option<Duration>)>;

fn meet(rank: usize) -> Met {
    let rendezvous = Rendezvous::by_agent("10.0.0.4", 29_500, "run/0");
    let begin = now();
    let store = Store::open(&rendezvous, rank, WORLD, LIMIT);
    let store = store.map_err(|error| (error, Some(now() - begin)))?;
    store.exchange("number", &rank).map_err(|error| (error, None))
}

/// The agent, which lives longer than all ranks.
fn serve(time: Duration) -> Met {
    fake_agent([10, 0, 0, 4].into(), 29_500);
    sleep(time);
    Ok(Vec::new())
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let limit = ALL + pauses(faults);
    let agent = HostProgram { host: WORLD, main: Box::new(move || serve(limit)) };
    let program = |rank| HostProgram { host: rank, main: Box::new(move || meet(rank)) };
    let programs = (0..WORLD).map(program).chain([agent]).collect();
    let mut ends = run(seed, faults, limit, programs);
    ends.truncate(WORLD);
    let is_quiet = are_short(faults) && !ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    for (rank, end) in ends.iter().enumerate() {
        let (error, took, at) = match end {
            ProcessEnd::Killed => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Ok(all), _) if *all == [0, 1, 2] => continue,
            ProcessEnd::Returned(Ok(all), _) => return Err(format!("rank {rank} has {all:?}")),
            ProcessEnd::Returned(Err((error, took)), at) => (error, took, *at),
        };
        let fails = |how: &str| Err(format!("rank {rank} {how}: {error}; all: {ends:?}"));
        if is_quiet {
            return fails("fails without a reason");
        }
        if is_clock_right(rank, faults) && took.is_some_and(|took| took > LIMIT + GRACE) {
            return fails(&format!("took {took:?}"));
        }
        if let RendezvousError::Failed { missing, .. } = error
            && let Some(wrong) = wrongly_blamed(missing, (rank, at), faults, &ends)
        {
            return fails(&format!("blames {wrong}"));
        }
    }
    Ok(())
}

#[test]
fn ranks_meet_at_an_agent_or_say_who_is_missing() {
    explore(WORLD, check);
}
