//! The state machine that all ranks of a group share: two gates and a counter of units.
//!
//! A *round* has a sequence number that every rank counts for itself. In each round
//!
//! 1. every rank publishes what it called in its [`Slot`] and arrives at the first gate; the last
//!    one to arrive resets the unit counters and opens the gate;
//! 2. the ranks claim units of work from a shared counter, so that a rank which is not running
//!    holds nobody up; whoever completes the last unit opens the second gate;
//! 3. every rank waits for the second gate and goes on.
//!
//! Counters can be reset in step 1 because nobody passes the first gate of round k+1 before
//! everybody has left round k. Slots are doubled by parity: a fast rank may write its slot for
//! round k+1 while a slow one still reads those of round k, but never the one of round k+2.
//!
//! A rank that stops waiting at the first gate *closes* it for good, in one atomic step that cannot
//! meet with its opening: either the gate was already open, and the rank goes on after all, or it
//! stays shut, and no peer will ever touch the memory that the rank takes back.
//!
//! It lives in memory that may be shared between processes, consists of atomics only (valid when
//! zeroed), and knows nothing of what the units do. How ranks wait is in `gates.rs` and `mail.rs`,
//! which loom checks.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use paceline_memory::{Mapping, MemoryError};

use super::fate::{Fate, WaitError};
use super::gates::{Bell, Gates, Line};
use super::mail::Counts;
use super::segment::Place;
use crate::MAX_RANKS;
use crate::call::{CallHeader, Verdict};
use crate::context::WaitPolicy;

/// A place in a rank's memory, in words.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct PlaceWords {
    /// Index of the segment, or [`STAGED`].
    segment: AtomicU64,
    /// Offset or address within it.
    offset: AtomicU64,
}

/// The segment number that says that the data lie in private memory, so that they must be staged.
const STAGED: u64 = u64::MAX;

impl PlaceWords {
    pub(crate) fn store(&self, place: Option<Place>) {
        self.segment.store(place.map_or(STAGED, |place| place.segment), Ordering::Relaxed);
        self.offset.store(place.map_or(0, |place| place.offset), Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> Option<Place> {
        let segment = self.segment.load(Ordering::Relaxed);
        let offset = self.offset.load(Ordering::Relaxed);
        (segment != STAGED).then_some(Place { segment, offset })
    }
}

/// What one rank called, in words.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct CallWords {
    signature: AtomicU64,
    send_count: AtomicU64,
    recv_count: AtomicU64,
    overlap: AtomicU64,
}

impl CallWords {
    pub(crate) fn store(&self, call: &CallHeader) {
        self.signature.store(call.signature, Ordering::Relaxed);
        self.send_count.store(call.send_count, Ordering::Relaxed);
        self.recv_count.store(call.recv_count, Ordering::Relaxed);
        self.overlap.store(call.overlap, Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> CallHeader {
        CallHeader {
            signature: self.signature.load(Ordering::Relaxed),
            send_count: self.send_count.load(Ordering::Relaxed),
            recv_count: self.recv_count.load(Ordering::Relaxed),
            overlap: self.overlap.load(Ordering::Relaxed),
        }
    }
}

/// What one rank called in one round, for its peers to compare and resolve.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The round.
    pub(crate) seq: AtomicU32,
    /// 1 from its arrival until this rank has done its part of the round; names who is stopped.
    pub(crate) working: AtomicU32,
    /// Its place in the group's sequence of operations.
    pub(crate) operation: AtomicU32,
    pub(crate) call: CallWords,
    pub(crate) send: PlaceWords,
    pub(crate) recv: PlaceWords,
}

/// One direction of the traffic between two ranks: the sender's half and the receiver's.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Mail {
    pub(crate) counts: Counts,
    /// 1 while the receiver reads the sender's memory; and [`WITHDRAWN`] + the number of the message that
    /// the sender has withdrawn, if it has. Whoever sets one of them then looks at the other.
    pub(crate) is_reading: AtomicU32,
    pub(crate) withdrawn: AtomicU64,
    /// The sender's latest round, which tells the half of the staging area that it uses.
    pub(crate) round: AtomicU32,
    /// Where the two halves stand in their ranks' sequences.
    pub(crate) sender_operation: AtomicU32,
    pub(crate) receiver_operation: AtomicU32,
    pub(crate) sender: CallWords,
    pub(crate) receiver: CallWords,
    /// Where the sender's data lie.
    pub(crate) place: PlaceWords,
}

/// Two calls that do not fit together, found by some rank and kept for all to report.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct VerdictWords {
    ranks: AtomicU64,
    operations: AtomicU64,
    calls: [CallWords; 2],
}

