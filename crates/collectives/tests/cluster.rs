//! Ranks train in a simulated cluster, under faults: no sum is wrong, no operation takes longer than its limit, and errors name
//! ranks that have failed.

#[path = "../../rendezvous/tests/cluster/excuses.rs"]
mod excuses;
#[path = "../../rendezvous/tests/cluster/schedules.rs"]
mod schedules;

use std::time::Duration;

use excuses::{are_short, is_clock_right, pauses, wrongly_blamed};
use paceline_collectives::{
    Algorithm, CollectiveError, Group, GroupOptions, Meeting, Member, ReduceOp, Rendezvous,
};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_rendezvous::Store;
use paceline_trace::runtime::{before_join, now, sleep};
use paceline_trace::simulation::{
    ClusterFault, FaultOfHost, HostProgram, ProcessEnd, SplitMix, run,
};
use paceline_trace::thread_builder;
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
    /// With the operation's time, if the group has formed.
    Refused(CollectiveError, Option<Duration>),
    Wrong(String),
}

/// A rank that does not do as the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Odd {
    /// It leaves the group before a step.
    Leaves,
    /// In a step, it has another number of elements.
    OtherLength,
}

/// A run: the algorithm of all-reduces, whether some are larger than what sockets hold, a rank that computes for so long before
/// some operations, and an odd rank, with the step in which it is odd.
#[derive(Clone, Copy, Debug)]
struct Script {
    algorithm: Algorithm,
    is_large: bool,
    slow: (usize, Duration),
    odd: Option<(usize, usize, Odd)>,
}

impl Script {
    fn of(seed: u64) -> Self {
        let mut random = SplitMix(seed ^ 0x0DD);
        let algorithm = [Algorithm::Direct, Algorithm::Ring][random.below(2) as usize];
        let at = [WORLD, NUM_STEPS].map(|of| random.below(of as u64) as usize);
        let odd = match random.below(8) {
            0 => Some((at[0], at[1], Odd::Leaves)),
            1 => Some((at[0], at[1], Odd::OtherLength)),
            _ => None,
        };
        let is_large = random.below(4) == 0;
        let most = [50, 4000][usize::from(random.below(4) == 0)];
        let slow = (at[0], Duration::from_millis(random.below(most)));
        Self { algorithm, is_large, slow, odd }
    }

    fn is_odd(&self, rank: usize, step: usize, how: Odd) -> bool {
        self.odd == Some((rank, step, how))
    }

    /// The elements of a step: few, many, and more than fit into one block of a share.
    fn num_elements(&self, step: usize) -> usize {
        let many = if self.is_large { 1_000_000 } else { 60_000 };
        [1, 1000, 50, many, 7, 300][step % 6]
    }

    /// The time for which a rank computes before it submits an operation of a kind that waits for that.
    fn delay(&self, rank: usize) -> Duration {
        if self.slow.0 == rank { self.slow.1 } else { Duration::ZERO }
    }
}

/// How many times a rank may wait in a step, for operations and for a slow rank.
fn num_waits(step: usize) -> u32 {
    [1, 5, 1, 1, 1, 4][step % 6]
}

/// The data of a rank in a step.
fn value(rank: usize, step: usize) -> f32 {
    (1 + rank * 10 + step * 100) as f32
}

fn train(rank: usize, script: Script) -> Result<(), Failure> {
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, "secret");
    let host = format!("10.0.0.{}", 1 + rank);
    let options = GroupOptions {
        timeout: LIMIT,
        spin: Duration::from_micros(5),
        worker_spin: Duration::ZERO,
        algorithm: script.algorithm,
        ..GroupOptions::for_local_ranks(1)
    };
    let group = Group::tcp(&rendezvous, &host, rank, WORLD, options);
    let group = group.map_err(|error| Failure::Refused(error, None))?;
    for step in 0..NUM_STEPS {
        // The computation.
        sleep(Duration::from_millis(((rank * 7 + step * 3) % 20) as u64));
        if script.is_odd(rank, step, Odd::Leaves) {
            return Ok(());
        }
        let more = usize::from(script.is_odd(rank, step, Odd::OtherLength));
        let begin = now();
        let outcome = exchange(&group, script, step, script.num_elements(step) + more);
        let took = (now() - begin).saturating_sub(LIMIT * (num_waits(step) - 1));
        let (data, expected) = outcome.map_err(|error| Failure::Refused(error, Some(took)))?;
        if let Some(wrong) = data.iter().find(|value| **value != expected) {
            return Err(Failure::Wrong(format!("step {step}: {wrong} instead of {expected}")));
        }
    }
    let begin = now();
    let outcome = group.barrier().map(drop);
    outcome.map_err(|error| Failure::Refused(error, Some(now() - begin)))
}

