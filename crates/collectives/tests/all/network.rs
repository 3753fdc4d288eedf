//! What ranks report when the network between them is slow, falls silent, or is cut.
//!
//! The ranks are threads that meet and connect over TCP through relays. In a silence the peer neither
//! answers nor resets, so only the time limit ends a wait. No test measures time.

use crate::ranks;

use std::time::Duration;

use crate::limit::within_limit;
use crate::relay::{Fault, Link, Net};
use paceline_collectives::{CollectiveError, Group, GroupOptions, ReduceOp};

/// A limit that no test reaches.
const NEVER: Duration = Duration::from_secs(3600);
/// The limit of the waits that meet a silence. The ranks must meet within it too.
const SHORT: Duration = Duration::from_secs(6);
const WORLD: usize = 3;
/// The rank that falls silent.
const AWAY: usize = 1;
/// Elements of a message that is longer than all buffers on its way.
const MANY: usize = 16 << 20;

fn join(
    net: &Net,
    rank: usize,
    world: usize,
    timeout: Duration,
) -> Result<Group, Box<CollectiveError>> {
    let mut options = GroupOptions::for_local_ranks(world);
    options.timeout = timeout;
    Ok(Group::tcp(&net.rendezvous(rank), "127.0.0.1", rank, world, options)?)
}

/// Lets all ranks join a group and do `work`. Returns the outcome of each rank.
fn on_ranks<T: Send>(
    net: &Net,
    world: usize,
    timeout: Duration,
    work: impl Fn(&Group) -> Result<T, CollectiveError> + Sync,
) -> Vec<Result<T, CollectiveError>> {
    ranks::each(0..world, |rank| {
        let group = join(net, rank, world, timeout).map_err(|error| *error)?;
        work(&group)
    })
}

/// Checks that each rank names ranks that it cannot reach, and no others: the silent rank some of the others,
/// and these the silent rank.
#[track_caller]
fn silence_is_named<T: std::fmt::Debug>(outcomes: &[Result<T, CollectiveError>]) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        let error = outcome.as_ref().expect_err("a silence ended well");
        let named = error.culprits();
        let is_beyond = |peer: &usize| (*peer == AWAY) != (rank == AWAY);
        assert!(!named.is_empty(), "rank {rank} names nobody: {error}");
        assert!(named.iter().all(is_beyond), "rank {rank} names {named:?}: {error}");
    }
}

/// Checks that the silent rank names some of the others, and that each of these names the silent rank. In an all-reduce
/// it may also name a rank whose result is missing because that rank waits for the silent one too.
#[track_caller]
fn silence_is_among_the_named<T: std::fmt::Debug>(outcomes: &[Result<T, CollectiveError>]) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        let error = outcome.as_ref().expect_err("a silence ended well");
        let named = error.culprits();
        let is_right = match rank {
            AWAY => !named.is_empty() && !named.contains(&AWAY),
            _ => named.contains(&AWAY),
        };
        assert!(is_right, "rank {rank} names {named:?}: {error}");
    }
}

/// Reduces until that fails.
fn reduce_for_ever(group: &Group) -> Result<(), CollectiveError> {
    let mut data = vec![0f32; 1 << 20];
    loop {
        group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
    }
}

#[test]
fn a_slow_network_changes_no_sum() {
    within_limit(|| {
        let net = Net::new(WORLD);
        let slow = Fault { delay: Duration::from_millis(5), ..Fault::default() };
        (0..WORLD).for_each(|rank| net.set_around(rank, WORLD, slow));
        let outcomes = on_ranks(&net, WORLD, NEVER, |group| {
            for len in [1, 1000, 300_000] {
                let mut data: Vec<f32> =
                    (0..len).map(|i| ((i + group.rank()) % 7) as f32).collect();
                group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
                for (i, sum) in data.iter().enumerate() {
                    let want: usize = (0..WORLD).map(|rank| (i + rank) % 7).sum();
                    assert_eq!(*sum, want as f32, "element {i} of {len}");
                }
            }
            group.barrier()
        });
        for outcome in outcomes {
            outcome.unwrap();
        }
    });
}

/// A check with each number of bytes, all at the same time, since each lasts until its time limit.
fn for_each<const N: usize>(afters: [u64; N], check: impl Fn(u64) + Copy + Send + Sync + 'static) {
    ranks::each(afters, |after| within_limit(move || check(after)));
}

/// A silence that begins on each link of a rank after so many bytes.
fn silence_in_all_reduce(after: u64) {
    within_limit(move || {
        let net = Net::new(WORLD);
        net.set_around(AWAY, WORLD, Fault { silent_after: Some(after), ..Fault::default() });
        silence_is_among_the_named(&on_ranks(&net, WORLD, SHORT, reduce_for_ever));
    });
}

#[test]
fn a_silence_between_all_reduces_is_named_at_the_limit() {
    // Hellos, headers and the data of a few operations have passed.
    silence_in_all_reduce(9 << 20);
}

#[test]
fn a_silence_within_an_all_reduce_is_named_at_the_limit() {
    silence_in_all_reduce(1 << 20);
}

#[test]
fn a_silence_within_a_message_is_named_at_the_limit() {
    within_limit(|| {
        let net = Net::new(2);
        net.set(Link::Pair(1, 0), Fault { silent_after: Some(1 << 20), ..Fault::default() });
        let outcomes = on_ranks(&net, 2, SHORT, |group| {
            let mut data = vec![0f32; MANY];
            match group.rank() {
                0 => group.send_slice(&data, 1),
                _ => group.recv_slice(&mut data, 0),
            }
        });
        // The one that sends awaits nothing, but the other one does not take what it sends.
        silence_is_named(&outcomes);
    });
}

#[test]
fn a_silence_while_ranks_connect_is_named_at_the_limit() {
    // Nothing arrives; a hello arrives and no challenge; a challenge and no proof; a proof and no answer.
    for_each([0, 40, 113, 174], |after| {
        let net = Net::new(WORLD);
        net.set_around(AWAY, WORLD, Fault { silent_after: Some(after), ..Fault::default() });
        silence_is_named(&on_ranks(&net, WORLD, SHORT, |group| group.barrier()));
    });
}

#[test]
fn a_silence_of_the_store_is_named_at_the_limit() {
    // The rank cannot say hello; all until the answer (2223 bytes) has passed, and nothing else does.
    for_each([0, 2223], |after| {
        let net = Net::new(WORLD);
        net.set(Link::Store(AWAY), Fault { silent_after: Some(after), ..Fault::default() });
        silence_is_named(&on_ranks(&net, WORLD, SHORT, |group| group.barrier()));
    });
}

#[test]
fn a_connection_that_is_cut_is_named_without_a_limit() {
    for_each([1 << 20, 6 << 20], |after| {
        let net = Net::new(2);
        net.set(Link::Pair(1, 0), Fault { cut_after: Some(after), ..Fault::default() });
        silence_is_named(&on_ranks(&net, 2, NEVER, reduce_for_ever));
    });
}
