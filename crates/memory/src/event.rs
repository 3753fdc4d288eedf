//! Points in the work of a stream.
//!
//! Whoever puts work into a [`Stream`](crate::Stream) goes on at once. An event tells when the work is done. It knows what
//! lies behind it, so that later work and the host can be ordered behind it, and keeps the memory of the work in place.
//!
//! Input: whoever runs the work says when it is done. Output: memory is given back, waiters go on. This module knows
//! nothing of what the work is.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use paceline_trace::{Span, lock, now_ns};

use crate::accelerator::{Accelerator, Noted, Point};
use crate::stream::{Clock, Place};
use crate::{Access, Buffer, Device};

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
    place: Place,
    /// What the stream had waited for.
    before: Clock,
    waiter: Waiter,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// What somebody does who waits for the work.
#[derive(Debug)]
pub(crate) enum Waiter {
    /// Sleeps until whoever runs the work says that it is done.
    Sleeps,
    /// Runs it: the device is late.
    Runs(Accelerator),
    /// Asks a card, once the work is in its stream. While it is captured, the uses of memory are noted for the graph.
    Asks { point: OnceLock<Arc<Point>>, captured: Option<Noted> },
}

#[derive(Debug)]
struct Progress {
    state: EventState,
    /// Whether nothing has to come behind the work: it was never put into the stream, or has failed and given its memory back.
    is_withdrawn: bool,
    /// The memory that the work uses.
    kept: Vec<Buffer>,
    /// Work that is done with this work.
    parts: Vec<Signal>,
    /// When the work was done. It took no time if nobody has said when it began.
    ran: Span,
}

impl Event {
    /// An event of work that is done already.
    pub fn complete() -> Self {
        Self(None)
    }

