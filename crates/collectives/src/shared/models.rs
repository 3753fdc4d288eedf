//! Models of how ranks wait for each other, which loom runs in every order of events.
//!
//! Loom runs each model many times, with the ranks interleaved at every atomic access and with every value
//! that the memory orders allow a load to see. Plain data are in cells that report unordered accesses. First all models run
//! with sleep that ends only by being woken, so that a lost wake-up is a deadlock. Models of two ranks then run again with
//! sleep that may end at any time; three ranks do not, since two such sleepers would take turns forever.
//!
//! If a model is too large for all orders, the number of preemptions (interruptions of a rank that could have
//! gone on) is bounded; waiting does not count. `LOOM_MAX_PREEMPTIONS` sets a different bound.

use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

use super::fate::{Fate, WaitError};
use super::mail::{MAX_READY, MailCounts};
use super::phases::{Barrier, WakeUp};
use super::sync::{AtomicU32, Ordering, SLEEP, Sleep};
use crate::context::WaitPolicy;

const PATIENT: WaitPolicy = WaitPolicy { spin: Duration::ZERO, limit: Duration::MAX };
const IMPATIENT: WaitPolicy = WaitPolicy { spin: Duration::ZERO, limit: Duration::ZERO };

/// Plain data that ranks share. Loom reports two accesses that race.
#[derive(Default)]
struct Data(UnsafeCell<u32>);

// SAFETY: loom ends the model if two ranks could use the cell at the same time.
unsafe impl Sync for Data {}
// SAFETY: as for `Sync`.
unsafe impl Send for Data {}

impl Data {
    fn get(&self) -> u32 {
        // SAFETY: loom checks that no other rank writes at the same time.
        self.0.with(|value| unsafe { *value })
    }

    fn set(&self, to: u32) {
        // SAFETY: loom checks that no other rank uses it at the same time.
        self.0.with_mut(|value| unsafe { *value = to });
    }
}

/// Runs a model with `world` ranks on the shared state that `make` creates, in all orders with at most
/// `preemptions` preemptions.
fn check<T: Send + Sync + 'static>(
    world: usize,
    preemptions: Option<usize>,
    make: impl Fn() -> T + Copy + Send + Sync + 'static,
    rank: impl Fn(&T, usize) + Copy + Send + Sync + 'static,
    afterwards: impl Fn(&T) + Copy + Send + Sync + 'static,
) {
    let kinds = [Sleep::UntilWoken, Sleep::AnyTime];
    for sleep in &kinds[..if world == 2 { 2 } else { 1 }] {
        SLEEP.set(*sleep);
        let mut builder = Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(preemptions);
        builder.max_branches = 10_000;
        builder.check(move || {
            let shared = Arc::new(make());
            let others: Vec<_> = (1..world)
                .map(|number| {
                    let shared = shared.clone();
                    thread::spawn(move || rank(&shared, number))
                })
                .collect();
            rank(&shared, 0);
            for other in others {
                other.join().expect("a panic of a rank ends the model itself");
            }
            afterwards(&shared);
        });
    }
}

const MAX_WORLD: usize = 3;
const CHUNKS: u32 = 2;

/// The state that ranks share in the models of rounds of work.
#[derive(Default)]
struct Rounds {
    barrier: Barrier,
    slots: [[Data; MAX_WORLD]; 2],
    chunks: [Data; CHUNKS as usize],
}

impl Rounds {
    /// One round as in an all-reduce: publish, first phase, read what the others published, work, second phase.
    fn work(&self, rank: usize, world: usize, seq: u32) {
        let slots = &self.slots[(seq % 2) as usize];
        slots[rank].set(100 * seq + rank as u32);
        self.barrier.arrive(seq, world);
        self.barrier.wait_present(seq, PATIENT, || None, || false).unwrap();
        for (peer, slot) in slots[..world].iter().enumerate() {
            assert_eq!(slot.get(), 100 * seq + peer as u32);
        }
        while let Some(chunk) = self.barrier.claim_chunk(CHUNKS) {
            let chunk = &self.chunks[chunk as usize];
            chunk.set(chunk.get() + 1);
            self.barrier.complete_chunk(seq, CHUNKS);
        }
        self.barrier.wait_done(seq, PATIENT, || None).unwrap();
        for chunk in &self.chunks {
            assert_eq!(chunk.get(), seq, "a chunk is done once a round, before the second phase");
        }
    }
}

