//! Ranks find each other: nobody waits beyond its limit, those who meet agree, and errors name ranks that have failed.

use std::time::Duration;

use paceline_rendezvous::{PeerListener, Rendezvous, RendezvousError, SocketKind, Store};
use paceline_trace::simulation::{ClusterFault, FaultOfHost, ProcessEnd, Program, run};

use crate::excuses::{are_short, pauses, wrongly_blamed};
use crate::schedules::explore;

pub const WORLD: usize = 4;
pub const LIMIT: Duration = Duration::from_secs(10);
/// The time that the steps of [`meet`] may take together.
pub const ALL: Duration = Duration::from_secs(80);

pub type Met = Result<Vec<(usize, usize)>, RendezvousError>;

/// What a rank does to find the others after so many restarts: meets them, exchanges addresses, and connects. Returns rank
/// and number of restarts of all.
pub fn meet(rank: usize, restarts: usize) -> Met {
    let secret = Rendezvous::secret_of_restart("secret", restarts);
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, secret);
    let rendezvous = rendezvous.started_by(&format!("launcher {rank}"), rank);
    let store = Store::open(&rendezvous, rank, WORLD, LIMIT)?;
    let own = format!("10.0.0.{}", 1 + rank);
    let listener = PeerListener::bind(store.key(), Some(&own), rank, WORLD)?;
    let addresses = store.exchange("address", listener.address())?;
    let peers: Vec<usize> = (0..WORLD).filter(|peer| *peer != rank).collect();
    let sockets =
        listener.connect::<2>(SocketKind::Tcp, &addresses, rank, &peers, LIMIT, |_, _| {})?;
    let all = store.exchange("number", &(rank, restarts))?;
    // The store goes with the process of rank 0, so that leaves last, perhaps before its answer to this has come.
    let _ = store.set(&format!("done/{rank}"), &[]);
    for peer in peers.iter().filter(|_| rank == 0) {
        store.get(&format!("done/{peer}"))?;
    }
    assert!((0..WORLD).all(|peer| (peer == rank) == sockets[peer].is_none()));
    Ok(all)
}

fn meeting(seed: u64, faults: &[FaultOfHost]) -> (Vec<ProcessEnd<Met>>, u64) {
    let process = |rank| Program { host: rank, main: Box::new(move || meet(rank, 0)) };
    run(seed, faults, ALL + pauses(faults), (0..WORLD).map(process).collect())
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let (ends, _) = meeting(seed, faults);
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    let expected: Vec<(usize, usize)> = (0..WORLD).map(|rank| (rank, 0)).collect();
    for (rank, end) in ends.iter().enumerate() {
        match end {
            ProcessEnd::Killed => {}
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Ok(numbers), _) if *numbers == expected => {}
            ProcessEnd::Returned(Ok(numbers), _) => {
                return Err(format!("rank {rank} has {numbers:?}"));
            }
            ProcessEnd::Returned(Err(error), _) if !is_killed && are_short(faults) => {
                return Err(format!("rank {rank} fails without a reason: {error}"));
            }
            ProcessEnd::Returned(Err(error), at) => {
                let RendezvousError::Failed { missing, .. } = error else {
                    return Err(format!("rank {rank}: {error}"));
                };
                if let Some(wrong) = wrongly_blamed(missing, (rank, *at), faults, &ends) {
                    return Err(format!("rank {rank} blames {wrong}: {error}"));
                }
            }
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
    let fault = |at, host, kind| FaultOfHost { at: Duration::from_millis(at), host, kind };
    let faults = [fault(3, 2, ClusterFault::Kill), fault(9, 1, ClusterFault::Cut(LIMIT))];
    let [first, again, other] = [7, 7, 8].map(|seed| meeting(seed, &faults));
    assert_eq!(first, again);
    assert_ne!(first.1, other.1);
}
