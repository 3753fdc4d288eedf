//! Messages in a simulated cluster, under faults: each comes whole to the receive with its tag, or an error names a rank that has
//! failed or left.

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
use paceline_trace::runtime::{Condvar, sleep};
use paceline_trace::simulation::{FaultOfHost, HostProgram, ProcessEnd, SplitMix, run};
use schedules::explore;

use super::{Mailbox, Message};
use crate::{CollectiveError, RawMemory, Result};

const WORLD: usize = 3;
const LIMIT: Duration = Duration::from_secs(10);
/// Of a long message, at its sender.
const SEND_LIMIT: Duration = Duration::from_secs(4);
/// The time that the steps of [`talk`] may take together.
const ALL: Duration = Duration::from_secs(60);
const NUM_TAGS: usize = 4;

/// The outcomes of a rank's messages.
#[derive(Default)]
struct Outcomes(Mutex<Vec<(usize, Result<usize>)>>, Condvar);

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
    vec![(1 + from * 50 + to * 10 + tag) as u8; [3, 3_000_000, 40, 1][tag]]
}

/// The messages of a run, by sender, receiver and tag: for each tag one of each rank to each other one, or of one rank only.
fn messages(seed: u64) -> Vec<(usize, usize, usize)> {
    let pairs = (0..WORLD).flat_map(|from| (0..WORLD).map(move |to| (from, to)));
    let mut pairs: Vec<_> = pairs.filter(|(from, to)| from != to).collect();
    let only = SplitMix(seed ^ 0x3355).below(2 * pairs.len() as u64) as usize;
    pairs = pairs.get(only).map_or(pairs.clone(), |pair| vec![*pair]);
    pairs.into_iter().flat_map(|(from, to)| (0..NUM_TAGS).map(move |tag| (from, to, tag))).collect()
}

/// In some runs, a rank that leaves after so many messages.
fn early_leaver(seed: u64) -> Option<(usize, usize)> {
    let mut random = SplitMix(seed ^ 0xEA51);
    let [is_early, rank, num] = [4, WORLD, 4 * NUM_TAGS].map(|of| random.below(of as u64) as usize);
    (is_early == 0).then_some((rank, num))
}

/// Sends and receives a rank's messages, in an order of its own.
fn talk(rank: usize, seed: u64) -> std::result::Result<(), Trouble> {
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, "secret");
    let store = Store::open(&rendezvous, rank, WORLD, LIMIT)?;
    let own = format!("10.0.0.{}", 1 + rank);
    let listener = PeerListener::bind(store.key(), Some(&own), rank, WORLD)?;
    let addresses = store.exchange("address", listener.address())?;
    let mailbox = Mailbox::connect(&listener, SocketKind::Tcp, &addresses, rank, &[], LIMIT)?;
    let mut posts = Vec::new();
    for (from, to, tag) in messages(seed) {
        let data = text(from, to, tag);
        if from == rank {
            posts.push((true, to, tag, data));
        } else if to == rank {
            posts.push((false, from, tag, vec![0; data.len()]));
        }
    }
    let mut random = SplitMix(seed + rank as u64);
    for at in (1..posts.len()).rev() {
        posts.swap(at, random.below(1 + at as u64) as usize);
    }
    let early = early_leaver(seed).filter(|(leaver, _)| *leaver == rank);
    posts.truncate(early.map_or(posts.len(), |(_, num)| num));
    let outcomes = Arc::new(Outcomes::default());
    for (at, (is_send, peer, tag, data)) in posts.iter_mut().enumerate() {
        sleep(Duration::from_nanos(random.time_ns(50_000_000)));
        let memory = RawMemory { base: data.as_mut_ptr(), len_bytes: data.len() };
        let limit = (*is_send && *tag == 1).then_some(SEND_LIMIT);
        let (peer, tag) = (Some(*peer), *tag as u64);
        let message = Message { peer, tag, dtype: DType::U8, memory, limit };
        let of = outcomes.clone();
        let on_end = move |outcome| {
            lock(&of.0).push((at, outcome));
            of.1.notify_all();
        };
        // SAFETY: the data live until all messages have ended, for which this waits below.
        unsafe { mailbox.post(*is_send, message, on_end) }?;
    }
    if early.is_some() {
        drop(mailbox);
        return Ok(());
    }
    let mut all = lock(&outcomes.0);
    while all.len() < posts.len() {
        all = outcomes.1.wait(&outcomes.0, all, None);
    }
    for (at, outcome) in all.iter() {
        let (is_send, peer, tag, data) = &posts[*at];
        if !is_send && outcome.is_ok() && *data != text(*peer, rank, *tag) {
            return Err(Trouble::Wrong(format!("tag {tag} of rank {peer}: {:?}", data.first())));
        }
    }
    all.drain(..).try_for_each(|(_, outcome)| Ok(outcome.map(drop)?))
}

fn check(seed: u64, faults: &[FaultOfHost]) -> std::result::Result<(), String> {
    let program = |rank| HostProgram { host: rank, main: Box::new(move || talk(rank, seed)) };
    let ends = run(seed, faults, ALL + pauses(faults), (0..WORLD).map(program).collect());
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    let early = early_leaver(seed).map(|(rank, _)| rank);
    for (rank, end) in ends.iter().enumerate() {
        let (error, at) = match end {
            ProcessEnd::Killed | ProcessEnd::Returned(Ok(()), _) => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Err(Trouble::Wrong(wrong)), _) => {
                return Err(format!("rank {rank}: {wrong}"));
            }
            ProcessEnd::Returned(Err(Trouble::Refused(error)), at) => (error, at),
        };
        if !is_killed && early.is_none() && are_short(faults) {
            return Err(format!("rank {rank} fails without a reason: {error}; all: {ends:?}"));
        }
        if let CollectiveError::PeerLost { peer, .. } = error
            && matches!(ends[*peer], ProcessEnd::Returned(..))
            && are_short(faults)
        {
            return Err(format!("rank {rank}: {error}, which has left in order; all: {ends:?}"));
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