/// Why a group is no longer whole. Both alarms are zero while it is.
#[repr(C)]
#[derive(Debug, Default)]
struct Alarms {
    /// 1 + the first rank that left or was lost, [`CONFLICT`], or [`GIVEN_UP`].
    first: AtomicU32,
    /// The first alarm that concerns all ranks, whichever they need: [`CONFLICT`] or [`GIVEN_UP`].
    common: AtomicU32,
}

/// The shared state of a group.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control {
    gates: Gates,
    alarms: Line<Alarms>,
    /// Taken by the rank that writes the verdict.
    accuser: Line<AtomicU32>,
    verdict: VerdictWords,
    /// Per rank: 0 in the group, 1 left in order, 2 lost.
    fate: [AtomicU32; MAX_RANKS],
    /// Per rank: counts what others have done that it may be waiting for outside of the gates.
    bells: [Bell; MAX_RANKS],
    slots: [[Slot; MAX_RANKS]; 2],
    /// `[parity][rank][peer]`: elements that a rank sends to and expects from each peer in an
    /// all-to-all.
    blocks: [[[[AtomicU64; 2]; MAX_RANKS]; MAX_RANKS]; 2],
    /// `[sender][receiver]`.
    mail: [[Mail; MAX_RANKS]; MAX_RANKS],
}

/// Above all numbers of messages, so that no message looks withdrawn that is not.
pub(super) const WITHDRAWN: u64 = 1 << 32;

/// The alarm that says that calls do not fit together.
const CONFLICT: u32 = u32::MAX;

/// The alarm that says that some rank has stopped waiting for others.
const GIVEN_UP: u32 = u32::MAX - 1;

impl Control {
    /// New shared state in memory of its own.
    pub(crate) fn create(extra_bytes: usize) -> Result<Mapping, MemoryError> {
        Mapping::create(Self::BYTES + extra_bytes)
    }

    /// Its size in memory, in whole pages.
    pub(crate) const BYTES: usize = size_of::<Self>().next_multiple_of(4096);

    /// The state at the start of a mapping that [`Control::create`] made, here or in another process.
    pub(crate) fn of(mapping: &Mapping) -> &Self {
        assert!(mapping.len_bytes() >= Self::BYTES, "the mapping was made for shared state");
        // SAFETY: the mapping is page-aligned and large enough, starts zeroed, and `Control` is made
        // of atomics, for which zero is valid and which any process may touch at any time.
        unsafe { mapping.base().cast::<Self>().as_ref() }
    }

    /// The slot of `rank` in round `seq`.
    pub(crate) fn slot(&self, seq: u32, rank: usize) -> &Slot {
        &self.slots[(seq % 2) as usize][rank]
    }

    /// Arrives at the first gate of round `seq`. The caller has filled its slot.
    pub(crate) fn arrive(&self, seq: u32, world: usize) {
        self.gates.arrive(seq, world);
    }

    /// Waits until all ranks have arrived in round `seq`; returns when the last one did.
    /// `is_stuck` is asked now and then whether they still can.
    pub(crate) fn wait_present(
        &self,
        seq: u32,
        policy: WaitPolicy,
        is_stuck: impl Fn() -> Option<Verdict>,
    ) -> Result<u64, WaitError> {
        // Whoever looks stuck may have passed this very gate and gone on to its next operation, which can
        // be seen only together with the open gate.
        let stuck = || is_stuck().filter(|_| !self.gates.all_present(seq));
        let has_accused = || stuck().inspect(|verdict| self.accuse(verdict)).is_some();
        let outcome = self.gates.wait_present(seq, policy, || self.alarm(), has_accused);
        outcome.inspect_err(|error| self.give_up(*error))
    }

    /// The ranks below `world` that have arrived in round `seq` but not done their part.
    pub(crate) fn working(&self, seq: u32, world: usize) -> Vec<usize> {
        let is_working = |rank: &usize| self.slot(seq, *rank).working.load(Ordering::Acquire) != 0;
        (0..world).filter(is_working).collect()
    }

