//! Events: points in the work of a stream.
//!
//! A thread that submits work to a [`Stream`](crate::Stream) goes on at once. An event shows when the work is done, orders later
//! work and the host after it, and keeps the memory of the work in place.
//!
//! Input: the runner of the work reports its end. Output: memory is given back, waiters go on. This module knows neither the
//! work nor who runs it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use paceline_cuda as cuda;
use paceline_trace::runtime::Condvar;
use paceline_trace::{Span, lock, now_ns};

use super::order::{StreamPosition, VectorClock};
use super::used_memory::{CapturedUse, UsedMemory};

/// A point in the work of a stream. Clones stand for the same point.
#[derive(Clone, Debug)]
pub struct Event(
    /// `None` if there is nothing to wait for.
    Option<Arc<SharedEvent>>,
);

/// How far the work has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventState {
    /// The work is not done yet.
    #[default]
    Pending,
    /// The work is done.
    Complete,
    /// The work has failed, and may still touch its memory.
    Failed,
}

struct SharedEvent {
    position: StreamPosition,
    /// Positions of other streams that come before the work.
    before: VectorClock,
    /// Empty if waiters sleep until the end is reported, and until a card has the work.
    runner: OnceLock<Arc<dyn WorkRunner>>,
    /// The pool of the graph for which the work is captured.
    graph_pool: Option<u32>,
    /// Whether the work is in its stream for good.
    is_committed: AtomicBool,
    progress: Mutex<WorkProgress>,
    changed: Condvar,
}

/// A runner of work that reports no end by itself: waiters have to call it.
pub(crate) trait WorkRunner: Send + Sync {
    /// Settles the work if it is done.
    fn poll(&self) {}

    /// Runs the work before `event`, or blocks until it is done, and settles it.
    fn wait(&self, event: &Event);

    fn card_event(&self) -> Option<&cuda::Event> {
        None
    }
}

#[derive(Default)]
struct WorkProgress {
    state: EventState,
    /// Whether later work may ignore this work: it never came into the stream, or it failed and gave its memory back.
    is_withdrawn: bool,
    kept: Vec<Arc<dyn UsedMemory>>,
    /// Uses of memory outside of the graph pool by captured work.
    captured: Vec<CapturedUse>,
    /// Work that is done with this work.
    parts: Vec<Signal>,
    /// When the work ran. It takes no time if its beginning is not reported.
    ran: Span,
}

impl Event {
    /// An event of work that is done already.
    pub fn complete() -> Self {
        Self(None)
    }

    /// The event of the work at `position`, which the holder of the [`Signal`] ends.
    pub(super) fn pending(
        position: StreamPosition,
        before: VectorClock,
        runner: Option<Arc<dyn WorkRunner>>,
        graph_pool: Option<u32>,
    ) -> (Self, Signal) {
        let runner = runner.map_or_else(OnceLock::new, OnceLock::from);
        let (is_committed, progress, changed) = Default::default();
        let shared = Arc::new(SharedEvent {
            position,
            before,
            runner,
            graph_pool,
            is_committed,
            progress,
            changed,
        });
        (Self(Some(shared.clone())), Signal(Some(shared)))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        matches!((&self.0, &other.0), (Some(a), Some(b)) if Arc::ptr_eq(a, b))
    }

    /// The position of the work, and the positions of other streams before it. `None` if there is nothing to wait for.
    pub(crate) fn order(&self) -> Option<(&StreamPosition, &VectorClock)> {
        self.0.as_ref().map(|shared| (&shared.position, &shared.before))
    }

    /// A runner has the work from now on.
    pub(crate) fn set_runner(&self, runner: Arc<dyn WorkRunner>) {
        let Some(shared) = &self.0 else { return };
        let _ = shared.runner.set(runner);
        // A waiter that holds the lock has seen no runner yet, and must be asleep before it is notified.
        drop(lock(&shared.progress));
        shared.changed.notify_all();
    }

    pub(crate) fn runner(&self) -> Option<&Arc<dyn WorkRunner>> {
        self.0.as_ref()?.runner.get()
    }

