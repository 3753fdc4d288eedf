//! Ranks that are started again after a failure: those of different attempts never meet, and after one death all meet in the next
//! attempt. Each host has a process that starts its rank again.

use paceline_trace::simulation::{
    ClusterFault, FaultOfHost, HostProgram, ProcessEnd, run, run_child,
};

use crate::excuses::{are_short, pauses};
use crate::meeting::{ALL, LIMIT, Met, WORLD, meet};
use crate::schedules::explore;

const MAX_RESTARTS: usize = 3;

/// The numbers that the others have sent, or the last error. `None` if the rank was killed.
fn launch(rank: usize) -> Option<Met> {
    let mut last = None;
    for restarts in 0..=MAX_RESTARTS {
        last = run_child(rank, move || meet(rank, restarts, LIMIT));
        if let Some(Ok(_)) = last {
            break;
        }
    }
    last
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let process = |rank| HostProgram { host: rank, main: Box::new(move || launch(rank)) };
    let limit = ALL * (1 + MAX_RESTARTS as u32) + pauses(faults);
    let ends = run(seed, faults, limit, (0..WORLD).map(process).collect());
    let mut met = Vec::new();
    let mut failed = Vec::new();
    let mut has_lost_host = false;
    for (rank, end) in ends.iter().enumerate() {
        match end {
            ProcessEnd::Hung(waits) => return Err(format!("host {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Some(Ok(numbers)), _) => met.push(numbers),
            // A fault has ended the process that starts the rank, or its last rank.
            ProcessEnd::Killed | ProcessEnd::Returned(None, _) => has_lost_host = true,
            ProcessEnd::Returned(Some(Err(error)), _) => failed.push(error),
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
    let is_excused = num_kills > 1 || !are_short(faults) || !met.is_empty() || has_lost_host;
    if let Some(why) = failed.first().filter(|_| !is_excused) {
        return Err(format!("nobody has met after {MAX_RESTARTS} restarts: {}", why.error));
    }
    Ok(())
}

#[test]
fn attempts_never_mix() {
    explore(WORLD, check);
}
