//! Ranks that are started again after a failure: those of different attempts never meet, and after one death all meet in the next
//! attempt. Each host has a process that starts its rank again.

use paceline_rendezvous::RendezvousError;
use paceline_trace::simulation::{ClusterFault, FaultOfHost, ProcessEnd, Program, run, run_child};

use crate::excuses::{are_short, pauses};
use crate::meeting::{ALL, Met, WORLD, meet};
use crate::schedules::explore;

const MAX_RESTARTS: usize = 3;

/// The numbers that the others have sent, or the last error. `None` if the rank was killed.
fn launch(rank: usize) -> Option<Met> {
    let mut last = None;
    for restarts in 0..=MAX_RESTARTS {
        last = run_child(rank, move || meet(rank, restarts));
        if let Some(Ok(_)) = last {
            break;
        }
    }
    last
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let process = |rank| Program { host: rank, main: Box::new(move || launch(rank)) };
    let limit = ALL * (1 + MAX_RESTARTS as u32) + pauses(faults);
    let (ends, _) = run(seed, faults, limit, (0..WORLD).map(process).collect());
    let mut met = Vec::new();
    let mut failed = Vec::new();
    for (rank, end) in ends.iter().enumerate() {
        match end {
            ProcessEnd::Hung(waits) => return Err(format!("host {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Some(Ok(numbers)), _) => met.push(numbers),
            // The process that starts ranks may be the one that is killed, while it has none.
            ProcessEnd::Killed | ProcessEnd::Returned(None, _) => failed.push(None),
            ProcessEnd::Returned(Some(Err(error)), _) => failed.push(Some(error)),
        }
    }
    for numbers in &met {
        let restarts = numbers[0].1;
        let expected: Vec<(usize, usize)> = (0..WORLD).map(|rank| (rank, restarts)).collect();
        if **numbers != expected {
            return Err(format!("attempts are mixed: {numbers:?}"));
        }
    }
    let num_kills = faults.iter().filter(|fault| fault.kind == ClusterFault::Kill).count();
    let is_excused = num_kills > 1 || !are_short(faults) || !met.is_empty();
    if let Some(why) = failed.first().filter(|_| !is_excused) {
        let why = why.map_or("killed".into(), RendezvousError::to_string);
        return Err(format!("nobody has met after {MAX_RESTARTS} restarts: {why}"));
    }
    Ok(())
}

#[test]
fn attempts_never_mix() {
    explore(WORLD, check);
}