    /// The card's event after the work, if the work is in the stream of a card.
    pub(super) fn card_event(&self) -> Option<&cuda::Event> {
        self.runner()?.card_event()
    }

    /// Notes a use of memory outside of the graph's pool, if the work is captured and its graph was not launched yet.
    pub(crate) fn note_use(&self, graph_pool: Option<u32>, used: impl FnOnce() -> CapturedUse) {
        if let Some(shared) = &self.0
            && shared.graph_pool.is_some_and(|own| graph_pool != Some(own))
            && shared.runner.get().is_none()
        {
            lock(&shared.progress).captured.push(used());
        }
    }

    pub(crate) fn take_captured(&self) -> Vec<CapturedUse> {
        let taken =
            |shared: &Arc<SharedEvent>| std::mem::take(&mut lock(&shared.progress).captured);
        self.0.as_ref().map(taken).unwrap_or_default()
    }

    /// The captured work of a graph is done with this launch of the graph.
    pub(crate) fn add_parts(&self, parts: Vec<Signal>) {
        parts.iter().for_each(Signal::commit);
        let Some(shared) = &self.0 else { return parts.into_iter().for_each(Signal::complete) };
        let mut progress = lock(&shared.progress);
        progress.parts.extend(parts);
        let (state, ran) = (progress.state, progress.ran);
        if state != EventState::Pending {
            let parts = std::mem::take(&mut progress.parts);
            drop(progress);
            settle_parts(parts, state, ran);
        }
    }

    /// How far the work has come, by its runner. Orders nothing after it.
    pub(crate) fn poll(&self) -> EventState {
        if let (EventState::Pending, Some(runner)) = (self.peek(), self.runner()) {
            runner.poll();
        }
        self.peek()
    }

    /// How far the work is known to have come. Orders nothing after it.
    pub(crate) fn peek(&self) -> EventState {
        self.0.as_ref().map_or(EventState::Complete, |shared| lock(&shared.progress).state)
    }

    /// Whether later work may rely on the order of this work.
    pub(crate) fn is_committed(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.is_committed.load(Ordering::Acquire))
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| lock(&shared.progress).is_withdrawn)
    }

    /// How far the work has come. If it is complete, later work of any kind is ordered after it.
    pub fn state(&self) -> EventState {
        let state = self.poll();
        self.observe(state);
        state
    }

    /// Blocks until the work is complete or has failed, and returns which. If it is complete, later work of any kind is ordered
    /// after it.
    pub fn wait(&self) -> EventState {
        let state = self.block();
        self.observe(state);
        state
    }

    /// Like [`Event::wait`], but orders nothing after the work: for threads that run work, whose own stream has the order.
    pub fn block(&self) -> EventState {
        let Some(shared) = &self.0 else { return EventState::Complete };
        let mut progress = lock(&shared.progress);
        while progress.state == EventState::Pending {
            if let Some(runner) = shared.runner.get() {
                drop(progress);
                runner.wait(self);
                progress = lock(&shared.progress);
            } else if shared.graph_pool.is_some() {
                // Captured work does not run before its graph is launched.
                return EventState::Failed;
            } else {
                progress = shared.changed.wait(&shared.progress, progress, None);
            }
        }
        progress.state
    }

    /// When the work ran, on the clock of [`now_ns`], if it is complete.
    pub fn ran(&self) -> Option<Span> {
        let progress = lock(&self.0.as_ref()?.progress);
        (progress.state == EventState::Complete).then_some(progress.ran)
    }

    /// Gives back the memory of work that has failed. A wait for the work still returns that it has failed.
    ///
    /// # Safety
    ///
    /// Nobody touches the memory for this work any longer.
    pub unsafe fn give_back(&self) {
        let Some(shared) = &self.0 else { return };
        let mut progress = lock(&shared.progress);
        if progress.state != EventState::Failed {
            return;
        }
        progress.is_withdrawn = true;
        let kept = std::mem::take(&mut progress.kept);
        drop(progress);
        // Outside of the lock, as in `SharedEvent::settle`.
        drop(kept);
    }

    fn observe(&self, state: EventState) {
        // Withdrawn work is complete at once, and the work before it need not be.
        if let (Some(shared), EventState::Complete, false) = (&self.0, state, self.is_withdrawn()) {
            shared.before.observe();
            shared.position.observe();
        }
    }

    /// Keeps memory in place until the work is complete. If the work fails, the memory stays until [`Event::give_back`],
    /// because the work may still touch it: a peer that does not know of the failure may write there.
    pub(crate) fn keep(&self, memory: Arc<dyn UsedMemory>) {
        let Some(shared) = &self.0 else { return };
        let mut progress = lock(&shared.progress);
        if progress.state != EventState::Complete {
            progress.kept.push(memory);
        }
    }
}

