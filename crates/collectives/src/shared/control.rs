//! The state machine that all ranks of a group share: a barrier with two phases, and a counter of chunks.
//!
//! Work proceeds in *rounds*, which every rank counts for itself. In each round
//!
//! 1. every rank publishes its call in its [`Slot`] and arrives at the first phase of the barrier. The last
//!    rank to arrive resets the counters of chunks and completes the phase;
//! 2. the ranks claim *chunks* of the work from a shared counter, so that a rank that the system has put to
//!    sleep delays no other rank. The last chunk completes the second phase;
//! 3. every rank waits for the second phase and goes on.
//!
//! Counters can be reset in step 1 because the first phase of round k+1 does not complete before all ranks have
//! left round k. Each rank has two slots, for even and odd rounds: a fast rank may write its slot for round
//! k+1 while a slow rank still reads the slots of round k. It cannot write the slot for round k+2, which is that of round
//! k again, before the slow rank has arrived in round k+1.
//!
//! A rank that stops waiting for the first phase *closes* the phase for good. Only one of closing and completing a phase
//! can succeed. Either the phase was already complete, and the rank goes on
//! after all. Or the phase stays closed, and no peer ever touches the memory of the rank's call.
//!
//! The state lies in memory that may be shared between processes. It consists of atomics only (valid when
//! zeroed). This module does not know what the chunks are. `phases.rs` and `mail.rs`, which loom checks, define how ranks
//! wait.

use std::ptr::slice_from_raw_parts;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use paceline_memory::{Mapping, MemoryError};

use super::fate::{Fate, WaitError};
use super::mail::MailCounts;
use super::phases::{Barrier, CacheLine, WakeUp};
use super::segment::SegmentOffset;
use crate::MAX_RANKS;
use crate::call::{CallHeader, Conflict};
use crate::context::WaitPolicy;

/// An optional [`SegmentOffset`] in a rank's memory, as atomic words.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct PlaceWords {
    /// Index of the segment, or [`STAGED`].
    segment: AtomicU64,
    /// Offset within the segment; between threads the address.
    offset: AtomicU64,
}

/// The segment number for data in private memory, which must be staged.
const STAGED: u64 = u64::MAX;

impl PlaceWords {
    pub(crate) fn store(&self, place: Option<SegmentOffset>) {
        self.segment.store(place.map_or(STAGED, |place| place.segment), Ordering::Relaxed);
        self.offset.store(place.map_or(0, |place| place.offset), Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> Option<SegmentOffset> {
        let segment = self.segment.load(Ordering::Relaxed);
        let offset = self.offset.load(Ordering::Relaxed);
        (segment != STAGED).then_some(SegmentOffset { segment, offset })
    }
}

/// One rank's [`CallHeader`], as atomic words.
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

/// One rank's entry for one round: its call, which the peers compare with theirs, and where its data lie.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The round.
    pub(crate) seq: AtomicU32,
    /// 1 from this rank's arrival until it has done its part of the round. After a time-out this shows which
    /// ranks did not finish.
    pub(crate) working: AtomicU32,
    /// The sequence number of the operation on this rank.
    pub(crate) operation: AtomicU32,
    /// When this rank began the operation.
    pub(crate) started_ns: AtomicU64,
    pub(crate) call: CallWords,
    pub(crate) send: PlaceWords,
    pub(crate) recv: PlaceWords,
}

/// The shared words for one rank's messages to another.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Pair {
    mail: Mail,
    /// By parity of the round: the number of elements that the first rank sends to the second in an all-to-all, and the
    /// number that it expects from it.
    blocks: [[AtomicU64; 2]; 2],
}

/// The mailbox for messages from one rank to another.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Mail {
    pub(crate) counts: MailCounts,
    /// The sender's latest round, which determines the half of the staging area that it uses.
    pub(crate) round: AtomicU32,
    /// The sequence numbers of the two calls on their ranks.
    pub(crate) sender_operation: AtomicU32,
    pub(crate) receiver_operation: AtomicU32,
    pub(crate) sender: CallWords,
    pub(crate) receiver: CallWords,
    /// Where the sender's data lie.
    pub(crate) place: PlaceWords,
}

/// Two calls that do not match (a [`Conflict`]), written by the rank that finds them and reported by all ranks.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct ConflictWords {
    ranks: AtomicU64,
    operations: AtomicU64,
    calls: [CallWords; 2],
}