    /// The event of the work at `place`, which the holder of the [`Signal`] runs. The stream has waited for `before`.
    pub(crate) fn pending(place: Place, before: Clock, waiter: Waiter) -> (Self, Signal) {
        let progress = Mutex::new(Progress {
            state: EventState::Pending,
            is_withdrawn: false,
            kept: Vec::new(),
            parts: Vec::new(),
            ran: Span::at(0),
        });
        let flag = Arc::new(Flag { place, before, waiter, progress, changed: Condvar::new() });
        (Self(Some(flag.clone())), Signal(Some(flag)))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// The place of the work, and what lies behind it. `None` if there is nothing to wait for.
    pub(crate) fn order(&self) -> Option<(&Place, &Clock)> {
        self.0.as_ref().map(|flag| (&flag.place, &flag.before))
    }

    /// The work is in the stream of a card, which tells at `point` how far it has come.
    pub(crate) fn ask(&self, point: Arc<Point>) {
        let Some(flag) = &self.0 else { return };
        if let Waiter::Asks { point: place, .. } = &flag.waiter {
            let _ = place.set(point);
            // Whoever looks while the lock is held finds it.
            drop(lock(&flag.progress));
            flag.changed.notify_all();
        }
    }

    /// Where a card tells how far the work has come.
    pub(crate) fn point(&self) -> Option<&Arc<Point>> {
        match &self.0.as_ref()?.waiter {
            Waiter::Asks { point, .. } => point.get(),
            Waiter::Sleeps | Waiter::Runs(_) => None,
        }
    }

    /// Where uses of memory are noted for a graph, if the work is captured and the graph was not launched yet.
    fn captured(&self) -> Option<&Noted> {
        match &self.0.as_ref()?.waiter {
            Waiter::Asks { point, captured } if point.get().is_none() => captured.as_ref(),
            _ => None,
        }
    }

    /// The work of a graph is done with this launch of the graph.
    pub(crate) fn has_parts(&self, parts: Vec<Signal>) {
        let Some(flag) = &self.0 else { return parts.into_iter().for_each(Signal::complete) };
        let mut progress = lock(&flag.progress);
        progress.parts.extend(parts);
        let (state, ran) = (progress.state, progress.ran);
        if state != EventState::Pending {
            let parts = std::mem::take(&mut progress.parts);
            drop(progress);
            tell(parts, state, ran);
        }
    }

    /// How far the work has come, asking the card if there is one, without ordering anything behind it.
    pub(crate) fn poll(&self) -> EventState {
        if let (EventState::Pending, Some(point)) = (self.peek(), self.point()) {
            point.poll();
        }
        self.peek()
    }

    /// How far the work is known to have come, without ordering anything behind it.
    pub(crate) fn peek(&self) -> EventState {
        self.0.as_ref().map_or(EventState::Complete, |flag| lock(&flag.progress).state)
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.as_ref().is_some_and(|flag| lock(&flag.progress).is_withdrawn)
    }

    /// How far the work has come. If it is complete, everything that comes now is ordered behind it.
    pub fn state(&self) -> EventState {
        let state = self.poll();
        self.observe(state);
        state
    }

    /// Blocks until the work is complete or has failed, and returns which of the two. If it is complete, everything that
    /// comes now is ordered behind it.
    pub fn wait(&self) -> EventState {
        let state = self.block();
        self.observe(state);
        state
    }

    /// Blocks until the work is complete or has failed, and returns which of the two. Orders nothing behind it: this is for
    /// threads that run work, whose own stream says what comes behind what.
    pub fn block(&self) -> EventState {
        let Some(flag) = &self.0 else { return EventState::Complete };
        if let (Waiter::Runs(late), EventState::Pending) = (&flag.waiter, self.peek()) {
            late.run_before(self);
        }
        let mut progress = lock(&flag.progress);
        while progress.state == EventState::Pending {
            if let Some(point) = self.point() {
                drop(progress);
                point.wait();
                progress = lock(&flag.progress);
            } else if self.captured().is_some() {
                // It does not run as long as somebody waits for it instead of launching the graph.
                return EventState::Failed;
            } else {
                progress = flag.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
            }
        }
        progress.state
    }

    /// When the work ran, on the clock of [`now_ns`], if it is done.
    pub fn ran(&self) -> Option<Span> {
        let progress = lock(&self.0.as_ref()?.progress);
        (progress.state == EventState::Complete).then_some(progress.ran)
    }

    /// Gives back the memory of work that has failed. Whoever waits for the work still finds that it has failed.
    ///
    /// # Safety
    ///
    /// Nobody touches the memory for this work any longer.
    pub unsafe fn give_back(&self) {
        let Some(flag) = &self.0 else { return };
        let mut progress = lock(&flag.progress);
        if progress.state != EventState::Failed {
            return;
        }
        progress.is_withdrawn = true;
        let kept = std::mem::take(&mut progress.kept);
        drop(progress);
        // Outside of the lock, as in `Flag::settle`.
        drop(kept);
    }

    fn observe(&self, state: EventState) {
        if let (Some(flag), EventState::Complete) = (&self.0, state) {
            flag.before.observe_with(&flag.place);
        }
    }

    /// The work uses a range of memory: keeps it in place, and notes it if the work is captured.
    pub(crate) fn uses(
        &self,
        buffer: &Buffer,
        range: &Range<usize>,
        access: Access,
        op: &'static str,
    ) {
        if let Some(noted) = self.captured() {
            noted.note(buffer, range, access, op);
        }
        self.keep(buffer.clone());
    }

    /// Keeps memory in place until the work is complete. If the work fails, the memory stays until [`Event::give_back`],
    /// because the work may still touch it: a peer that does not know of the failure may write there.
    fn keep(&self, buffer: Buffer) {
        let Some(flag) = &self.0 else { return };
        // The memory of a device goes back to its stream, behind the work.
        if buffer.device() != Device::Cpu {
            return;
        }
        let mut progress = lock(&flag.progress);
        if progress.state != EventState::Complete {
            progress.kept.push(buffer);
        }
    }
}

impl Flag {
    fn settle(&self, state: EventState) {
        let mut progress = lock(&self.progress);
        progress.state = state;
        if progress.ran.end_ns == 0 {
            progress.ran.end_ns = now_ns();
        }
        if progress.ran.start_ns == 0 {
            progress.ran.start_ns = progress.ran.end_ns;
        }
        // What failed work uses stays with the event, which the memory's own history holds: it is not freed by itself.
        let kept = match state {
            EventState::Complete => std::mem::take(&mut progress.kept),
            _ => Vec::new(),
        };
        let (parts, ran) = (std::mem::take(&mut progress.parts), progress.ran);
        drop(progress);
        self.changed.notify_all();
        tell(parts, state, ran);
        // Outside of the lock: the last handle of a buffer asks this event for its state.
        drop(kept);
    }
}

/// Tells the parts of a graph what became of its launch.
fn tell(parts: Vec<Signal>, state: EventState, ran: Span) {
    for part in parts {
        match state {
            EventState::Complete => part.complete_in(ran),
            EventState::Pending | EventState::Failed => part.fail(),
        }
    }
}

/// The right to say that the work before an [`Event`] is done. The work has failed if this is dropped instead, as by a
/// panic.
#[derive(Debug)]
#[must_use = "work whose signal is dropped has failed"]
pub struct Signal(Option<Arc<Flag>>);

impl Signal {
    /// The work begins now.
    pub(crate) fn begin(&self) {
        if let Some(flag) = &self.0 {
            lock(&flag.progress).ran.start_ns = now_ns();
        }
    }

    /// The work is done: gives its memory back, and wakes who waits for it.
    pub fn complete(mut self) {
        if let Some(flag) = self.0.take() {
            flag.settle(EventState::Complete);
        }
    }

    /// The work is done, and ran at these times.
    pub(crate) fn complete_in(self, ran: Span) {
        if let Some(flag) = &self.0 {
            lock(&flag.progress).ran = ran;
        }
        self.complete();
    }

    /// The work is not put into the stream after all, as its memory was refused.
    pub fn withdraw(self) {
        if let Some(flag) = &self.0 {
            lock(&flag.progress).is_withdrawn = true;
        }
        self.complete();
    }

    /// The work has failed: keeps its memory, and wakes who waits for it.
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
    use crate::{Access, Allocator, Category, MemoryError, Stream};

    fn buffer(allocator: &Allocator) -> Buffer {
        allocator.allocate(128, Category::Gradients).unwrap()
    }

