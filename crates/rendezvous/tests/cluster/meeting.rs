//! Ranks find each other: nobody waits beyond its limit, those who meet agree, and errors name ranks that have failed.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use paceline_rendezvous::{PeerListener, Rendezvous, RendezvousError, SocketKind, Store};
use paceline_trace::runtime::{connect_tcp, now, sleep};
use paceline_trace::simulation::{
    ClusterFault, FaultOfHost, HostProgram, ProcessEnd, SplitMix, run,
};

use crate::excuses::{are_short, interruptions, is_clock_right, pauses, wrongly_blamed};
use crate::schedules::explore;

pub const WORLD: usize = 4;
pub const LIMIT: Duration = Duration::from_secs(10);
/// How much longer than its limit a rank may wait for the answer of a store.
const GRACE: Duration = Duration::from_secs(6);
/// The time that the steps of [`meet`] may take together.
pub const ALL: Duration = Duration::from_secs(80);

/// Rank and number of restarts of all, or how a step has failed.
pub type Met = Result<Vec<(usize, usize)>, Failure>;

/// The name of a step, its error, and the time that it has taken.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    step: &'static str,
    pub error: RendezvousError,
    took: Duration,
}

/// What a rank does to find the others after so many restarts: meets them, exchanges addresses, and connects.
pub fn meet(rank: usize, restarts: usize, limit: Duration) -> Met {
    let secret = Rendezvous::secret_of_restart("secret", restarts);
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, secret);
    let rendezvous = rendezvous.started_by(&format!("launcher {rank}"), rank);
    let store = timed("open", || Store::open(&rendezvous, rank, WORLD, limit))?;
    let own = format!("10.0.0.{}", 1 + rank);
    let listener = timed("listen", || PeerListener::bind(store.key(), Some(&own), rank, WORLD))?;
    let addresses = timed("exchange", || store.exchange("address", listener.address()))?;
    let peers: Vec<usize> = (0..WORLD).filter(|peer| *peer != rank).collect();
    let network = SocketKind::Tcp;
    let connect = || listener.connect::<2>(network, &addresses, rank, &peers, limit, |_, _| {});
    let sockets = timed("connect", connect)?;
    assert!((0..WORLD).all(|peer| (peer == rank) == sockets[peer].is_none()));
    let all = timed("exchange", || store.exchange("number", &(rank, restarts)))?;
    // The store goes with the process of rank 0, so that leaves last, perhaps before its answer to this has come.
    let _ = store.set(&format!("done/{rank}"), &[]);
    for peer in peers.iter().filter(|_| rank == 0) {
        timed("end", || store.get(&format!("done/{peer}")))?;
    }
    Ok(all)
}

fn timed<T>(
    step: &'static str,
    work: impl FnOnce() -> Result<T, RendezvousError>,
) -> Result<T, Failure> {
    let begin = now();
    work().map_err(|error| Failure { step, error, took: now() - begin })
}

/// The limit of a rank: some give up a little earlier than others.
fn limit_of(rank: usize, seed: u64) -> Duration {
    let mut random = SplitMix(seed + rank as u64);
    LIMIT - Duration::from_millis(random.below(2000))
}

/// Somebody else connects to the store again and again, and says nothing or something else than a rank.
fn disturb(seed: u64) -> Met {
    let words = [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"pacelin3", b"pacelin3 and too little"];
    for at in seed..seed + 12 {
        let store = ([10, 0, 0, 1], 29_500).into();
        if let Ok(socket) = connect_tcp(store, Duration::from_secs(1)) {
            let _ = UnixStream::from(socket).write_all(words[at as usize % words.len()]);
            sleep(Duration::from_millis(at % 7 * 100));
        }
        sleep(Duration::from_millis(3));
    }
    Ok(Vec::new())
}

fn meeting(seed: u64, faults: &[FaultOfHost]) -> Vec<ProcessEnd<Met>> {
    let program = |rank| HostProgram {
        host: rank,
        main: Box::new(move || meet(rank, 0, limit_of(rank, seed))),
    };
    let stranger: HostProgram<Met> =
        HostProgram { host: WORLD, main: Box::new(move || disturb(seed)) };
    let programs =
        (0..WORLD).map(program).chain(seed.is_multiple_of(3).then_some(stranger)).collect();
    let mut ends = run(seed, faults, ALL + pauses(faults), programs);
    ends.truncate(WORLD);
    ends
}

/// Whether a rank rightly waits for others at its listener, so that it has indeed not come to the last exchange (seed 1010).
fn waits_itself(rank: usize, faults: &[FaultOfHost], ends: &[ProcessEnd<Met>]) -> bool {
    let ProcessEnd::Returned(Err(Failure { step: "connect", error, .. }), at) = &ends[rank] else {
        return false;
    };
    let RendezvousError::Failed { missing, .. } = error else { return false };
    wrongly_blamed(missing, (rank, *at), faults, ends).is_none()
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let ends = meeting(seed, faults);
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    let expected: Vec<(usize, usize)> = (0..WORLD).map(|rank| (rank, 0)).collect();
    for (rank, end) in ends.iter().enumerate() {
        let (Failure { step, error, took }, at) = match end {
            ProcessEnd::Killed => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Ok(numbers), _) if *numbers == expected => continue,
            ProcessEnd::Returned(Ok(numbers), _) => {
                return Err(format!("rank {rank} has {numbers:?}"));
            }
            ProcessEnd::Returned(Err(failure), at) => (failure, at),
        };
        let fails =
            |how: &str| Err(format!("rank {rank} {how} after {took:?}: {error}; all: {ends:?}"));
        if !is_killed && are_short(faults) {
            return fails("fails without a reason");
        }
        if is_clock_right(rank, faults) && *took > LIMIT + GRACE {
            return fails("waits too long");
        }
        let RendezvousError::Failed { missing, .. } = error else {
            return fails("has another error");
        };
        if missing.is_empty() && *step != "end" {
            return fails("names nobody");
        }
        // At the store, no rank is blamed that came and gave up, unless this one was away, or others came when it had gone.
        let are_in_time = interruptions(faults) < limit_of(rank, seed) - Duration::from_secs(2);
        let is_told = *step == "open" && are_in_time && is_clock_right(rank, faults);
        let since = if is_told { at.saturating_sub(*took) } else { *at };
        let mut missing = missing.clone();
        missing.retain(|of| *step != "exchange" || !waits_itself(*of, faults, &ends));
        if let Some(wrong) = wrongly_blamed(&missing, (rank, since), faults, &ends) {
            return fails(&format!("blames {wrong}"));
        }
    }
    Ok(())
}

#[test]
fn ranks_meet_or_say_who_is_missing() {
    explore(WORLD, check);
}

#[test]
fn a_seed_stands_for_one_schedule() {
    let fault =
        |at, host, kind| FaultOfHost { at: Duration::from_millis(at), host, kind, time: LIMIT };
    let faults = [fault(3, 2, ClusterFault::Kill), fault(9, 1, ClusterFault::Cut)];
    let [first, again, other] = [7, 7, 8].map(|seed| meeting(seed, &faults));
    assert_eq!(first, again);
    assert_ne!(first, other);
}
