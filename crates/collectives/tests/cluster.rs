//! Ranks train in a simulated cluster, under faults: no sum is wrong, no operation takes longer than its limit, and errors name
//! ranks that have failed.

#[path = "../../rendezvous/tests/cluster/excuses.rs"]
mod excuses;
#[path = "../../rendezvous/tests/cluster/schedules.rs"]
mod schedules;

use std::time::Duration;

use excuses::{are_short, pauses, wrongly_blamed};
use paceline_collectives::{CollectiveError, Group, GroupOptions, ReduceOp, Rendezvous};
use paceline_memory::{Allocator, Category, DType};
use paceline_trace::runtime::{now, sleep};
use paceline_trace::simulation::{ClusterFault, FaultOfHost, ProcessEnd, Program, run};
use schedules::explore;

const WORLD: usize = 3;
const LIMIT: Duration = Duration::from_secs(5);
/// How much longer than its limit an operation may take, to hear the last words of others.
const GRACE: Duration = Duration::from_secs(2);
/// The time that the steps of [`train`] may take together.
const ALL: Duration = Duration::from_secs(120);
const NUM_STEPS: usize = 8;

/// The end of a rank's training.
#[derive(Debug)]
enum Failure {
    /// With the operation's time. That of forming the group is not limited by one limit.
    Refused(CollectiveError, Option<Duration>),
    WrongSum(String),
}

/// The elements of a step: few, many, and more than fit into one block of a share.
fn num_elements(step: usize) -> usize {
    [1, 1000, 5, 200_000][step % 4]
}

/// What rank `rank` adds in a step.
fn value(rank: usize, step: usize) -> f32 {
    (1 + rank * 10 + step * 100) as f32
}

fn train(rank: usize) -> Result<(), Failure> {
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, "secret");
    let host = format!("10.0.0.{}", 1 + rank);
    let options = GroupOptions {
        timeout: LIMIT,
        spin: Duration::from_micros(5),
        worker_spin: Duration::ZERO,
        ..GroupOptions::for_local_ranks(1)
    };
    let group = Group::tcp(&rendezvous, &host, rank, WORLD, options);
    let group = group.map_err(|error| Failure::Refused(error, None))?;
    for step in 0..NUM_STEPS {
        // The computation.
        sleep(Duration::from_millis(((rank * 7 + step * 3) % 20) as u64));
        let begin = now();
        let sums = all_reduce(&group, rank, step);
        let took = now() - begin;
        let sums = sums.map_err(|error| Failure::Refused(error, Some(took)))?;
        let expected: f32 = (0..WORLD).map(|rank| value(rank, step)).sum();
        if let Some(wrong) = sums.iter().find(|sum| **sum != expected) {
            return Err(Failure::WrongSum(format!("step {step}: {wrong} instead of {expected}")));
        }
    }
    group.barrier().map(drop).map_err(|error| Failure::Refused(error, None))
}

/// The sum over all ranks; in every second step on the communication thread.
fn all_reduce(group: &Group, rank: usize, step: usize) -> Result<Vec<f32>, CollectiveError> {
    let mut data = vec![value(rank, step); num_elements(step)];
    if step.is_multiple_of(2) {
        group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
        return Ok(data);
    }
    let tensor = Allocator::new().tensor(DType::F32, [data.len()], Category::Gradients)?;
    tensor.write::<f32>()?.copy_from_slice(&data);
    group.all_reduce_async(&tensor, ReduceOp::Sum)?.wait()?;
    data.copy_from_slice(&tensor.read::<f32>()?);
    Ok(data)
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let program = |rank| Program { host: rank, main: Box::new(move || train(rank)) };
    let (ends, _) = run(seed, faults, ALL + pauses(faults), (0..WORLD).map(program).collect());
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    for (rank, end) in ends.iter().enumerate() {
        let (error, took, at) = match end {
            ProcessEnd::Killed | ProcessEnd::Returned(Ok(()), _) => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Err(Failure::WrongSum(wrong)), _) => {
                return Err(format!("rank {rank}: {wrong}"));
            }
            ProcessEnd::Returned(Err(Failure::Refused(error, took)), at) => (error, took, at),
        };
        if !is_killed && are_short(faults) {
            return Err(format!("rank {rank} fails without a reason: {error}"));
        }
        let is_own_clock_right = !faults.iter().any(|fault| match fault.kind {
            ClusterFault::Freeze(_) | ClusterFault::Jump(_) => fault.host == rank,
            kind => matches!(kind, ClusterFault::Suspend(_)),
        });
        if let Some(took) = took.filter(|took| is_own_clock_right && *took > LIMIT + GRACE) {
            return Err(format!("rank {rank} took {took:?}: {error}"));
        }
        if let Some(wrong) = wrongly_blamed(&error.culprits(), (rank, *at), faults, &ends) {
            return Err(format!("rank {rank} blames {wrong}: {error}"));
        }
    }
    Ok(())
}

#[test]
fn sums_are_right_or_errors_say_who_is_missing() {
    explore(WORLD, check);
}
