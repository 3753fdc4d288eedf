//! Messages in a simulated cluster, under faults: each comes whole to the receive with its tag, or an error names a rank that has
//! failed.

#[path = "../../../rendezvous/tests/cluster/excuses.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod excuses;
#[path = "../../../rendezvous/tests/cluster/schedules.rs"]
mod schedules;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use excuses::{are_short, pauses, wrongly_blamed};
use paceline_memory::DType;
use paceline_rendezvous::{PeerListener, Rendezvous, SocketKind, Store};
use paceline_trace::lock;
use paceline_trace::runtime::Condvar;
use paceline_trace::simulation::{FaultOfHost, HostProgram, ProcessEnd, SplitMix, run};
use schedules::explore;

use super::{Mailbox, Message};
use crate::{CollectiveError, RawMemory, Result};

const WORLD: usize = 3;
const LIMIT: Duration = Duration::from_secs(5);
/// The time that the steps of [`talk`] may take together.
const ALL: Duration = Duration::from_secs(60);
const NUM_TAGS: usize = 4;

/// The outcomes of a rank's messages.
#[derive(Default)]
struct Outcomes(Mutex<Vec<Result<usize>>>, Condvar);

#[derive(Debug)]
enum Trouble {
    Refused(CollectiveError),
    Wrong(String),
}

impl<E: Into<CollectiveError>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// The bytes of a message, and how many: few, or more than a socket holds.
fn text(from: usize, to: usize, tag: usize) -> Vec<u8> {
    vec![(1 + from * 50 + to * 10 + tag) as u8; [3, 500_000, 40, 1][tag]]
}

/// Sends each other rank a message for each tag, and receives theirs, in an order of its own.
fn talk(rank: usize, seed: u64) -> std::result::Result<(), Trouble> {
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, "secret");
    let store = Store::open(&rendezvous, rank, WORLD, LIMIT)?;
    let own = format!("10.0.0.{}", 1 + rank);
    let listener = PeerListener::bind(store.key(), Some(&own), rank, WORLD)?;
    let addresses = store.exchange("address", listener.address())?;
    let mailbox = Mailbox::connect(&listener, SocketKind::Tcp, &addresses, rank, &[], LIMIT)?;
    let mut posts = Vec::new();
    for peer in (0..WORLD).filter(|peer| *peer != rank) {
        for tag in 0..NUM_TAGS {
            posts.push((true, peer, tag, text(rank, peer, tag)));
            posts.push((false, peer, tag, vec![0; text(peer, rank, tag).len()]));
        }
    }
    let mut random = SplitMix(seed + rank as u64);
    for at in (1..posts.len()).rev() {
        posts.swap(at, random.below(1 + at as u64) as usize);
    }
    let outcomes = Arc::new(Outcomes::default());
    for (is_send, peer, tag, data) in &mut posts {
        let memory = RawMemory { base: data.as_mut_ptr(), len_bytes: data.len() };
        let (peer, tag) = (Some(*peer), *tag as u64);
        let message = Message { peer, tag, dtype: DType::U8, memory, limit: None };
        let of = outcomes.clone();
        let on_end = move |outcome| {
            lock(&of.0).push(outcome);
            of.1.notify_all();
        };
        // SAFETY: the data live until all messages have ended, for which this waits below.
        unsafe { mailbox.post(*is_send, message, on_end) }?;
    }
    let mut all = lock(&outcomes.0);
    while all.len() < posts.len() {
        all = outcomes.1.wait(&outcomes.0, all, None);
    }
    for outcome in all.drain(..) {
        outcome?;
    }
    for (is_send, peer, tag, data) in &posts {
        if !is_send && *data != text(*peer, rank, *tag) {
            return Err(Trouble::Wrong(format!("tag {tag} of rank {peer}: {:?}", data.first())));
        }
    }
    Ok(())
}

fn check(seed: u64, faults: &[FaultOfHost]) -> std::result::Result<(), String> {
    let program = |rank| HostProgram { host: rank, main: Box::new(move || talk(rank, seed)) };
    let ends = run(seed, faults, ALL + pauses(faults), (0..WORLD).map(program).collect());
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    for (rank, end) in ends.iter().enumerate() {
        let (error, at) = match end {
            ProcessEnd::Killed | ProcessEnd::Returned(Ok(()), _) => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Err(Trouble::Wrong(wrong)), _) => {
                return Err(format!("rank {rank}: {wrong}"));
            }
            ProcessEnd::Returned(Err(Trouble::Refused(error)), at) => (error, at),
        };
        if !is_killed && are_short(faults) {
            return Err(format!("rank {rank} fails without a reason: {error}; all: {ends:?}"));
        }
        if let Some(wrong) = wrongly_blamed(&error.culprits(), (rank, *at), faults, &ends) {
            return Err(format!("rank {rank} blames {wrong}: {error}; all: {ends:?}"));
        }
    }
    Ok(())
}

#[test]
fn messages_come_whole_or_errors_say_who_is_missing() {
    explore(WORLD, check);
}