/// Why a group can no longer work. Both alarms are zero as long as it can.
#[repr(C)]
#[derive(Debug, Default)]
struct Alarms {
    /// 1 + the first rank that left or was lost, [`CONFLICT`], or [`GIVEN_UP`].
    first: AtomicU32,
    /// The first alarm that concerns all ranks, whichever they need: [`CONFLICT`] or [`GIVEN_UP`].
    common: AtomicU32,
}

/// The shared state of a group. Pages that no rank touches take no memory.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control<Pairs: ?Sized = [Pair]> {
    pub(super) barrier: Barrier,
    alarms: CacheLine<Alarms>,
    /// A bit for each rank of another host that a rank of this host has reported as missing.
    missing_remote: CacheLine<[AtomicU64; MAX_RANKS / 64]>,
    /// Set by the rank that writes the conflict.
    is_conflict_taken: CacheLine<AtomicU32>,
    conflict: ConflictWords,
    /// Per rank: 0 in the group, 1 left in order, 2 lost.
    fate: [AtomicU32; MAX_RANKS],
    wake_ups: [WakeUp; MAX_RANKS],
    slots: [[Slot; MAX_RANKS]; 2],
    /// In the order of [`pair_index`], as many as the group has pairs.
    pairs: Pairs,
}

/// The index of the pair of `from` and `to`, whatever the number of ranks: pairs of ranks below n have the first n * n indices.
fn pair_index(from: usize, to: usize) -> usize {
    if from < to { to * to + from } else { from * from + from + to }
}

/// The alarm for calls that do not match.
const CONFLICT: u32 = u32::MAX;

/// The alarm for a rank that has timed out.
const GIVEN_UP: u32 = u32::MAX - 1;

impl Control {
    pub(crate) fn create(world: usize) -> Result<Mapping, MemoryError> {
        Mapping::create(Self::bytes(world))
    }

    /// The size of the state in bytes, rounded up to whole pages.
    pub(crate) const fn bytes(world: usize) -> usize {
        let pairs = world * world * size_of::<Pair>();
        (size_of::<Control<[Pair; 0]>>() + pairs).next_multiple_of(4096)
    }

    /// The state of `world` ranks at the start of a mapping, which this or another process made with at least
    /// [`Control::bytes`].
    pub(crate) fn of(mapping: &Mapping, world: usize) -> &Self {
        assert!(mapping.len_bytes() >= Self::bytes(world), "the mapping was made for this state");
        let pairs = slice_from_raw_parts(mapping.base().as_ptr().cast::<Pair>(), world * world);
        // SAFETY: the mapping is page-aligned and large enough for this number of pairs, and starts zeroed. `Control`
        // consists of atomics, for which zero is valid and which any process may touch at any time.
        unsafe { &*(pairs as *const Self) }
    }

    pub(crate) fn slot(&self, seq: u32, rank: usize) -> &Slot {
        &self.slots[(seq % 2) as usize][rank]
    }

    /// Waits until all ranks have arrived in round `seq`. Returns the moment when the last rank arrived.
    /// `is_stuck`, called from time to time, returns the reason if a rank can never arrive.
    pub(crate) fn wait_present(
        &self,
        seq: u32,
        policy: WaitPolicy,
        is_stuck: impl Fn() -> Option<Conflict>,
    ) -> Result<u64, WaitError> {
        // A peer that looks stuck may have left this round and gone on to its next operation, so the phase is checked again.
        let stuck = || is_stuck().filter(|_| !self.barrier.all_present(seq));
        let has_reported = || stuck().inspect(|conflict| self.report_mismatch(conflict)).is_some();
        let outcome = self.barrier.wait_present(seq, policy, || self.alarm(), has_reported);
        outcome.inspect_err(|error| self.give_up(*error))
    }

    /// The ranks below `world` that have arrived in round `seq` but have not done their part.
    pub(crate) fn working(&self, seq: u32, world: usize) -> Vec<usize> {
        let is_working = |rank: &usize| self.slot(seq, *rank).working.load(Ordering::Acquire) != 0;
        (0..world).filter(is_working).collect()
    }

    pub(crate) fn wait_done(&self, seq: u32, policy: WaitPolicy) -> Result<(), WaitError> {
        let outcome = self.barrier.wait_done(seq, policy, || self.alarm());
        outcome.inspect_err(|error| self.give_up(*error))
    }

    /// Notes that `rank` is no longer in the group, and wakes all ranks that may wait for it.
    pub(crate) fn depart(&self, rank: usize, fate: Fate) {
        // Release: a rank that sees this knows that the departed rank no longer touches any memory.
        self.fate[rank].store(fate as u32, Ordering::Release);
        self.raise(1 + rank as u32);
    }