    /// Whether the host may write the first half.
    fn is_free(buffer: &Buffer) -> bool {
        buffer.claim(0..64, Access::Write, "linear").is_ok()
    }

    /// Queues an all-reduce of the first half.
    fn all_reduce(stream: &Stream, buffer: &Buffer) -> (Event, Signal) {
        let (event, signal) = stream.submit();
        buffer.queue(0..64, Access::Write, "all_reduce", &event).unwrap();
        (event, signal)
    }

    #[test]
    fn the_host_has_to_wait_for_queued_work_whether_or_not_it_is_done() {
        let (stream, buffer) = (Stream::new("dp"), buffer(&Allocator::new()));
        let (event, signal) = all_reduce(&stream, &buffer);
        let refusal = || buffer.claim(32..96, Access::Read, "sgd").unwrap_err().to_string();
        let words = "bytes 32..96 are written by all_reduce on the stream dp, and sgd does not wait for it: wait for its \
                     event before sgd";
        assert_eq!(refusal(), words);
        assert!(buffer.claim(64..128, Access::Write, "linear").is_ok(), "only the range is used");
        signal.complete();
        assert_eq!(refusal(), words, "it is done, but nobody has waited for it");
        assert_eq!(event.wait(), EventState::Complete);
        assert!(is_free(&buffer));
    }

    #[test]
    fn a_poll_that_finds_the_work_done_orders_like_a_wait() {
        let (stream, buffer) = (Stream::new("dp"), buffer(&Allocator::new()));
        let (event, signal) = all_reduce(&stream, &buffer);
        assert_eq!((event.state(), is_free(&buffer)), (EventState::Pending, false));
        signal.complete();
        assert_eq!((event.state(), is_free(&buffer)), (EventState::Complete, true));
    }

    #[test]
    fn waiting_for_an_event_covers_the_work_of_its_stream_before_it() {
        let (stream, buffers) = (Stream::new("dp"), [0; 3].map(|_| buffer(&Allocator::new())));
        let works = buffers.each_ref().map(|buffer| all_reduce(&stream, buffer));
        let [first, second, third] = works.map(|(event, signal)| {
            signal.complete();
            event
        });
        second.wait();
        assert_eq!(buffers.each_ref().map(is_free), [true, true, false]);
        drop((first, third));
    }

    #[test]
    fn memory_stays_while_work_uses_it_and_nobody_has_to_keep_the_event() {
        let allocator = Allocator::new();
        let buffer = buffer(&allocator);
        let (event, signal) = all_reduce(&Stream::new("dp"), &buffer);
        drop((event, buffer));
        assert_eq!(allocator.total().current_bytes, 128, "the work still writes to it");
        signal.complete();
        assert_eq!(allocator.total().current_bytes, 0);
    }

    #[test]
    fn the_memory_of_failed_work_is_fenced() {
        let allocator = Allocator::new();
        // Said, and not said at all.
        for end in [Signal::fail, drop] {
            let (stream, buffer) = (Stream::new("dp"), buffer(&allocator));
            let (event, signal) = all_reduce(&stream, &buffer);
            end(signal);
            assert_eq!(event.wait(), EventState::Failed);
            let error = buffer.claim(0..1, Access::Read, "sgd").unwrap_err();
            assert!(matches!(error, MemoryError::Fenced { op: "all_reduce", .. }), "{error}");
            // Nor may work of the same stream touch it, and what that waits for does not help.
            let (next, signal) = stream.submit();
            assert!(buffer.queue(0..64, Access::Read, "reduce", &next).is_err());
            signal.complete();
            next.wait();
            assert!(!is_free(&buffer));
        }
        assert_eq!(allocator.total().current_bytes, 256, "peers may still write to both");
    }

    #[test]
    fn failed_work_can_give_its_memory_back() {
        let allocator = Allocator::new();
        let (stream, buffer) = (Stream::new("dp"), buffer(&allocator));
        let (event, signal) = all_reduce(&stream, &buffer);
        // SAFETY: nobody touches the memory in this test.
        unsafe { event.give_back() };
        assert!(!is_free(&buffer), "the work is not over");
        signal.fail();
        assert!(!is_free(&buffer));
        // SAFETY: as above.
        unsafe { event.give_back() };
        assert!(is_free(&buffer));
        assert_eq!(event.wait(), EventState::Failed, "it has failed all the same");
        let (_, signal) = all_reduce(&stream, &buffer);
        signal.complete();
        drop((event, buffer));
        assert_eq!(allocator.total().current_bytes, 0);
    }

    #[test]
    fn work_that_is_done_before_it_is_queued_uses_nothing() {
        let buffer = buffer(&Allocator::new());
        buffer.queue(0..64, Access::Write, "all_reduce", &Event::complete()).unwrap();
        assert!(is_free(&buffer));
    }

    #[test]
    fn a_waiter_wakes_up_and_finds_the_memory_free() {
        let stream = Stream::new("dp");
        for _ in 0..100 {
            let buffer = buffer(&Allocator::new());
            let (event, signal) = all_reduce(&stream, &buffer);
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