/// The operation of a step. Returns its result, and the value that all elements should have.
fn exchange(
    group: &Group,
    script: Script,
    step: usize,
    num: usize,
) -> Result<(Vec<f32>, f32), CollectiveError> {
    let rank = group.rank();
    let mut data = vec![value(rank, step); num];
    let sum = (0..WORLD).map(|rank| value(rank, step)).sum();
    let allocator = Allocator::new();
    let tensor = |data: &[f32]| {
        let tensor = allocator.tensor(DType::F32, [data.len()], Category::Gradients)?;
        tensor.write::<f32>()?.copy_from_slice(data);
        Ok::<_, CollectiveError>(tensor)
    };
    match step % 6 {
        0 | 3 => group.all_reduce_slice(&mut data, ReduceOp::Sum)?,
        // Two at once, on the communication thread, and a blocking one that waits for its turn.
        1 => {
            let (first, second) = (tensor(&data)?, tensor(&data)?);
            let work = [&first, &second].map(|of| {
                sleep(script.delay(rank));
                group.all_reduce_async(of, ReduceOp::Sum)
            });
            let mut third = vec![value(rank, step); 3];
            group.all_reduce_slice(&mut third, ReduceOp::Sum)?;
            for work in work {
                work?.wait()?;
            }
            let both = [&first.read::<f32>()?[..], &second.read::<f32>()?[..], &third].concat();
            return Ok((both, sum));
        }
        5 => {
            let first = tensor(&data)?;
            reduce_both(group, script.delay(rank), &first, &mut data)?;
            return Ok(([&first.read::<f32>()?[..], &data].concat(), sum));
        }
        2 => {
            group.broadcast_slice(&mut data, step % WORLD)?;
            return Ok((data, value(step % WORLD, step)));
        }
        _ => {
            let (next, before) = ((rank + 1) % WORLD, (rank + WORLD - 1) % WORLD);
            let (own, received) = (tensor(&data)?, tensor(&data)?);
            group.send_recv(&own, next, &received, before)?;
            return Ok((received.read::<f32>()?.to_vec(), value(before, step)));
        }
    };
    Ok((data, sum))
}

/// One all-reduce while another thread is in a blocking one. Both are the same, so their order does not matter.
fn reduce_both(
    group: &Group,
    delay: Duration,
    first: &Tensor,
    second: &mut [f32],
) -> Result<(), CollectiveError> {
    std::thread::scope(|scope| {
        let blocking = || {
            sleep(delay);
            group.all_reduce_slice(second, ReduceOp::Sum)
        };
        let other = thread_builder("other").spawn_scoped(scope, blocking);
        let other = other.expect("the system has room for a thread");
        sleep(Duration::from_millis(5));
        let ended = group.all_reduce_async(first, ReduceOp::Sum).and_then(|of| of.wait());
        before_join(other.thread());
        other.join().expect("an operation does not panic").and(ended).map(drop)
    })
}