    /// Reports to all ranks that two calls do not match. Only the first conflict is kept.
    pub(crate) fn report_mismatch(&self, conflict: &Conflict) {
        if self.is_conflict_taken.0.swap(1, Ordering::Relaxed) == 0 {
            let pack = |low: u64, high: u64| low | high << 32;
            let [a, b] = conflict.ranks;
            self.conflict.ranks.store(pack(a as u64, b as u64), Ordering::Relaxed);
            let [a, b] = conflict.operations;
            self.conflict.operations.store(pack(a.into(), b.into()), Ordering::Relaxed);
            for (words, call) in self.conflict.calls.iter().zip(&conflict.calls) {
                words.store(call);
            }
            self.raise(CONFLICT);
        }
    }

    /// After a time-out, lets the others know at once that this rank no longer waits. Otherwise they would report
    /// that this rank has left.
    fn give_up(&self, error: WaitError) {
        if error == WaitError::TimedOut {
            self.raise(GIVEN_UP);
        }
    }

    /// Reports to the ranks of this host that ranks of other hosts are missing, and that this rank no longer waits.
    pub(crate) fn report_missing(&self, missing: &[usize]) {
        for rank in missing {
            // Release: a rank that sees the alarm sees these ranks too.
            self.missing_remote.0[rank / 64].fetch_or(1 << (rank % 64), Ordering::Release);
        }
        self.raise(GIVEN_UP);
    }

    /// The ranks of other hosts that a rank of this host has reported as missing.
    pub(crate) fn missing_remote_ranks(&self) -> Vec<usize> {
        let words = self.missing_remote.0.each_ref().map(|word| word.load(Ordering::Acquire));
        (0..MAX_RANKS).filter(|rank| words[rank / 64] & 1 << (rank % 64) != 0).collect()
    }

    fn raise(&self, alarm: u32) {
        // Release: a rank that sees the alarm also sees its reason. Only the first alarm is kept, since it
        // causes those that follow.
        if alarm == CONFLICT || alarm == GIVEN_UP {
            let common = &self.alarms.0.common;
            let _ = common.compare_exchange(0, alarm, Ordering::Release, Ordering::Relaxed);
        }
        let _ =
            self.alarms.0.first.compare_exchange(0, alarm, Ordering::Release, Ordering::Relaxed);
        self.barrier.wake_all();
        for rank in 0..MAX_RANKS {
            self.wake(rank);
        }
    }

    /// The reason if an operation of all ranks cannot go on.
    pub(crate) fn alarm(&self) -> Option<WaitError> {
        self.meaning(self.alarms.0.first.load(Ordering::Acquire))
    }

    /// The reason if an operation that needs only these `peers` cannot go on. Other ranks may leave.
    pub(crate) fn alarm_among(&self, peers: &[usize]) -> Option<WaitError> {
        match self.alarm()? {
            WaitError::Gone { peer, .. } if !peers.contains(&peer) => {
                let common = self.meaning(self.alarms.0.common.load(Ordering::Acquire));
                let gone = peers.iter().find(|&&peer| self.fate(peer).is_some());
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
                let ranks = unpack(self.conflict.ranks.load(Ordering::Relaxed));
                Some(WaitError::Conflict(Conflict {
                    ranks: ranks.map(|rank| rank as usize),
                    operations: unpack(self.conflict.operations.load(Ordering::Relaxed)),
                    calls: std::array::from_fn(|i| self.conflict.calls[i].load()),
                }))
            }
            alarm => {
                let peer = alarm as usize - 1;
                Some(WaitError::Gone { peer, fate: self.fate(peer).unwrap_or(Fate::Left) })
            }
        }
    }

    /// The mailbox for messages from one rank to another.
    pub(crate) fn mail(&self, from: usize, to: usize) -> &Mail {
        &self.pairs[pair_index(from, to)].mail
    }

    /// The numbers of elements that `rank` sends to `peer` in round `seq`, and that it expects from `peer`.
    pub(crate) fn blocks(&self, seq: u32, rank: usize, peer: usize) -> &[AtomicU64; 2] {
        &self.pairs[pair_index(rank, peer)].blocks[(seq % 2) as usize]
    }

    pub(crate) fn wake(&self, rank: usize) {
        self.wake_ups[rank].wake();
    }

