//! Models of how ranks wait for each other, which loom runs in every order of events.
//!
//! Loom runs each model many times, with the ranks interleaved at every atomic access and with every value
//! that the memory orders allow a load to see. Plain data are in cells that report an access that is not
//! ordered after another rank's access. First all models run with sleep that ends only by being woken, so
//! that a lost wake-up is a deadlock. Models of two ranks then run again with sleep that may end at any time.
//! Models of three ranks do not, since two such sleepers would take turns forever.
//!
//! If a model is too large for all orders, the number of preemptions (interruptions of a rank that could have
//! gone on) is bounded; waiting does not count. `LOOM_MAX_PREEMPTIONS` sets a different bound.

use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

use super::fate::WaitError;
use super::gates::{Bell, Gates};
use super::mail::{Counts, MAX_READY};
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
const UNITS: u32 = 2;

/// The state that ranks share in the models of rounds of work.
#[derive(Default)]
struct Room {
    gates: Gates,
    slots: [[Data; MAX_WORLD]; 2],
    units: [Data; UNITS as usize],
}

impl Room {
    /// One round as in an all-reduce: publish, meet, read what the others published, work, meet.
    fn work(&self, rank: usize, world: usize, seq: u32) {
        let slots = &self.slots[(seq % 2) as usize];
        slots[rank].set(100 * seq + rank as u32);
        self.gates.arrive(seq, world);
        self.gates.wait_present(seq, PATIENT, || None, || false).unwrap();
        for (peer, slot) in slots[..world].iter().enumerate() {
            assert_eq!(slot.get(), 100 * seq + peer as u32);
        }
        while let Some(unit) = self.gates.claim_unit(UNITS) {
            let unit = &self.units[unit as usize];
            unit.set(unit.get() + 1);
            self.gates.complete_unit(seq, UNITS);
        }
        self.gates.wait_done(seq, PATIENT, || None).unwrap();
        for unit in &self.units {
            assert_eq!(unit.get(), seq, "a unit is done once a round, and before the second gate");
        }
    }
}

#[test]
fn loom_two_ranks_work_for_two_rounds() {
    let rank = |room: &Room, rank| (1..=2).for_each(|seq| room.work(rank, 2, seq));
    check(2, Some(3), Room::default, rank, |_| ());
}

#[test]
fn loom_three_ranks_work_for_one_round() {
    check(3, Some(2), Room::default, |room, rank| room.work(rank, 3, 1), |_| ());
}

#[test]
fn loom_three_ranks_work_for_two_rounds() {
    let rank = |room: &Room, rank| (1..=2).for_each(|seq| room.work(rank, 3, seq));
    check(3, Some(1), Room::default, rank, |_| ());
}

#[test]
fn loom_two_ranks_meet_without_work_for_three_rounds() {
    // Like pieces of staged data: what a rank publishes in a round stays readable until it is overwritten two
    // rounds later.
    let rank = |room: &Room, rank: usize| {
        for seq in 1..=3 {
            let slots = &room.slots[(seq % 2) as usize];
            slots[rank].set(100 * seq + rank as u32);
            room.gates.arrive(seq, 2);
            room.gates.wait_present(seq, PATIENT, || None, || false).unwrap();
            assert_eq!(slots[1 - rank].get(), 100 * seq + 1 - rank as u32);
        }
    };
    check(2, Some(3), Room::default, rank, |_| ());
}

/// The result of each rank at the first gate: 1 all met, 2 this rank timed out, 3 another rank timed out.
#[derive(Default)]
struct Meeting {
    gates: Gates,
    found: [Data; MAX_WORLD],
}

fn meet(meeting: &Meeting, rank: usize, world: usize, policy: WaitPolicy) {
    meeting.gates.arrive(1, world);
    let found = match meeting.gates.wait_present(1, policy, || None, || false) {
        Ok(_) => 1,
        Err(WaitError::TimedOut) => 2,
        Err(WaitError::GivenUp) => 3,
        Err(other) => panic!("{other:?}"),
    };
    meeting.found[rank].set(found);
}

