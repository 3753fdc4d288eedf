//! Work on a card.
//!
//! The driver runs the work of a stream in order. An event of the card follows each piece of work. Waiters query it, and later
//! submissions query the oldest one, so that memory of the host is given back after its use. A card measures times from one of
//! its events to the next; they are put on the host's clock at a moment when the card is known to be idle.
//!
//! A card waits for work of the host, such as a collective, only once that is done: until then a thread keeps the work that has
//! to wait, and all later work of the same stream. The driver could wait itself, by a blocking function of the host, but it calls
//! these one at a time for all streams of a process, so two ranks would deadlock. Work that a thread keeps counts as work of the
//! host for other streams that wait for it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use paceline_cuda as cuda;
use paceline_trace::{Span, lock, now_ns};

use super::event::{Event, EventState, WorkRunner};
use super::timed::WorkerThread;
use super::work::{Body, CompletionReport, FirstFailure, QueuedWork};
use crate::{MemoryError, Result};

/// Submits work to a stream of a card.
pub(super) struct Submitter {
    name: String,
    queue: Arc<CardQueue>,
    /// Submits work that waits for the host, and the work after it.
    later: OnceLock<WorkerThread>,
    /// The pieces of work that the thread still has.
    num_later: Arc<AtomicUsize>,
}

/// A stream of a card, and the work in it that is not known to be done.
struct CardQueue {
    stream: cuda::Stream,
    failure: Arc<FirstFailure>,
    pending: Mutex<PendingWork>,
}

struct PendingWork {
    /// Oldest first.
    events: VecDeque<Arc<CardEvent>>,
    /// An event that is done, and its time on the host's clock.
    known: (cuda::Event, u64),
}

/// The events of a card around a piece of work, and its completion.
struct CardEvent {
    started: Option<cuda::Event>,
    done: cuda::Event,
    queue: Arc<CardQueue>,
    completion: Mutex<Option<CompletionReport>>,
}

/// The most pieces of work that are pending before the oldest is queried.
const MOST_PENDING: usize = 64;

impl Submitter {
    pub(super) fn new(card: &cuda::Card, name: &str, failure: Arc<FirstFailure>) -> Result<Self> {
        let (queue, num_later) = (Arc::new(CardQueue::new(card, failure)?), Arc::default());
        Ok(Self { name: name.to_owned(), queue, later: OnceLock::new(), num_later })
    }

    pub(super) fn stream(&self) -> &cuda::Stream {
        &self.queue.stream
    }

    /// Whether all work is in the stream.
    pub(super) fn is_up_to_date(&self) -> bool {
        self.num_later.load(Ordering::Acquire) == 0
    }

    /// Puts work into the stream, now or once the host has done the work before it. No two threads do so at a time.
    pub(super) fn push(&self, work: QueuedWork) {
        let is_of_host =
            |event: &Event| event.card_event().is_none() && event.peek() == EventState::Pending;
        if self.is_up_to_date() && !work.waits.iter().any(is_of_host) {
            return self.queue.push(work, false);
        }
        let thread = match self.later.get() {
            Some(thread) => thread,
            None => match self.start() {
                Ok(thread) => self.later.get_or_init(|| thread),
                Err(error) => {
                    self.queue.failure.set(MemoryError::NoThread(error).to_string());
                    return work.completion.signal.fail();
                }
            },
        };
        self.num_later.fetch_add(1, Ordering::Relaxed);
        thread.push(work);
    }

    fn start(&self) -> std::io::Result<WorkerThread> {
        let (queue, num_later) = (self.queue.clone(), self.num_later.clone());
        WorkerThread::start(format!("card-{}", self.name), move |work| {
            let pushed = catch_unwind(AssertUnwindSafe(|| match queue.failure.check() {
                Ok(()) => queue.push(work, true),
                Err(_) => work.completion.signal.fail(),
            }));
            if let Err(panic) = pushed {
                queue.failure.set_panic("work of a card", &*panic);
            }
            num_later.fetch_sub(1, Ordering::Release);
        })
    }
}

impl CardQueue {
    fn new(card: &cuda::Card, failure: Arc<FirstFailure>) -> Result<Self> {
        let (stream, begun) = (cuda::Stream::new(card)?, cuda::Event::new(card)?);
        stream.record(&begun)?;
        begun.synchronize()?;
        let pending = PendingWork { events: VecDeque::new(), known: (begun, now_ns()) };
        Ok(Self { stream, failure, pending: Mutex::new(pending) })
    }

