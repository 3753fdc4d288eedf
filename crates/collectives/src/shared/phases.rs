//! How the ranks of a group wait for each other: the two phases of a barrier, a counter of chunks, and wake-ups.
//!
//! Each round passes through the two *phases* of the barrier. A phase is a word on which ranks sleep (a futex)
//! until the phase completes for their round. A *chunk* is a part of a round's work that one rank claims. A
//! *wake-up* is an event counter on which one rank sleeps until another rank increments it.
//!
//! [`Control`](super::control::Control) defines what a round is, and keeps the barrier and the wake-ups in memory
//! that may be shared between processes. They consist of atomics only and are valid when zeroed. This module
//! knows nothing of calls or data.
//!
//! `models.rs` checks this file with loom:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p paceline-collectives --release --lib loom
//! ```

use std::time::Duration;

use paceline_rendezvous::LONGEST_SLEEP;

use super::fate::WaitError;
use super::sync::{AtomicU32, AtomicU64, Ordering, Word, before_looking_back, now_ns, spin_loop};
use crate::call::Conflict;
use crate::context::{WaitPolicy, Waited};

/// A value on its own cache line, to avoid false sharing between ranks.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct CacheLine<T>(pub T);

/// A word on which ranks sleep until it changes. Waking them takes a system call only if one of them sleeps.
#[repr(C)]
#[derive(Debug, Default)]
struct WatchedWord {
    word: Word,
    /// The number of ranks that sleep, or are about to.
    sleepers: AtomicU32,
}

impl WatchedWord {
    // SeqCst on both sides, so that at least one side sees the other: `wake` follows a change of the word, and reads
    // the count; `sleep` counts the sleeper, and reads the word.

    /// Sleeps, unless the word has a value with which the wait is over. May end early.
    fn sleep(&self, is_over: impl Fn(u32) -> bool, at_most: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        before_looking_back();
        let seen = self.word.load(Ordering::SeqCst);
        if !is_over(seen) {
            self.word.sleep(seen, at_most);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes those who sleep. The caller has changed the word with an order of `SeqCst`.
    fn wake(&self) {
        before_looking_back();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.word.wake_all();
        }
    }
}

/// A phase of the barrier. It completes once per round, and ranks wait until it has completed for their round.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct BarrierPhase {
    /// The latest round for which the phase has completed, shifted left by one. The low bit is [`CLOSED`].
    round: WatchedWord,
    /// When the phase last completed, in nanoseconds of `CLOCK_MONOTONIC`.
    completed_ns: AtomicU64,
}

/// The bit of a phase's word for a closed phase, which will not complete again.
const CLOSED: u32 = 1;

/// The barrier of a group: its two phases, and the counters of the chunks between them. The first phase
/// (`present`) completes when all ranks have arrived, the second (`done`) when all chunks of the round are complete.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Barrier {
    arrived: CacheLine<AtomicU32>,
    present: BarrierPhase,
    claimed: CacheLine<AtomicU32>,
    completed: CacheLine<AtomicU32>,
    done: BarrierPhase,
}

// Processes of the same build share this layout. The types that loom can replace must not change it.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Barrier>() == 5 * 64 && size_of::<WakeUp>() == 64);

impl Barrier {
    pub(super) fn arrive(&self, seq: u32, world: usize) {
        // AcqRel: the last rank to arrive sees every slot. By completing the phase, it makes all slots visible to those that wait.
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == world as u32 {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.claimed.0.store(0, Ordering::Relaxed);
            self.completed.0.store(0, Ordering::Relaxed);
            // Rounds without chunks do not complete the second phase, so its word is brought up to date here. The wrapping
            // comparison would take a word that is too old for one that is ahead.
            self.done.round.word.store(seq.wrapping_sub(1) << 1, Ordering::Relaxed);
            self.present.complete(seq);
        }
    }