    /// The next unit that nobody has claimed, if any is left of `num_units`.
    pub(crate) fn claim_unit(&self, num_units: u32) -> Option<u32> {
        self.gates.claim_unit(num_units)
    }

    /// Reports a claimed unit as completed; the last one opens the second gate.
    pub(crate) fn complete_unit(&self, seq: u32, num_units: u32) {
        self.gates.complete_unit(seq, num_units);
    }

    /// Waits until all units of round `seq` are completed.
    pub(crate) fn wait_done(&self, seq: u32, policy: WaitPolicy) -> Result<(), WaitError> {
        let outcome = self.gates.wait_done(seq, policy, || self.alarm());
        outcome.inspect_err(|error| self.give_up(*error))
    }

    /// Notes that `rank` is no longer there, and wakes everybody who may wait for it.
    pub(crate) fn depart(&self, rank: usize, fate: Fate) {
        // Release: a rank that has gone touches nothing any more.
        self.fate[rank].store(fate as u32, Ordering::Release);
        self.raise(1 + rank as u32);
    }

    /// Tells everybody that two calls do not fit together. The first such verdict counts.
    pub(crate) fn accuse(&self, verdict: &Verdict) {
        if self.accuser.0.swap(1, Ordering::Relaxed) == 0 {
            let pack = |low: u64, high: u64| low | high << 32;
            let [a, b] = verdict.ranks;
            self.verdict.ranks.store(pack(a as u64, b as u64), Ordering::Relaxed);
            let [a, b] = verdict.operations;
            self.verdict.operations.store(pack(a.into(), b.into()), Ordering::Relaxed);
            for (words, call) in self.verdict.calls.iter().zip(&verdict.calls) {
                words.store(call);
            }
            self.raise(CONFLICT);
        }
    }

    /// Lets the others know at once that this rank no longer waits: they would blame it for leaving
    /// otherwise.
    fn give_up(&self, error: WaitError) {
        if error == WaitError::TimedOut {
            self.raise(GIVEN_UP);
        }
    }

    fn raise(&self, alarm: u32) {
        // Release, so that whoever sees the alarm sees its reason. Only the first one is kept: it is
        // the cause of those that follow.
        if alarm == CONFLICT || alarm == GIVEN_UP {
            let common = &self.alarms.0.common;
            let _ = common.compare_exchange(0, alarm, Ordering::Release, Ordering::Relaxed);
        }
        let _ =
            self.alarms.0.first.compare_exchange(0, alarm, Ordering::Release, Ordering::Relaxed);
        self.gates.wake_all();
        for rank in 0..MAX_RANKS {
            self.ring(rank);
        }
    }

    /// Why an operation of all ranks cannot go on, if so.
    pub(crate) fn alarm(&self) -> Option<WaitError> {
        self.meaning(self.alarms.0.first.load(Ordering::Acquire))
    }

    /// Why an operation that needs only these `peers` cannot go on, if so: other ranks may come and
    /// go.
    pub(crate) fn alarm_among(&self, peers: &[usize]) -> Option<WaitError> {
        match self.alarm()? {
            WaitError::Gone { peer, .. } if !peers.contains(&peer) => {
                let common = self.meaning(self.alarms.0.common.load(Ordering::Acquire));
                let gone = peers.iter().find(|&&peer| self.is_gone(peer));
                common.or_else(|| self.meaning(1 + *gone? as u32))
            }
            reason => Some(reason),
        }
    }

    fn meaning(&self, alarm: u32) -> Option<WaitError> {
        match alarm {
            0 => None,
            GIVEN_UP => Some(WaitError::GivenUp),
            CONFLICT => {
                let unpack = |word: u64| [word as u32, (word >> 32) as u32];
                let ranks = unpack(self.verdict.ranks.load(Ordering::Relaxed));
                Some(WaitError::Conflict(Verdict {
                    ranks: ranks.map(|rank| rank as usize),
                    operations: unpack(self.verdict.operations.load(Ordering::Relaxed)),
                    calls: std::array::from_fn(|i| self.verdict.calls[i].load()),
                }))
            }
            alarm => {
                let peer = alarm as usize - 1;
                let lost = self.fate[peer].load(Ordering::Relaxed) == Fate::Lost as u32;
                let fate = if lost { Fate::Lost } else { Fate::Left };
                Some(WaitError::Gone { peer, fate })
            }
        }
    }

    /// The traffic from one rank to another.
    pub(crate) fn mail(&self, from: usize, to: usize) -> &Mail {
        &self.mail[from][to]
    }