/// The rank that was killed, if no other fault can be the reason for an error.
fn only_death(ends: &[ProcessEnd<Result<(), Failure>>], faults: &[FaultOfHost]) -> Option<usize> {
    let killed = ends.iter().position(|end| matches!(end, ProcessEnd::Killed))?;
    let is_alone = |fault: &FaultOfHost| match fault.kind {
        ClusterFault::Kill => fault.host == killed,
        ClusterFault::Freeze | ClusterFault::Cut => false,
        ClusterFault::Suspend | ClusterFault::Jump | ClusterFault::Slow => true,
    };
    faults.iter().all(is_alone).then_some(killed)
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let script = Script::of(seed);
    let program = |rank| HostProgram { host: rank, main: Box::new(move || train(rank, script)) };
    let ends = run(seed, faults, ALL + pauses(faults), (0..WORLD).map(program).collect());
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    let is_quiet = !is_killed && are_short(faults);
    let odd = script.odd.map(|(rank, ..)| rank);
    for (rank, end) in ends.iter().enumerate() {
        let (error, took, at) = match end {
            ProcessEnd::Returned(Ok(()), _) if is_quiet && odd.is_some_and(|odd| odd != rank) => {
                return Err(format!("rank {rank} sees nothing of {script:?}"));
            }
            ProcessEnd::Killed | ProcessEnd::Returned(Ok(()), _) => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Err(Failure::Wrong(wrong)), _) => {
                return Err(format!("rank {rank}: {wrong}"));
            }
            ProcessEnd::Returned(Err(Failure::Refused(error, took)), at) => (error, took, at),
        };
        let fails =
            |how: &str| Err(format!("rank {rank} {how} ({script:?}): {error}; all: {ends:?}"));
        let mut culprits = error.culprits();
        match only_death(&ends, faults) {
            _ if is_quiet && odd.is_none() => return fails("fails without a reason"),
            Some(dead) if took.is_some() && odd.is_none() && culprits != [dead] => {
                return fails("blames another than the dead rank");
            }
            _ => {}
        }
        if let CollectiveError::Mismatch { rank, peer, .. } = error
            && !odd.is_some_and(|odd| [*rank, *peer].contains(&odd))
        {
            return fails("finds a mismatch elsewhere");
        }
        if took.is_some_and(|took| took > LIMIT + GRACE) && is_clock_right(rank, faults) {
            return fails(&format!("took {took:?}"));
        }
        if let CollectiveError::PeerLost { peer, .. } = error
            && matches!(ends[*peer], ProcessEnd::Returned(..))
            && took.is_some()
            && are_short(faults)
        {
            return fails("takes a rank that only gave up for dead");
        }
        culprits.retain(|culprit| odd != Some(*culprit));
        if let Some(wrong) = wrongly_blamed(&culprits, (rank, *at), faults, &ends) {
            return fails(&format!("blames {wrong}"));
        }
    }
    Ok(())
}

#[test]
fn sums_are_right_or_errors_say_who_is_missing() {
    explore(WORLD, check);
}

/// Ranks of one host form a group and a mailbox through a store, while some are slower than others.
fn form(rank: usize, seed: u64) -> Result<(), CollectiveError> {
    let store =
        Store::open(&Rendezvous::by_tcp("127.0.0.1", 29_500, "secret"), rank, WORLD, LIMIT)?;
    let mut random = SplitMix(seed ^ (rank as u64) << 32);
    let mut exchange = |name: &str, own: String| {
        let all = store.exchange(name, &own).map_err(|error| error.to_string());
        sleep(Duration::from_nanos(random.time_ns(100_000_000)));
        all
    };
    let member = Member { rank, world_size: WORLD, names: Vec::new() };
    let meeting = Meeting { exchange: &mut exchange, server: None, over: None };
    let options = |local| GroupOptions {
        timeout: LIMIT,
        spin: Duration::from_micros(5),
        worker_spin: Duration::ZERO,
        ..GroupOptions::for_local_ranks(local)
    };
    let (group, _mailbox, _) = Group::from_store(member, meeting, options)?;
    group.barrier().map(drop)
}

#[test]
fn a_group_and_its_mailbox_form_while_ranks_are_slow() {
    // SAFETY: no other code of this program writes variables, and only Rust's own code reads them, which locks them.
    unsafe { std::env::set_var("PACELINE_TRANSPORT", "tcp") };
    explore(1, |seed, faults| {
        let is_harmless =
            |of: &&FaultOfHost| matches!(of.kind, ClusterFault::Suspend | ClusterFault::Jump);
        let faults: Vec<FaultOfHost> = faults.iter().filter(is_harmless).copied().collect();
        let program = |rank| HostProgram { host: 0, main: Box::new(move || form(rank, seed)) };
        let ends = run(seed, &faults, ALL + pauses(&faults), (0..WORLD).map(program).collect());
        let have_formed = ends.iter().all(|end| matches!(end, ProcessEnd::Returned(Ok(()), _)));
        if have_formed { Ok(()) } else { Err(format!("not all have formed a group: {ends:?}")) }
    });
}