#[test]
fn loom_a_gate_opens_for_all_or_is_given_up_by_all() {
    let impatient_first = |meeting: &Meeting, rank| {
        meet(meeting, rank, 2, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(2, None, Meeting::default, impatient_first, |meeting| {
        let found = [meeting.found[0].get(), meeting.found[1].get()];
        assert!(matches!(found, [1, 1] | [2, 3]), "{found:?}");
    });
    let impatient = |meeting: &Meeting, rank| meet(meeting, rank, 2, IMPATIENT);
    check(2, None, Meeting::default, impatient, |meeting| {
        let found = [meeting.found[0].get(), meeting.found[1].get()];
        assert!(matches!(found, [1, 1] | [2, 2] | [2, 3] | [3, 2]), "{found:?}");
    });
}

#[test]
fn loom_a_gate_that_opens_at_the_end_of_the_time_opens_again() {
    let rank = |meeting: &Meeting, rank: usize| {
        meet(meeting, rank, 2, if rank == 0 { IMPATIENT } else { PATIENT });
        if meeting.found[rank].get() == 1 {
            meeting.gates.arrive(2, 2);
            meeting.gates.wait_present(2, PATIENT, || None, || false).unwrap();
        }
    };
    check(2, Some(3), Meeting::default, rank, |_| ());
}

#[test]
fn loom_a_gate_that_is_given_up_wakes_a_sleeper() {
    // A third rank never comes.
    let impatient_first = |meeting: &Meeting, rank| {
        meet(meeting, rank, 3, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(2, None, Meeting::default, impatient_first, |meeting| {
        assert_eq!([meeting.found[0].get(), meeting.found[1].get()], [2, 3]);
    });
}

#[test]
fn loom_a_gate_among_three_opens_for_all_or_is_given_up_by_all() {
    let impatient_first = |meeting: &Meeting, rank| {
        meet(meeting, rank, 3, if rank == 0 { IMPATIENT } else { PATIENT });
    };
    check(3, Some(2), Meeting::default, impatient_first, |meeting| {
        let found = [0, 1, 2].map(|rank: usize| meeting.found[rank].get());
        assert!(matches!(found, [1, 1, 1] | [2, 3, 3]), "{found:?}");
    });
}

/// Words whose changes a bell announces, and the data that the words stand for.
#[derive(Default)]
struct Errand {
    bell: Bell,
    words: [AtomicU32; 2],
    data: [Data; 2],
}

#[test]
fn loom_a_bell_is_heard() {
    // Two ranks ring the same bell; the third waits for both.
    let rank = |errand: &Errand, rank: usize| {
        if let Some(caller) = rank.checked_sub(1) {
            errand.data[caller].set(7);
            errand.words[caller].store(1, Ordering::Release);
            errand.bell.ring();
            return;
        }
        let is_done = || errand.words.iter().all(|word| word.load(Ordering::Acquire) == 1);
        errand.bell.wait(PATIENT, is_done, || None, || None, |_| ()).unwrap();
        assert_eq!([0, 1].map(|caller: usize| errand.data[caller].get()), [7, 7]);
    };
    check(3, Some(3), Errand::default, rank, |_| ());
}

/// A mailbox with places for two pieces, the description of the message by each side, and a bell per side.
#[derive(Default)]
struct Box {
    counts: Counts,
    bells: [Bell; 2],
    pieces: [Data; MAX_READY as usize],
    said: [Data; 2],
}

impl Box {
    fn wait(&self, rank: usize, is_done: impl Fn() -> bool) {
        self.bells[rank].wait(PATIENT, is_done, || None, || None, |_| ()).unwrap();
    }

    /// Sends a message of `num_pieces` pieces like `point_to_point.rs`, each piece in its place.
    fn send(&self, number: u32, num_pieces: u32) {
        self.said[0].set(10 * number);
        let message = self.counts.send();
        self.bells[1].ring();
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
            self.bells[1].ring();
        }
    }

    fn receive(&self, number: u32, num_pieces: u32) {
        self.said[1].set(10 * number + 1);
        let message = self.counts.ask();
        self.bells[0].ring();
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
            self.bells[0].ring();
        }
    }
}

#[test]
fn loom_two_messages_of_one_piece_arrive() {
    let rank = |mail: &Box, rank| {
        for number in 1..=2 {
            if rank == 0 { mail.send(number, 1) } else { mail.receive(number, 1) }
        }
    };
    check(2, Some(2), Box::default, rank, |_| ());
}

#[test]
fn loom_a_message_of_three_pieces_arrives() {
    let rank = |mail: &Box, rank| if rank == 0 { mail.send(1, 3) } else { mail.receive(1, 3) };
    check(2, Some(2), Box::default, rank, |_| ());
}