    /// Waits until all ranks have arrived in round `seq`. Returns the moment when the last rank arrived. Closes the first
    /// phase for good if the wait fails.
    pub(super) fn wait_present(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm: impl Fn() -> Option<WaitError>,
        has_reported: impl Fn() -> bool,
    ) -> Result<u64, WaitError> {
        self.present
            .wait(seq, policy, alarm, has_reported)
            .or_else(|error| if self.present.close(seq) { Err(error) } else { Ok(()) })?;
        Ok(self.present.completed_ns.load(Ordering::Relaxed))
    }

    pub(super) fn all_present(&self, seq: u32) -> bool {
        self.present.is_complete(seq)
    }

    /// Claims the next of `num_chunks` chunks. `None` if all are claimed.
    pub(super) fn claim_chunk(&self, num_chunks: u32) -> Option<u32> {
        // Checked first, so that repeated calls after the last chunk do not increase the counter without limit.
        if self.claimed.0.load(Ordering::Relaxed) >= num_chunks {
            return None;
        }
        let chunk = self.claimed.0.fetch_add(1, Ordering::Relaxed);
        (chunk < num_chunks).then_some(chunk)
    }

    /// Reports a claimed chunk as complete. The last chunk completes the second phase.
    pub(super) fn complete_chunk(&self, seq: u32, num_chunks: u32) {
        // AcqRel: the writes of all earlier chunks happen before the last completion.
        if self.completed.0.fetch_add(1, Ordering::AcqRel) + 1 == num_chunks {
            self.done.complete(seq);
        }
    }

    pub(super) fn wait_done(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm: impl Fn() -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        self.done.wait(seq, policy, alarm, || false)
    }

    /// Wakes all sleeping ranks to look at the alarm.
    pub(super) fn wake_all(&self) {
        self.present.wake_all();
        self.done.wake_all();
    }
}

impl BarrierPhase {
    /// Waits until the phase has completed for round `seq`. `alarm_now` returns the reason if the phase will never complete.
    /// `has_reported`, called from time to time, looks for such a reason; if there is one, it raises the alarm and returns true.
    fn wait(
        &self,
        seq: u32,
        policy: WaitPolicy,
        alarm_now: impl Fn() -> Option<WaitError>,
        has_reported: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        if self.is_complete(seq) {
            return Ok(());
        }
        let mut waited = Waited::begin(now_ns());
        while waited.until(now_ns()) < policy.spin {
            for _ in 0..32 {
                if self.is_complete(seq) {
                    return Ok(());
                }
                spin_loop();
            }
        }
        loop {
            let alarm = alarm_now();
            // Checked after the alarm: a rank that left in order may have completed the phase
            // just before it left, and then the alarm does not concern this round.
            if self.is_complete(seq) {
                return Ok(());
            }
            if let Some(reason) = alarm {
                return Err(reason);
            }
            if has_reported() {
                continue;
            }
            if self.is_closed() {
                // Asked again: the rank that closed the phase may have seen an alarm that was raised after this rank had looked.
                return Err(alarm_now().unwrap_or(WaitError::GivenUp));
            }
            let left = policy.limit.saturating_sub(waited.until(now_ns()));
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            let is_over = |word| Self::has_completed(word, seq) || word & CLOSED != 0;
            self.round.sleep(is_over, left.min(LONGEST_SLEEP));
        }
    }

    /// Whether a phase with this word has completed for round `seq`. Round numbers wrap around, but a rank is
    /// never more than one round late, so the sign of the difference is enough.
    fn has_completed(word: u32, seq: u32) -> bool {
        (word & !CLOSED).wrapping_sub(seq << 1) as i32 >= 0
    }

    fn is_complete(&self, seq: u32) -> bool {
        Self::has_completed(self.round.word.load(Ordering::Acquire), seq)
    }

    fn is_closed(&self) -> bool {
        self.round.word.load(Ordering::Acquire) & CLOSED != 0
    }