#[test]
fn loom_two_ranks_work_for_two_rounds() {
    let rank = |rounds: &Rounds, rank| (1..=2).for_each(|seq| rounds.work(rank, 2, seq));
    check(2, Some(3), Rounds::default, rank, |_| ());
}

#[test]
fn loom_three_ranks_work_for_one_round() {
    check(3, Some(2), Rounds::default, |rounds, rank| rounds.work(rank, 3, 1), |_| ());
}

#[test]
fn loom_three_ranks_work_for_two_rounds() {
    let rank = |rounds: &Rounds, rank| (1..=2).for_each(|seq| rounds.work(rank, 3, seq));
    check(3, Some(1), Rounds::default, rank, |_| ());
}

#[test]
fn loom_two_ranks_arrive_without_work_for_three_rounds() {
    // Like pieces of staged data: what a rank publishes stays readable for two rounds.
    let rank = |rounds: &Rounds, rank: usize| {
        for seq in 1..=3 {
            let slots = &rounds.slots[(seq % 2) as usize];
            slots[rank].set(100 * seq + rank as u32);
            rounds.barrier.arrive(seq, 2);
            rounds.barrier.wait_present(seq, PATIENT, || None, || false).unwrap();
            assert_eq!(slots[1 - rank].get(), 100 * seq + 1 - rank as u32);
        }
    };
    check(2, Some(3), Rounds::default, rank, |_| ());
}

/// How the first phase ended for each rank: 1 it completed, 2 this rank timed out, 3 another rank timed out.
#[derive(Default)]
struct FirstPhase {
    barrier: Barrier,
    found: [Data; MAX_WORLD],
}

fn arrive(first: &FirstPhase, rank: usize, world: usize, policy: WaitPolicy) {
    first.barrier.arrive(1, world);
    let found = match first.barrier.wait_present(1, policy, || None, || false) {
        Ok(_) => 1,
        Err(WaitError::TimedOut) => 2,
        Err(WaitError::GivenUp) => 3,
        Err(other) => panic!("{other:?}"),
    };
    first.found[rank].set(found);
}