    /// Waits until `is_done`, which checks shared words, returns true; a rank that changes them wakes this rank. The wait
    /// needs only the ranks that `peers` returns. `is_stuck`, called from time to time, returns the
    /// reason if one of these peers can never do its part.
    pub(crate) fn wait_for_wake_up(
        &self,
        rank: usize,
        peers: impl Fn() -> Vec<usize>,
        policy: WaitPolicy,
        is_done: impl FnMut() -> bool,
        is_stuck: impl Fn() -> Option<Conflict>,
    ) -> Result<(), WaitError> {
        let report = |conflict: &Conflict| self.report_mismatch(conflict);
        self.wake_ups[rank].wait(policy, is_done, || self.alarm_among(&peers()), is_stuck, report)
    }

    /// How `rank` ended its membership, if it has. From then on it touches no memory of others.
    pub(crate) fn fate(&self, rank: usize) -> Option<Fate> {
        let fate = self.fate[rank].load(Ordering::Acquire);
        [Fate::Left, Fate::Lost].into_iter().find(|of| *of as u32 == fate)
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
    fn every_chunk_of_every_round_is_done_once_and_seen_by_all() {
        const WORLD: usize = 5;
        const CHUNKS: u32 = 7;
        let mapping = Control::create(WORLD).unwrap();
        let control = Control::of(&mapping, WORLD);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let total = &total;
                scope.spawn(move || {
                    for seq in 1..=500u32 {
                        control.slot(seq, rank).seq.store(seq, Ordering::Relaxed);
                        control.barrier.arrive(seq, WORLD);
                        control.wait_present(seq, PATIENT, || None).unwrap();
                        assert_eq!(control.missing(seq, WORLD), [0usize; 0]);
                        while control.barrier.claim_chunk(CHUNKS).is_some() {
                            total.fetch_add(1, Ordering::Relaxed);
                            control.barrier.complete_chunk(seq, CHUNKS);
                        }
                        control.wait_done(seq, PATIENT).unwrap();
                        assert!(total.load(Ordering::Relaxed) >= (seq * CHUNKS) as usize);
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3500);
    }

    #[test]
    fn a_missing_rank_is_named_and_a_lost_one_noticed() {
        let mapping = Control::create(3).unwrap();
        let control = Control::of(&mapping, 3);
        control.slot(1, 0).seq.store(1, Ordering::Relaxed);
        control.barrier.arrive(1, 3);
        let short = WaitPolicy { limit: Duration::from_millis(20), ..PATIENT };
        assert_eq!(control.wait_present(1, short, || None), Err(WaitError::TimedOut));
        assert_eq!(control.missing(1, 3), [1, 2]);
        let mapping = Control::create(3).unwrap();
        let control = Control::of(&mapping, 3);
        control.barrier.arrive(1, 2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || control.wait_present(1, PATIENT, || None));
            std::thread::sleep(Duration::from_millis(10));
            control.depart(2, Fate::Lost);
            let error = WaitError::Gone { peer: 2, fate: Fate::Lost };
            assert_eq!(waiter.join().unwrap(), Err(error));
        });
    }

    #[test]
    fn each_pair_of_ranks_has_a_place_of_its_own() {
        for world in [1, 2, 3, 64, 100] {
            let pairs = (0..world).flat_map(|from| (0..world).map(move |to| pair_index(from, to)));
            let mut places = pairs.collect::<Vec<_>>();
            places.sort_unstable();
            assert_eq!(places, (0..world * world).collect::<Vec<_>>());
        }
    }

    #[test]
    fn missing_ranks_of_other_hosts_are_named_whatever_their_number() {
        let mapping = Control::create(2).unwrap();
        let control = Control::of(&mapping, 2);
        assert_eq!(control.missing_remote_ranks(), [0usize; 0]);
        control.report_missing(&[5, 64, MAX_RANKS - 1]);
        control.report_missing(&[63]);
        assert_eq!(control.missing_remote_ranks(), [5, 63, 64, MAX_RANKS - 1]);
    }

    #[test]
    fn a_phase_that_a_rank_gave_up_on_stays_closed() {
        let mapping = Control::create(3).unwrap();
        let control = Control::of(&mapping, 3);
        let short = WaitPolicy { spin: Duration::ZERO, limit: Duration::from_millis(5) };
        control.barrier.arrive(1, 2);
        assert_eq!(control.wait_present(1, short, || None), Err(WaitError::TimedOut));
        control.barrier.arrive(1, 2);
        assert_eq!(control.wait_present(1, PATIENT, || None), Err(WaitError::GivenUp));
    }
}