    fn complete(&self, seq: u32) {
        self.completed_ns.store(now_ns(), Ordering::Relaxed);
        let word = &self.round.word;
        let before = word.load(Ordering::Relaxed);
        // Only `close` can interfere, only once, and only in the round for which the phase completes here.
        let _ = (before & CLOSED == 0)
            .then(|| word.compare_exchange(before, seq << 1, Ordering::SeqCst, Ordering::Relaxed));
        self.round.wake();
    }

    /// Closes the phase for good, and wakes all sleepers. Returns false, and leaves the phase usable, if it has already
    /// completed for `seq`.
    fn close(&self, seq: u32) -> bool {
        let mut before = self.round.word.load(Ordering::Acquire);
        while !Self::has_completed(before, seq) {
            let closed = before | CLOSED;
            let order = (Ordering::AcqRel, Ordering::Acquire);
            match self.round.word.compare_exchange(before, closed, order.0, order.1) {
                Ok(_) => {
                    self.wake_all();
                    return true;
                }
                Err(now) => before = now,
            }
        }
        false
    }

    /// Wakes all, also those whose count is not seen yet.
    fn wake_all(&self) {
        self.round.word.wake_all();
    }
}

/// An event counter on which one rank waits outside of the barrier. Other ranks increment it after a change for which the
/// rank may be waiting.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct WakeUp(WatchedWord);

impl WakeUp {
    /// Wakes the rank if it waits. The caller first makes the change that the rank must see.
    pub(super) fn wake(&self) {
        self.0.word.fetch_add(1, Ordering::SeqCst);
        self.0.wake();
    }

    /// Waits until `is_done`, which checks shared words, returns true; a rank that changes them calls
    /// [`WakeUp::wake`]. `alarm` returns the reason if `is_done` will never be true. `stuck`, called from
    /// time to time, looks for such a reason, which `report` then reports to all ranks.
    pub(super) fn wait(
        &self,
        policy: WaitPolicy,
        mut is_done: impl FnMut() -> bool,
        alarm: impl Fn() -> Option<WaitError>,
        stuck: impl Fn() -> Option<Conflict>,
        report: impl Fn(&Conflict),
    ) -> Result<(), WaitError> {
        let mut wait = Waited::begin(now_ns());
        loop {
            let seen = self.0.word.load(Ordering::Acquire);
            if is_done() {
                return Ok(());
            }
            let waited = wait.until(now_ns());
            if waited < policy.spin {
                spin_loop();
                continue;
            }
            if let Some(conflict) = stuck() {
                // The peer may have done its part before it went on to the call that `stuck` found.
                if is_done() {
                    return Ok(());
                }
                report(&conflict);
            }
            if let Some(reason) = alarm() {
                // A rank that left in order may have done its part just before it left.
                return if is_done() { Ok(()) } else { Err(reason) };
            }
            let left = policy.limit.saturating_sub(waited);
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            self.0.sleep(|now| now != seen, left.min(LONGEST_SLEEP));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rounds_wrap_around() {
        for seq in [u32::MAX - 1, u32::MAX, 0, 1, i32::MAX as u32, 1 << 31] {
            assert!(BarrierPhase::has_completed(seq << 1, seq));
            assert!(BarrierPhase::has_completed((seq << 1) | CLOSED, seq));
            assert!(BarrierPhase::has_completed(seq.wrapping_add(1) << 1, seq));
            assert!(!BarrierPhase::has_completed(seq.wrapping_sub(1) << 1, seq));
        }
    }

    #[test]
    fn a_phase_that_completes_while_a_rank_gives_up_completes_again() {
        let phase = BarrierPhase::default();
        phase.complete(1);
        // A rank timed out just before the phase completed.
        assert!(!phase.close(1));
        phase.complete(2);
        assert!(phase.is_complete(2) && !phase.is_closed());
        assert!(phase.close(3));
        phase.complete(3);
        assert!(!phase.is_complete(3) && phase.is_closed());
    }
}