    /// Puts work into the stream, once the host has done the work before it. `is_later` if the thread that submitted it has not
    /// waited for that.
    fn push(self: &Arc<Self>, work: QueuedWork, is_later: bool) {
        let QueuedWork { waits, body, event, mut completion, .. } = work;
        let submitted = self.submit(&waits, body, completion.traced.is_some());
        if let Some((launched, _)) = completion.traced.as_mut().filter(|_| !is_later) {
            launched.end_ns = now_ns();
        }
        let (started, done) = match submitted {
            Ok(events) => events,
            Err(message) => {
                self.failure.set(message);
                return completion.signal.fail();
            }
        };
        let (queue, completion) = (self.clone(), Mutex::new(Some(completion)));
        let on_card = Arc::new(CardEvent { started, done, queue, completion });
        let is_full = {
            let mut pending = lock(&self.pending);
            pending.events.push_back(on_card.clone());
            pending.events.len() > MOST_PENDING
        };
        event.set_runner(on_card);
        if is_full {
            self.settle_done();
        }
    }

    /// Submits to the driver. Returns the events around the work.
    fn submit(
        &self,
        waits: &[Event],
        body: Body,
        is_timed: bool,
    ) -> Result<(Option<cuda::Event>, cuda::Event), String> {
        let words = |error: cuda::CudaError| error.to_string();
        for event in waits {
            match event.card_event() {
                Some(done) => self.stream.wait(done).map_err(words)?,
                None if event.block() == EventState::Complete => {}
                None => return Err("work that the card waits for has failed".to_owned()),
            }
        }
        let record = || {
            let event = cuda::Event::new(self.stream.card())?;
            self.stream.record(&event)?;
            Ok(event)
        };
        let started = is_timed.then(record).transpose().map_err(words)?;
        body()?;
        Ok((started, record().map_err(words)?))
    }

    /// Settles work that is done, oldest first.
    fn settle_done(&self) {
        loop {
            let Some(oldest) = lock(&self.pending).events.front().cloned() else { return };
            if !oldest.settle_if_done() {
                return;
            }
        }
    }

    /// Settles the work up to `last`, which is done.
    fn settle_to(&self, last: &CardEvent) {
        loop {
            // The lock is not held while memory is given back, which may submit work.
            let (completion, ran) = {
                let mut pending = lock(&self.pending);
                if lock(&last.completion).is_none() {
                    return;
                }
                let Some(oldest) = pending.events.pop_front() else { return };
                let ran = pending.times(&oldest);
                (lock(&oldest.completion).take(), ran)
            };
            let Some(completion) = completion else { continue };
            match self.failure.check() {
                Ok(()) => completion.complete(ran),
                Err(_) => completion.signal.fail(),
            }
        }
    }

    /// The card has failed: no pending work will be done.
    fn fail_all(&self, error: &cuda::CudaError) {
        self.failure.set(error.to_string());
        let events = std::mem::take(&mut lock(&self.pending).events);
        events
            .iter()
            .filter_map(|event| lock(&event.completion).take())
            .for_each(|completion| completion.signal.fail());
    }
}

impl PendingWork {
    /// When the oldest work, which is done, ran.
    fn times(&mut self, oldest: &CardEvent) -> Span {
        let (known, known_ns) = &self.known;
        let after =
            |event: &cuda::Event| event.ns_since(known).map_or(*known_ns, |ns| known_ns + ns);
        let end_ns = after(&oldest.done);
        let start_ns = oldest.started.as_ref().map_or(end_ns, after);
        self.known = (oldest.done.clone(), end_ns);
        Span { start_ns, end_ns }
    }
}

impl CardEvent {
    /// Settles the work if it is done or has failed. Returns whether it was.
    fn settle_if_done(&self) -> bool {
        match self.done.is_done() {
            Ok(true) => self.queue.settle_to(self),
            Ok(false) => return false,
            Err(error) => self.queue.fail_all(&error),
        }
        true
    }
}

impl WorkRunner for CardEvent {
    fn poll(&self) {
        self.settle_if_done();
    }

    fn wait(&self, _: &Event) {
        match self.done.synchronize() {
            Ok(()) => self.queue.settle_to(self),
            Err(error) => self.queue.fail_all(&error),
        }
        // Another thread may be about to settle it.
        std::thread::yield_now();
    }

    fn card_event(&self) -> Option<&cuda::Event> {
        Some(&self.done)
    }
}