    /// Elements that `rank` sends to `peer` in round `seq`, and that it expects of it.
    pub(crate) fn blocks(&self, seq: u32, rank: usize, peer: usize) -> &[AtomicU64; 2] {
        &self.blocks[(seq % 2) as usize][rank][peer]
    }

    /// Wakes `rank` if it waits for a point-to-point operation.
    pub(crate) fn ring(&self, rank: usize) {
        self.bells[rank].ring();
    }

    /// Waits until `is_done`, which looks at shared words after whose change this rank's bell rings.
    /// `is_stuck` is asked now and then whether that can still happen, for which only `peers` are
    /// needed.
    pub(crate) fn wait_bell(
        &self,
        rank: usize,
        peers: &[usize],
        policy: WaitPolicy,
        is_done: impl FnMut() -> bool,
        is_stuck: impl Fn() -> Option<Verdict>,
    ) -> Result<(), WaitError> {
        let accuse = |verdict: &Verdict| self.accuse(verdict);
        self.bells[rank].wait(policy, is_done, || self.alarm_among(peers), is_stuck, accuse)
    }

    /// Whether `rank` left in order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.fate[rank].load(Ordering::Relaxed) == Fate::Left as u32
    }

    /// Whether `rank` is no longer in the group.
    pub(crate) fn is_gone(&self, rank: usize) -> bool {
        self.fate[rank].load(Ordering::Acquire) != 0
    }

    /// The ranks below `world` that have not arrived in round `seq`.
    pub(crate) fn missing(&self, seq: u32, world: usize) -> Vec<usize> {
        (0..world).filter(|&rank| self.slot(seq, rank).seq.load(Ordering::Relaxed) != seq).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    const PATIENT: WaitPolicy =
        WaitPolicy { spin: Duration::from_micros(5), limit: Duration::from_secs(30) };

    #[test]
    fn every_unit_of_every_round_is_done_once_and_seen_by_all() {
        const WORLD: usize = 5;
        const UNITS: u32 = 7;
        let mapping = Control::create(0).unwrap();
        let control = Control::of(&mapping);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let total = &total;
                scope.spawn(move || {
                    for seq in 1..=500u32 {
                        control.slot(seq, rank).seq.store(seq, Ordering::Relaxed);
                        control.arrive(seq, WORLD);
                        control.wait_present(seq, PATIENT, || None).unwrap();
                        assert_eq!(control.missing(seq, WORLD), [0usize; 0]);
                        while control.claim_unit(UNITS).is_some() {
                            total.fetch_add(1, Ordering::Relaxed);
                            control.complete_unit(seq, UNITS);
                        }
                        control.wait_done(seq, PATIENT).unwrap();
                        assert!(total.load(Ordering::Relaxed) >= (seq * UNITS) as usize);
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3500);
    }

    #[test]
    fn a_missing_rank_is_named_and_a_lost_one_noticed() {
        let mapping = Control::create(0).unwrap();
        let control = Control::of(&mapping);
        control.slot(1, 0).seq.store(1, Ordering::Relaxed);
        control.arrive(1, 3);
        let short = WaitPolicy { limit: Duration::from_millis(20), ..PATIENT };
        assert_eq!(control.wait_present(1, short, || None), Err(WaitError::TimedOut));
        assert_eq!(control.missing(1, 3), [1, 2]);
        let mapping = Control::create(0).unwrap();
        let control = Control::of(&mapping);
        control.arrive(1, 2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || control.wait_present(1, PATIENT, || None));
            std::thread::sleep(Duration::from_millis(10));
            control.depart(2, Fate::Lost);
            let error = WaitError::Gone { peer: 2, fate: Fate::Lost };
            assert_eq!(waiter.join().unwrap(), Err(error));
        });
    }

    #[test]
    fn a_gate_that_a_rank_gave_up_on_stays_shut() {
        let mapping = Control::create(0).unwrap();
        let control = Control::of(&mapping);
        let short = WaitPolicy { spin: Duration::ZERO, limit: Duration::from_millis(5) };
        control.arrive(1, 2);
        assert_eq!(control.wait_present(1, short, || None), Err(WaitError::TimedOut));
        control.arrive(1, 2);
        assert_eq!(control.wait_present(1, PATIENT, || None), Err(WaitError::GivenUp));
    }
}
