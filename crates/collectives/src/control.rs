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
//! zeroed), and knows nothing of what the units do.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::thread::futex;

/// The most ranks that one host's group can have.
pub const MAX_RANKS: usize = 64;

/// A value on a cache line of its own, so that ranks do not slow each other by false sharing.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Line<T>(pub T);

/// A gate that opens once per round.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Gate {
    /// The latest round for which it has opened, shifted left by one, and [`CLOSED`]; also the
    /// futex word.
    word: AtomicU32,
    /// Ranks asleep on the futex word, so that opening costs no system call when all are awake.
    sleepers: AtomicU32,
    /// When it last opened, `CLOCK_MONOTONIC` nanoseconds.
    opened_ns: AtomicU64,
}

/// The bit of a gate's word that says that it will not open again.
const CLOSED: u32 = 1;

/// What one rank called in one round, as words that peers compare and resolve.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) seq: AtomicU32,
    /// Operation, element type, reduction and root, packed.
    pub(crate) signature: AtomicU64,
    /// Elements in the message.
    pub(crate) count: AtomicU64,
    /// Where this rank's data lies: segment ...
    pub(crate) segment: AtomicU64,
    /// ... and offset or address within it.
    pub(crate) offset: AtomicU64,
}

/// The shared state of a group.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control {
    arrived: Line<AtomicU32>,
    present: Gate,
    claimed: Line<AtomicU32>,
    completed: Line<AtomicU32>,
    done: Gate,
    /// Zero while all is well, else 1 + the first rank that left or was lost.
    alarm: Line<AtomicU32>,
    /// Per rank: 0 in the group, 1 left in order, 2 lost.
    fate: [AtomicU32; MAX_RANKS],
    slots: [[Slot; MAX_RANKS]; 2],
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It dropped its group.
    Left = 1,
    /// It died.
    Lost = 2,
}

/// Why a wait ended without its gate opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitError {
    Gone {
        peer: usize,
        fate: Fate,
    },
    TimedOut,
    /// Another rank stopped waiting first.
    GivenUp,
}

/// How long to wait, and how long to keep the core busy before sleeping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) spin: Duration,
    pub(crate) limit: Duration,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            arrived: Line::default(),
            present: Gate::default(),
            claimed: Line::default(),
            completed: Line::default(),
            done: Gate::default(),
            alarm: Line::default(),
            fate: std::array::from_fn(|_| AtomicU32::new(0)),
            slots: std::array::from_fn(|_| std::array::from_fn(|_| Slot::default())),
        }
    }
}

impl Control {
    /// The slot of `rank` in round `seq`.
    pub(crate) fn slot(&self, seq: u32, rank: usize) -> &Slot {
        &self.slots[(seq % 2) as usize][rank]
    }

    /// Arrives at the first gate of round `seq`. The caller has filled its slot.
    pub(crate) fn arrive(&self, seq: u32, world: usize) {
        // AcqRel: the last one to arrive sees every slot, and passes that on by opening the gate.
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == world as u32 {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.claimed.0.store(0, Ordering::Relaxed);
            self.completed.0.store(0, Ordering::Relaxed);
            // Rounds without units leave the second gate as it was; brought up to date here, it can
            // never fall so far behind that it seems to be ahead.
            self.done.word.store(seq.wrapping_sub(1) << 1, Ordering::Relaxed);
            self.present.open(seq);
        }
    }

    /// Waits until all ranks have arrived in round `seq`; returns when the last one did.
    pub(crate) fn wait_present(&self, seq: u32, patience: Patience) -> Result<u64, WaitError> {
        self.wait(&self.present, seq, patience)
            .or_else(|error| if self.present.close(seq) { Err(error) } else { Ok(()) })?;
        Ok(self.present.opened_ns.load(Ordering::Relaxed))
    }

    /// The next unit that nobody has claimed, if any is left of `num_units`.
    pub(crate) fn claim_unit(&self, num_units: u32) -> Option<u32> {
        // Stop early when all are taken: the counter must not run away in a long wait.
        if self.claimed.0.load(Ordering::Relaxed) >= num_units {
            return None;
        }
        let unit = self.claimed.0.fetch_add(1, Ordering::Relaxed);
        (unit < num_units).then_some(unit)
    }

    /// Reports a claimed unit as completed; the last one opens the second gate.
    pub(crate) fn complete_unit(&self, seq: u32, num_units: u32) {
        // AcqRel: whoever completes the last unit has all earlier units' writes before it.
        if self.completed.0.fetch_add(1, Ordering::AcqRel) + 1 == num_units {
            self.done.open(seq);
        }
    }

    /// Waits until all units of round `seq` are completed.
    pub(crate) fn wait_done(&self, seq: u32, patience: Patience) -> Result<(), WaitError> {
        self.wait(&self.done, seq, patience)
    }

    /// Notes that `rank` is no longer there, and wakes everybody who may wait for it.
    pub(crate) fn depart(&self, rank: usize, fate: Fate) {
        self.fate[rank].store(fate as u32, Ordering::Relaxed);
        let first = 1 + rank as u32;
        // Release, so that whoever sees the alarm sees the fate. Only the first departure is kept:
        // it is the cause of those that follow.
        let _ = self.alarm.0.compare_exchange(0, first, Ordering::Release, Ordering::Relaxed);
        self.present.wake_all();
        self.done.wake_all();
    }

