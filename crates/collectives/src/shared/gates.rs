//! How the ranks of a group wait for each other: two gates, a counter of units, and bells.
//!
//! A *gate* is a barrier that opens once per round: a word on which ranks sleep (a futex) until it opens. A
//! *unit* is a piece of work that one rank claims. A *bell* is an event counter on which one rank sleeps
//! until another rank increments it.
//!
//! [`Control`](super::control::Control) defines what a round is and keeps the gates and bells in memory that
//! may be shared between processes. They consist of atomics only and are valid when zeroed. This module
//! knows nothing of calls or data.
//!
//! `models.rs` checks this file with loom:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p paceline-collectives --release --lib loom
//! ```

use std::time::Duration;

use super::fate::WaitError;
use super::sync::{AtomicU32, AtomicU64, Ordering, Word, before_looking_back, now_ns, spin_loop};
use crate::call::Verdict;
use crate::context::{LONGEST_SLEEP, WaitPolicy, Waited};

/// A value on its own cache line, to avoid false sharing between ranks.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Line<T>(pub T);

/// A barrier that opens once per round. Ranks wait at it until it has opened for their round.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// The latest round for which the gate has opened, shifted left by one. The low bit is [`CLOSED`].
    word: Word,
    /// The number of ranks asleep on the word, so that opening needs no system call if all are awake.
    sleepers: AtomicU32,
    /// When the gate last opened, in nanoseconds of `CLOCK_MONOTONIC`.
    opened_ns: AtomicU64,
}

/// The bit of a gate's word that says that the gate will not open again.
const CLOSED: u32 = 1;

/// The two gates of a group, and the counters of the units between them. The first gate (`present`) opens
/// when all ranks have arrived, the second (`done`) when all units of the round are complete.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Gates {
    arrived: Line<AtomicU32>,
    present: Gate,
    claimed: Line<AtomicU32>,
    completed: Line<AtomicU32>,
    done: Gate,
}

// Processes share this layout; they are always of the same build. The check makes sure that the types that
// loom can replace do not change it.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Gates>() == 5 * 64 && size_of::<Bell>() == 64);

impl Gates {
    /// Arrives at the first gate of round `seq`.
    pub(super) fn arrive(&self, seq: u32, world: usize) {
        // AcqRel: the last rank to arrive sees every slot; by opening the gate it makes all slots visible to
        // the ranks that pass the gate.
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == world as u32 {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.claimed.0.store(0, Ordering::Relaxed);
            self.completed.0.store(0, Ordering::Relaxed);
            // Rounds without units do not open the second gate. It is brought up to date here: if it fell
            // too far behind, the wrapping comparison would take it for a gate that is ahead.
            self.done.word.store(seq.wrapping_sub(1) << 1, Ordering::Relaxed);
            self.present.open(seq);
        }
    }

    /// Waits until all ranks have arrived in round `seq`. Returns the moment when the last one arrived. If
    /// the wait fails, closes the gate for good.
    pub(super) fn wait_present(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm: impl Fn() -> Option<WaitError>,
        has_accused: impl Fn() -> bool,
    ) -> Result<u64, WaitError> {
        self.present
            .wait(seq, policy, alarm, has_accused)
            .or_else(|error| if self.present.close(seq) { Err(error) } else { Ok(()) })?;
        Ok(self.present.opened_ns.load(Ordering::Relaxed))
    }

    /// Whether all ranks have arrived in round `seq`.
    pub(super) fn all_present(&self, seq: u32) -> bool {
        self.present.is_open(seq)
    }

    /// Claims the next of `num_units` units. `None` if all are claimed.
    pub(super) fn claim_unit(&self, num_units: u32) -> Option<u32> {
        // Checked first, so that repeated calls after the last unit do not increase the counter without
        // limit.
        if self.claimed.0.load(Ordering::Relaxed) >= num_units {
            return None;
        }
        let unit = self.claimed.0.fetch_add(1, Ordering::Relaxed);
        (unit < num_units).then_some(unit)
    }

    /// Reports a claimed unit as complete. Completing the last unit opens the second gate.
    pub(super) fn complete_unit(&self, seq: u32, num_units: u32) {
        // AcqRel: the writes of all earlier units happen before the last completion.
        if self.completed.0.fetch_add(1, Ordering::AcqRel) + 1 == num_units {
            self.done.open(seq);
        }
    }

    /// Waits until all units of round `seq` are complete.
    pub(super) fn wait_done(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm: impl Fn() -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        self.done.wait(seq, policy, alarm, || false)
    }

    /// Wakes all sleeping ranks, so that they look at the alarm.
    pub(super) fn wake_all(&self) {
        self.present.wake_all();
        self.done.wake_all();
    }
}