impl SharedEvent {
    fn settle(&self, state: EventState, ran: Span) {
        let mut progress = lock(&self.progress);
        (progress.state, progress.ran) = (state, ran);
        // Memory of failed work stays with the event, which the memory's own history holds: it is not freed by itself.
        let kept = match state {
            EventState::Complete => std::mem::take(&mut progress.kept),
            _ => Vec::new(),
        };
        let captured = std::mem::take(&mut progress.captured);
        let parts = std::mem::take(&mut progress.parts);
        drop(progress);
        self.changed.notify_all();
        settle_parts(parts, state, ran);
        // Outside of the lock: the last handle of a buffer asks this event for its state.
        drop((kept, captured));
    }
}

impl fmt::Debug for SharedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.position.fmt(f)
    }
}

/// Settles the parts of a graph as its launch.
fn settle_parts(parts: Vec<Signal>, state: EventState, ran: Span) {
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
pub struct Signal(Option<Arc<SharedEvent>>);

impl Signal {
    /// The work is in its stream, and is not withdrawn any more.
    pub fn commit(&self) {
        if let Some(shared) = &self.0 {
            shared.is_committed.store(true, Ordering::Release);
        }
    }

    /// The work is done: gives its memory back, and wakes who waits for it.
    pub fn complete(self) {
        self.commit();
        self.complete_in(Span::at(now_ns()));
    }

    /// The work is done, and ran at these times.
    pub(super) fn complete_in(mut self, ran: Span) {
        if let Some(shared) = self.0.take() {
            shared.settle(EventState::Complete, ran);
        }
    }

    /// The work does not come into the stream, for example because its memory was refused.
    pub fn withdraw(self) {
        if let Some(shared) = &self.0 {
            lock(&shared.progress).is_withdrawn = true;
        }
        self.complete_in(Span::at(now_ns()));
    }

    /// The work has failed: keeps its memory, and wakes who waits for it.
    pub fn fail(self) {
        drop(self);
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.settle(EventState::Failed, Span::at(now_ns()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::{Access, Allocator, Buffer, Category, MemoryError, Stream};

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
        for end in [Signal::fail, drop] {
            let (stream, buffer) = (Stream::new("dp"), buffer(&allocator));
            let (event, signal) = all_reduce(&stream, &buffer);
            end(signal);
            assert_eq!(event.wait(), EventState::Failed);
            let error = buffer.claim(0..1, Access::Read, "sgd").unwrap_err();
            assert!(matches!(error, MemoryError::Fenced { op: "all_reduce", .. }), "{error}");
            // Work of the same stream may not touch it either, whatever it waits for.
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
    fn withdrawn_work_leaves_the_uses_before_it() {
        for access in [Access::Read, Access::Write] {
            let (stream, buffer) = (Stream::new("dp"), buffer(&Allocator::new()));
            let (event, signal) = stream.submit();
            buffer.queue(0..64, access, "all_gather", &event).unwrap();
            let (refused, withdrawn) = stream.submit();
            buffer.queue(32..96, access, "reduce_scatter", &refused).unwrap();
            withdrawn.withdraw();
            refused.wait();
            assert!(!is_free(&buffer), "all_gather uses it still");
            let copies = Stream::new("copy");
            copies.wait(&refused);
            let (copied, copying) = copies.submit();
            assert!(buffer.queue(0..64, Access::Write, "copy", &copied).is_err());
            copying.withdraw();
            assert!(buffer.claim(64..128, Access::Write, "linear").is_ok());
            signal.complete();
            event.wait();
            assert!(is_free(&buffer));
        }
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