    /// Whether `rank` left in order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.fate[rank].load(Ordering::Relaxed) == Fate::Left as u32
    }

    /// The ranks below `world` that have not arrived in round `seq`.
    pub(crate) fn missing(&self, seq: u32, world: usize) -> Vec<usize> {
        (0..world).filter(|&rank| self.slot(seq, rank).seq.load(Ordering::Relaxed) != seq).collect()
    }

    fn wait(&self, gate: &Gate, seq: u32, patience: Patience) -> Result<(), WaitError> {
        if gate.is_open(seq) {
            return Ok(());
        }
        let begin = now_ns();
        let spin_ns = patience.spin.as_nanos() as u64;
        let limit_ns = u64::try_from(patience.limit.as_nanos()).unwrap_or(u64::MAX);
        loop {
            let waited = now_ns() - begin;
            if waited >= spin_ns {
                break;
            }
            for _ in 0..32 {
                if gate.is_open(seq) {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        loop {
            let alarm = self.alarm.0.load(Ordering::Acquire);
            // The gate is looked at after the alarm: a rank that left in order may have opened it
            // with its last act, and then there is nothing to be alarmed about.
            if gate.is_open(seq) {
                return Ok(());
            }
            if alarm != 0 {
                let peer = alarm as usize - 1;
                let lost = self.fate[peer].load(Ordering::Relaxed) == Fate::Lost as u32;
                let fate = if lost { Fate::Lost } else { Fate::Left };
                return Err(WaitError::Gone { peer, fate });
            }
            if gate.is_closed() {
                return Err(WaitError::GivenUp);
            }
            let waited = now_ns() - begin;
            if waited >= limit_ns {
                return Err(WaitError::TimedOut);
            }
            gate.sleep(seq, Duration::from_nanos(limit_ns - waited));
        }
    }
}

impl Gate {
    /// Rounds wrap around; a rank is never more than one behind, so the sign of the difference
    /// tells whether the round has come.
    fn has_opened(word: u32, seq: u32) -> bool {
        (word & !CLOSED).wrapping_sub(seq << 1) as i32 >= 0
    }

    fn is_open(&self, seq: u32) -> bool {
        Self::has_opened(self.word.load(Ordering::Acquire), seq)
    }

    fn is_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Opens the gate for round `seq`, unless it has been closed.
    fn open(&self, seq: u32) {
        self.opened_ns.store(now_ns(), Ordering::Relaxed);
        let before = self.word.load(Ordering::Relaxed);
        // SeqCst on both sides (here: open, then look for sleepers; in `sleep`: announce, then look
        // at the gate), so that not both can miss each other. Only `close` can interfere, once.
        let _ = (before & CLOSED == 0).then(|| {
            self.word.compare_exchange(before, seq << 1, Ordering::SeqCst, Ordering::Relaxed)
        });
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    /// Shuts the gate for good, and wakes everybody; false if it had opened for `seq` before.
    fn close(&self, seq: u32) -> bool {
        let before = self.word.fetch_or(CLOSED, Ordering::AcqRel);
        self.wake_all();
        !Self::has_opened(before, seq)
    }

    fn sleep(&self, seq: u32, at_most: Duration) {
        // An alarm may be raised between the caller's look and the futex wait, and its wake-up lost;
        // so never sleep long in one go.
        let nap = at_most.min(Duration::from_millis(50));
        let timeout = futex::Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as _ };
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.word.load(Ordering::SeqCst);
        if !Self::has_opened(seen, seq) && seen & CLOSED == 0 {
            // Whatever ends the nap, the caller looks again.
            let _ = futex::wait(&self.word, futex::Flags::empty(), seen, Some(&timeout));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        // Fails only for an address that is not mapped, which a reference is.
        let _ = futex::wake(&self.word, futex::Flags::empty(), i32::MAX as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const PATIENT: Patience =
        Patience { spin: Duration::from_micros(5), limit: Duration::from_secs(30) };

    #[test]
    fn every_unit_of_every_round_is_done_once_and_seen_by_all() {
        const WORLD: usize = 5;
        const UNITS: u32 = 7;
        let control = Control::default();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let (control, total) = (&control, &total);
                scope.spawn(move || {
                    for seq in 1..=500u32 {
                        control.slot(seq, rank).seq.store(seq, Ordering::Relaxed);
                        control.arrive(seq, WORLD);
                        control.wait_present(seq, PATIENT).unwrap();
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
        let control = Control::default();
        control.slot(1, 0).seq.store(1, Ordering::Relaxed);
        control.arrive(1, 3);
        let short = Patience { limit: Duration::from_millis(20), ..PATIENT };
        assert_eq!(control.wait_present(1, short), Err(WaitError::TimedOut));
        assert_eq!(control.missing(1, 3), [1, 2]);
        let control = &Control::default();
        control.arrive(1, 2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || control.wait_present(1, PATIENT));
            std::thread::sleep(Duration::from_millis(10));
            control.depart(2, Fate::Lost);
            let error = WaitError::Gone { peer: 2, fate: Fate::Lost };
            assert_eq!(waiter.join().unwrap(), Err(error));
        });
    }

    #[test]
    fn a_gate_that_a_rank_gave_up_on_stays_shut() {
        let control = Control::default();
        let short = Patience { spin: Duration::ZERO, limit: Duration::from_millis(5) };
        control.arrive(1, 2);
        assert_eq!(control.wait_present(1, short), Err(WaitError::TimedOut));
        control.arrive(1, 2);
        assert_eq!(control.wait_present(1, PATIENT), Err(WaitError::GivenUp));
    }

    #[test]
    fn rounds_wrap_around() {
        for seq in [u32::MAX - 1, u32::MAX, 0, 1, i32::MAX as u32, 1 << 31] {
            assert!(Gate::has_opened(seq << 1, seq));
            assert!(Gate::has_opened((seq << 1) | CLOSED, seq));
            assert!(Gate::has_opened(seq.wrapping_add(1) << 1, seq));
            assert!(!Gate::has_opened(seq.wrapping_sub(1) << 1, seq));
        }
    }
}