#[test]
fn loom_a_phase_completes_for_all_or_is_given_up_by_all() {
    let impatient_first = |first: &FirstPhase, rank| {
        arrive(first, rank, 2, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(2, None, FirstPhase::default, impatient_first, |first| {
        let found = [first.found[0].get(), first.found[1].get()];
        assert!(matches!(found, [1, 1] | [2, 3]), "{found:?}");
    });
    let impatient = |first: &FirstPhase, rank| arrive(first, rank, 2, IMPATIENT);
    check(2, None, FirstPhase::default, impatient, |first| {
        let found = [first.found[0].get(), first.found[1].get()];
        assert!(matches!(found, [1, 1] | [2, 2] | [2, 3] | [3, 2]), "{found:?}");
    });
}

#[test]
fn loom_a_phase_that_completes_at_the_time_limit_completes_again() {
    let rank = |first: &FirstPhase, rank: usize| {
        arrive(first, rank, 2, if rank == 0 { IMPATIENT } else { PATIENT });
        if first.found[rank].get() == 1 {
            first.barrier.arrive(2, 2);
            first.barrier.wait_present(2, PATIENT, || None, || false).unwrap();
        }
    };
    check(2, Some(3), FirstPhase::default, rank, |_| ());
}

#[test]
fn loom_a_phase_that_is_given_up_wakes_a_sleeper() {
    // A third rank never comes.
    let impatient_first = |first: &FirstPhase, rank| {
        arrive(first, rank, 3, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(2, None, FirstPhase::default, impatient_first, |first| {
        assert_eq!([first.found[0].get(), first.found[1].get()], [2, 3]);
    });
}

/// A first phase that a third rank has left. The alarm reports it.
#[derive(Default)]
struct Left {
    barrier: Barrier,
    alarm: AtomicU32,
    found: [Data; MAX_WORLD],
}

#[test]
fn loom_a_phase_that_is_closed_for_an_alarm_tells_all_its_reason() {
    let gone = WaitError::Gone { peer: 2, fate: Fate::Lost };
    let rank = move |left: &Left, rank: usize| {
        if rank == 0 {
            left.alarm.store(1, Ordering::Release);
        }
        let alarm = || (left.alarm.load(Ordering::Acquire) != 0).then_some(gone);
        left.barrier.arrive(1, 3);
        let found = left.barrier.wait_present(1, PATIENT, alarm, || false).unwrap_err();
        left.found[rank].set(if found == gone { 1 } else { 2 });
    };
    check(2, None, Left::default, rank, |left| {
        assert_eq!([left.found[0].get(), left.found[1].get()], [1, 1]);
    });
}

#[test]
fn loom_a_phase_of_three_ranks_completes_for_all_or_is_given_up_by_all() {
    let impatient_first = |first: &FirstPhase, rank| {
        arrive(first, rank, 3, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(3, Some(2), FirstPhase::default, impatient_first, |first| {
        let found = [0, 1, 2].map(|rank: usize| first.found[rank].get());
        assert!(matches!(found, [1, 1, 1] | [2, 3, 3]), "{found:?}");
    });
}

/// Words whose changes a wake-up announces, and the data that the words stand for.
#[derive(Default)]
struct Announced {
    wake_up: WakeUp,
    words: [AtomicU32; 2],
    data: [Data; 2],
}

#[test]
fn loom_no_wake_up_is_lost() {
    // Two ranks wake the third, which waits for both.
    let rank = |announced: &Announced, rank: usize| {
        if let Some(sender) = rank.checked_sub(1) {
            announced.data[sender].set(7);
            announced.words[sender].store(1, Ordering::Release);
            announced.wake_up.wake();
            return;
        }
        let is_done = || announced.words.iter().all(|word| word.load(Ordering::Acquire) == 1);
        announced.wake_up.wait(PATIENT, is_done, || None, || None, |_| ()).unwrap();
        assert_eq!([0, 1].map(|sender: usize| announced.data[sender].get()), [7, 7]);
    };
    check(3, Some(3), Announced::default, rank, |_| ());
}

/// A mailbox with places for two pieces, the description of the message by each side, and a wake-up per side.
#[derive(Default)]
struct Mailbox {
    counts: MailCounts,
    wake_ups: [WakeUp; 2],
    pieces: [Data; MAX_READY as usize],
    said: [Data; 2],
}

impl Mailbox {
    fn wait(&self, rank: usize, is_done: impl Fn() -> bool) {
        self.wake_ups[rank].wait(PATIENT, is_done, || None, || None, |_| ()).unwrap();
    }

    /// Sends a message of `num_pieces` pieces like `point_to_point.rs`, each piece in its place.
    fn send(&self, number: u32, num_pieces: u32) {
        self.said[0].set(10 * number);
        let message = self.counts.send();
        self.wake_ups[1].wake();
        self.wait(0, || self.counts.is_asked(message));
        assert_eq!(self.said[1].get(), 10 * number + 1);
        loop {
            let (ready, taken) = self.counts.sender_progress(message);
            if taken == num_pieces {
                return;
            }
            if ready == num_pieces || ready - taken == MAX_READY {
                self.wait(0, || {
                    let (ready, taken) = self.counts.sender_progress(message);
                    taken == num_pieces || (ready < num_pieces && ready - taken < MAX_READY)
                });
                continue;
            }
            self.pieces[(ready % MAX_READY) as usize].set(100 * number + ready);
            self.counts.add_ready();
            self.wake_ups[1].wake();
        }
    }

    fn receive(&self, number: u32, num_pieces: u32) {
        self.said[1].set(10 * number + 1);
        let message = self.counts.ask();
        self.wake_ups[0].wake();
        self.wait(1, || self.counts.is_sent(message));
        assert_eq!(self.said[0].get(), 10 * number);
        loop {
            let (ready, taken) = self.counts.receiver_progress(message);
            if taken == num_pieces {
                return;
            }
            if ready == taken {
                self.wait(1, || {
                    let (ready, taken) = self.counts.receiver_progress(message);
                    ready > taken
                });
                continue;
            }
            assert_eq!(self.pieces[(taken % MAX_READY) as usize].get(), 100 * number + taken);
            self.counts.add_taken();
            self.wake_ups[0].wake();
        }
    }
}

#[test]
fn loom_two_messages_of_one_piece_arrive() {
    let rank = |mail: &Mailbox, rank| {
        for number in 1..=2 {
            if rank == 0 { mail.send(number, 1) } else { mail.receive(number, 1) }
        }
    };
    check(2, Some(2), Mailbox::default, rank, |_| ());
}

#[test]
fn loom_a_message_of_three_pieces_arrives() {
    let rank = |mail: &Mailbox, rank| if rank == 0 { mail.send(1, 3) } else { mail.receive(1, 3) };
    check(2, Some(2), Mailbox::default, rank, |_| ());
}
