//! Points in the work of a stream, and the claims that last until the work has come there.
//!
//! A stream carries out work in order: a thread of the processor today, a queue of a graphics card later. Whoever puts
//! work into a stream goes on at once, so nobody is there to hold the claims on the memory of the work. They are handed
//! to an event instead ([`Claim::until`]).
//!
//! Input: whoever runs the work says when it is done. Output: claims are given back, waiters go on. This module knows
//! nothing of what the work is.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::Claim;

/// A point in the work of a stream. Clones stand for the same point.
#[derive(Clone, Debug)]
pub struct Event(
    /// `None` if there is nothing to wait for.
    Option<Arc<Flag>>,
);

/// How far the work has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventState {
    /// The work is not done yet.
    Pending,
    /// The work is done.
    Complete,
    /// The work has failed. Nobody knows what it still does to its memory.
    Failed,
}

#[derive(Debug)]
struct Flag {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    state: EventState,
    /// What is given back when the work is done.
    claims: Vec<Claim>,
}

impl Event {
    /// An event of work that is done already.
    pub fn complete() -> Self {
        Self(None)
    }

    /// An event of work that the holder of the [`Signal`] runs.
    pub fn pending() -> (Self, Signal) {
        let progress = Progress { state: EventState::Pending, claims: Vec::new() };
        let flag = Arc::new(Flag { progress: Mutex::new(progress), changed: Condvar::new() });
        (Self(Some(flag.clone())), Signal(Some(flag)))
    }

    /// How far the work has come. When this is no longer [`EventState::Pending`], the claims of work that is complete
    /// have been given back.
    pub fn state(&self) -> EventState {
        self.0.as_ref().map_or(EventState::Complete, |flag| flag.progress().state)
    }

    /// Blocks until the work is complete or has failed, and returns which of the two.
    pub fn wait(&self) -> EventState {
        let Some(flag) = &self.0 else { return EventState::Complete };
        let mut progress = flag.progress();
        while progress.state == EventState::Pending {
            progress = flag.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress.state
    }

    /// See [`Claim::until`].
    pub(crate) fn keep(&self, claim: Claim) {
        let Some(flag) = &self.0 else { return };
        let mut progress = flag.progress();
        match progress.state {
            EventState::Pending => progress.claims.push(claim),
            EventState::Complete => {}
            EventState::Failed => std::mem::forget(claim),
        }
    }
}

impl Flag {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, state: EventState) {
        let mut progress = self.progress();
        let claims = std::mem::take(&mut progress.claims);
        match state {
            // Under the lock: whoever learns that the work is done finds its memory free.
            EventState::Complete => drop(claims),
            _ => std::mem::forget(claims),
        }
        progress.state = state;
        drop(progress);
        self.changed.notify_all();
    }
}

/// The right to say that the work before an [`Event`] is done. The work has failed if this is dropped instead, as by a
/// panic.
#[derive(Debug)]
#[must_use = "work whose signal is dropped has failed"]
pub struct Signal(Option<Arc<Flag>>);

impl Signal {
    /// The work is done: gives the claims of the event back, then wakes who waits for it.
    pub fn complete(mut self) {
        if let Some(flag) = self.0.take() {
            flag.settle(EventState::Complete);
        }
    }

    /// The work has failed: keeps the claims of the event for ever, and wakes who waits for it.
    pub fn fail(self) {
        drop(self);
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        if let Some(flag) = self.0.take() {
            flag.settle(EventState::Failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::{Access, Allocator, Buffer, Category};

    fn buffer(allocator: &Allocator) -> Buffer {
        allocator.host(128, Category::Gradients).unwrap()
    }

    /// Whether the first half can be written.
    fn is_free(buffer: &Buffer) -> bool {
        buffer.claim(0..64, Access::Write, "linear").is_ok()
    }

    #[test]
    fn a_claim_lasts_until_the_event_has_come() {
        let (first, second) = (buffer(&Allocator::new()), buffer(&Allocator::new()));
        let (event, signal) = Event::pending();
        for buffer in [&first, &second] {
            buffer.claim(0..64, Access::Write, "all_reduce").unwrap().until(&event);
        }
        let error = first.claim(32..96, Access::Read, "sgd").unwrap_err().to_string();
        assert!(error.contains("claimed for all_reduce"), "{error}");
        assert!(first.claim(64..128, Access::Write, "linear").is_ok(), "only the range is claimed");
        assert_eq!((event.state(), is_free(&second)), (EventState::Pending, false));
        signal.complete();
        assert_eq!(event.state(), EventState::Complete);
        assert!(is_free(&first) && is_free(&second));
    }

    #[test]
    fn the_claim_keeps_the_memory_and_nobody_has_to_keep_the_event() {
        let allocator = Allocator::new();
        let buffer = buffer(&allocator);
        let (event, signal) = Event::pending();
        buffer.claim(0..64, Access::Write, "all_reduce").unwrap().until(&event);
        drop((event, buffer));
        assert_eq!(allocator.total().current_bytes, 128, "the work still writes to it");
        signal.complete();
        assert_eq!(allocator.total().current_bytes, 0);
    }

    #[test]
    fn failed_work_never_gives_its_claims_back() {
        let allocator = Allocator::new();
        // Said, and not said at all.
        for end in [Signal::fail, drop] {
            let buffer = buffer(&allocator);
            let (event, signal) = Event::pending();
            buffer.claim(0..64, Access::Write, "all_reduce").unwrap().until(&event);
            end(signal);
            assert_eq!((event.wait(), is_free(&buffer)), (EventState::Failed, false));
            // A claim that comes too late stays as well.
            buffer.claim(64..128, Access::Write, "reduce").unwrap().until(&event);
            drop(event);
            let error = buffer.claim(64..65, Access::Read, "sgd").unwrap_err().to_string();
            assert!(error.contains("claimed for reduce"), "{error}");
        }
        assert_eq!(allocator.total().current_bytes, 256, "peers may still write to both");
    }

    #[test]
    fn claims_on_what_is_done_are_given_back_at_once() {
        let buffer = buffer(&Allocator::new());
        let (event, signal) = Event::pending();
        signal.complete();
        for event in [event, Event::complete()] {
            buffer.claim(0..64, Access::Write, "all_reduce").unwrap().until(&event);
            assert_eq!((event.wait(), is_free(&buffer)), (EventState::Complete, true));
        }
    }

    #[test]
    fn a_waiter_wakes_up_and_finds_the_memory_free() {
        for _ in 0..100 {
            let buffer = buffer(&Allocator::new());
            let (event, signal) = Event::pending();
            buffer.claim(0..64, Access::Write, "all_reduce").unwrap().until(&event);
            let (tell, told) = mpsc::channel();
            let waiter = std::thread::spawn(move || {
                let _ = tell.send((event.wait(), is_free(&buffer)));
            });
            signal.complete();
            let found = told.recv_timeout(Duration::from_secs(60));
            assert_eq!(found, Ok((EventState::Complete, true)), "the waiter has not woken up");
            waiter.join().unwrap();
        }
    }
}