impl Gate {
    /// Waits until the gate has opened for round `seq`. `alarm` returns the reason if the gate will never
    /// open. `has_accused`, called from time to time, looks for such a reason; if it finds one, it raises the
    /// alarm and returns true.
    fn wait(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm: impl Fn() -> Option<WaitError>,
        has_accused: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        if self.is_open(seq) {
            return Ok(());
        }
        let mut waited = Waited::begin(now_ns());
        while waited.until(now_ns()) < policy.spin {
            for _ in 0..32 {
                if self.is_open(seq) {
                    return Ok(());
                }
                spin_loop();
            }
        }
        loop {
            let alarm = alarm();
            // The gate is checked after the alarm: a rank that left in order may have opened the gate just
            // before, and then the alarm does not concern this round.
            if self.is_open(seq) {
                return Ok(());
            }
            if let Some(reason) = alarm {
                return Err(reason);
            }
            if has_accused() {
                continue;
            }
            if self.is_closed() {
                return Err(WaitError::GivenUp);
            }
            let left = policy.limit.saturating_sub(waited.until(now_ns()));
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            self.sleep(seq, left.min(LONGEST_SLEEP));
        }
    }

    /// Whether a gate with this word has opened for round `seq`. Round numbers wrap around, but a rank is
    /// never more than one round behind, so the sign of the difference tells.
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
        // SeqCst on both sides, so that at least one side sees the other: here the gate opens and then
        // sleepers are counted; in `sleep` the sleeper is counted and then the gate is checked. Only `close`
        // can interfere, only once, and only in the round for which the gate opens here.
        let _ = (before & CLOSED == 0).then(|| {
            self.word.compare_exchange(before, seq << 1, Ordering::SeqCst, Ordering::Relaxed)
        });
        before_looking_back();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    /// Closes the gate for good, and wakes all sleepers. If the gate has already opened for `seq`, it stays
    /// usable for later rounds, and this returns false.
    fn close(&self, seq: u32) -> bool {
        let mut before = self.word.load(Ordering::Acquire);
        while !Self::has_opened(before, seq) {
            let closed = before | CLOSED;
            let order = (Ordering::AcqRel, Ordering::Acquire);
            match self.word.compare_exchange(before, closed, order.0, order.1) {
                Ok(_) => {
                    self.wake_all();
                    return true;
                }
                Err(now) => before = now,
            }
        }
        false
    }

    fn sleep(&self, seq: u32, at_most: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        before_looking_back();
        let seen = self.word.load(Ordering::SeqCst);
        if !Self::has_opened(seen, seq) && seen & CLOSED == 0 {
            self.word.sleep(seen, at_most);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        self.word.wake(i32::MAX as u32);
    }
}

/// An event counter on which one rank waits outside of the gates. Other ranks increment it after they have
/// changed something that the rank may be waiting for.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Bell(Word);

impl Bell {
    /// Wakes the rank if it waits. The caller first makes the change that the rank shall see.
    pub(super) fn ring(&self) {
        self.0.fetch_add(1, Ordering::Release);
        self.0.wake(1);
    }

    /// Waits until `is_done`, which checks shared words; whoever changes them rings the bell. `alarm` returns
    /// the reason if that will never happen. `stuck`, called from time to time, looks for such a reason,
    /// which `accuse` then reports to all ranks.
    pub(super) fn wait(
        &self,
        policy: WaitPolicy,
        mut is_done: impl FnMut() -> bool,
        alarm: impl Fn() -> Option<WaitError>,
        stuck: impl Fn() -> Option<Verdict>,
        accuse: impl Fn(&Verdict),
    ) -> Result<(), WaitError> {
        let mut wait = Waited::begin(now_ns());
        loop {
            let heard = self.0.load(Ordering::Acquire);
            if is_done() {
                return Ok(());
            }
            let waited = wait.until(now_ns());
            if waited < policy.spin {
                spin_loop();
                continue;
            }
            if let Some(verdict) = stuck() {
                // The peer may have done its part before it went on to the call that looks like the reason.
                if is_done() {
                    return Ok(());
                }
                accuse(&verdict);
            }
            if let Some(reason) = alarm() {
                // A rank that left in order may have done its part just before it left.
                return if is_done() { Ok(()) } else { Err(reason) };
            }
            let left = policy.limit.saturating_sub(waited);
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            self.0.sleep(heard, left.min(LONGEST_SLEEP));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rounds_wrap_around() {
        for seq in [u32::MAX - 1, u32::MAX, 0, 1, i32::MAX as u32, 1 << 31] {
            assert!(Gate::has_opened(seq << 1, seq));
            assert!(Gate::has_opened((seq << 1) | CLOSED, seq));
            assert!(Gate::has_opened(seq.wrapping_add(1) << 1, seq));
            assert!(!Gate::has_opened(seq.wrapping_sub(1) << 1, seq));
        }
    }

    #[test]
    fn a_gate_that_opens_while_a_rank_gives_up_opens_again() {
        let gate = Gate::default();
        gate.open(1);
        // A rank timed out just before the gate opened.
        assert!(!gate.close(1));
        gate.open(2);
        assert!(gate.is_open(2) && !gate.is_closed());
        assert!(gate.close(3));
        gate.open(3);
        assert!(!gate.is_open(3) && gate.is_closed());
    }
}
