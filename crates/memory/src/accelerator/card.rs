//! Work on a card.
//!
//! The driver runs what a stream was told, in order. An event of the card stands behind each piece of work: whoever waits
//! asks for it, and later submissions ask for the oldest, so that memory of the host which work has used is given back.
//! Times of the card are told in its own clock, from one event to the next; they are put on the host's clock at a moment when
//! the card is known to be idle.
//!
//! A card waits for work of the host, such as a collective, only once that is done: until then a thread keeps what has to wait,
//! and all that comes behind it in the same stream. A driver could wait itself, by a function of the host that blocks. But it calls
//! these one after the other for all streams of a process, and may hold up other calls until a stream is idle, so two ranks would
//! wait for each other for ever. What a thread keeps of one stream is, for another stream that waits for it, work of the host too.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use paceline_cuda as cuda;
use paceline_trace::{Place, Span, now_ns};

use super::{Accelerator, Address, Body, Task, Thread, What, lock, words_of};
use crate::event::Signal;
use crate::{EventState, MemoryError, Result};

/// How a stream of a card is filled.
#[derive(Debug)]
pub(super) struct Feed {
    name: String,
    queued: Arc<Queued>,
    /// Fills it with what waits for the host, and with what comes behind that.
    later: OnceLock<Thread>,
    /// The pieces of work that the thread still has.
    num_later: Arc<AtomicUsize>,
}

/// A stream of a card, and the work in it that is not known to be done.
pub(super) struct Queued {
    stream: cuda::Stream,
    pending: Mutex<Pending>,
}

struct Pending {
    points: VecDeque<Arc<Point>>,
    /// An event that is done, and when it was, on the host's clock.
    known: (cuda::Event, u64),
}

/// Where a card tells how far work has come.
pub(crate) struct Point {
    started: Option<cuda::Event>,
    done: cuda::Event,
    queued: Arc<Queued>,
    accelerator: Accelerator,
    task: Mutex<Option<Told>>,
}

/// What is told when the work is done.
struct Told {
    signal: Signal,
    what: What,
    traced: Option<(Span, Arc<paceline_trace::Track>)>,
}

/// As many pieces of work may be pending before the oldest is asked for.
const MOST_PENDING: usize = 64;

impl Feed {
    pub(super) fn new(card: &cuda::Card, name: &str) -> Result<Self> {
        let (queued, num_later) = (Arc::new(Queued::new(card)?), Arc::default());
        Ok(Self { name: name.to_owned(), queued, later: OnceLock::new(), num_later })
    }

    pub(super) fn stream(&self) -> &cuda::Stream {
        &self.queued.stream
    }

    /// Whether all work is in the stream.
    pub(super) fn is_up_to_date(&self) -> bool {
        self.num_later.load(Ordering::Acquire) == 0
    }

    /// Puts a task into the stream, now or once the host has done what it waits for. No two threads do so at a time.
    pub(super) fn push(&self, accelerator: &Accelerator, task: Task) {
        let is_of_host =
            |event: &crate::Event| event.point().is_none() && event.peek() == EventState::Pending;
        if self.is_up_to_date() && !task.waits.iter().any(is_of_host) {
            return self.queued.push(accelerator, task);
        }
        let thread = match self.later.get() {
            Some(thread) => thread,
            None => match self.start(accelerator) {
                Ok(thread) => self.later.get_or_init(|| thread),
                Err(error) => {
                    accelerator.fail(MemoryError::NoThread(error).to_string());
                    return task.signal.fail();
                }
            },
        };
        self.num_later.fetch_add(1, Ordering::Relaxed);
        thread.push(task);
    }

    fn start(&self, accelerator: &Accelerator) -> std::io::Result<Thread> {
        let (queued, accelerator) = (self.queued.clone(), accelerator.clone());
        let num_later = self.num_later.clone();
        Thread::start(format!("card-{}", self.name), move |task| {
            let pushed = catch_unwind(AssertUnwindSafe(|| match accelerator.check() {
                Ok(()) => queued.push(&accelerator, task),
                Err(_) => task.signal.fail(),
            }));
            if let Err(panic) = pushed {
                accelerator.fail(format!("work of a card panicked: {}", words_of(&*panic)));
            }
            num_later.fetch_sub(1, Ordering::Release);
        })
    }
}

impl Queued {
    fn new(card: &cuda::Card) -> Result<Self> {
        let (stream, begun) = (cuda::Stream::new(card)?, cuda::Event::new(card)?);
        stream.record(&begun)?;
        begun.synchronize()?;
        let pending = Pending { points: VecDeque::new(), known: (begun, now_ns()) };
        Ok(Self { stream, pending: Mutex::new(pending) })
    }

    /// Puts a task into the stream, once the host has done what it waits for.
    fn push(self: &Arc<Self>, accelerator: &Accelerator, task: Task) {
        let Task { waits, what, body, event, signal, traced, .. } = task;
        let told = Told { signal, what, traced };
        let submitted = self.submit(&waits, body, told.traced.is_some());
        let (started, done) = match submitted {
            Ok(events) => events,
            Err(message) => {
                accelerator.fail(message);
                return told.signal.fail();
            }
        };
        let (queued, accelerator) = (self.clone(), accelerator.clone());
        let task = Mutex::new(Some(told));
        let point = Arc::new(Point { started, done, queued, accelerator, task });
        let is_full = {
            let mut pending = lock(&point.queued.pending);
            pending.points.push_back(point.clone());
            pending.points.len() > MOST_PENDING
        };
        event.ask(point.clone());
        if is_full {
            point.queued.settle_done();
        }
    }

    /// Tells the driver. Returns the events around the work.
    fn submit(
        &self,
        waits: &[crate::Event],
        body: Body,
        is_timed: bool,
    ) -> Result<(Option<cuda::Event>, cuda::Event), String> {
        let words = |error: cuda::CudaError| error.to_string();
        for event in waits {
            match event.point() {
                Some(point) => self.stream.wait(&point.done).map_err(words)?,
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
            let Some(point) = lock(&self.pending).points.front().cloned() else { return };
            if !point.poll() {
                return;
            }
        }
    }

    /// Settles the work up to a point, which is done.
    fn settle_to(&self, last: &Point) {
        loop {
            // The lock is not held while memory is given back, which may submit work.
            let (told, ran, accelerator) = {
                let mut pending = lock(&self.pending);
                if lock(&last.task).is_none() {
                    return;
                }
                let Some(point) = pending.points.pop_front() else { return };
                let ran = pending.times(&point);
                (lock(&point.task).take(), ran, point.accelerator.clone())
            };
            let Some(told) = told else { continue };
            match accelerator.check() {
                Ok(()) => {
                    told.signal.complete_in(ran);
                    if let Some((launched, track)) = told.traced {
                        let event = told.what.event(launched, ran);
                        event.into_iter().for_each(|event| track.record(event));
                    }
                }
                Err(_) => told.signal.fail(),
            }
        }
    }

    /// The card has failed: nothing of what is pending will be done.
    fn fail_all(&self) {
        let points = std::mem::take(&mut lock(&self.pending).points);
        points
            .iter()
            .filter_map(|point| lock(&point.task).take())
            .for_each(|told| told.signal.fail());
    }
}

impl Pending {
    /// When the work before a point ran, which is the oldest and is done.
    fn times(&mut self, point: &Point) -> Span {
        let (known, known_ns) = &self.known;
        let after =
            |event: &cuda::Event| event.ns_since(known).map_or(*known_ns, |ns| known_ns + ns);
        let end_ns = after(&point.done);
        let start_ns = point.started.as_ref().map_or(end_ns, after);
        self.known = (point.done.clone(), end_ns);
        Span { start_ns, end_ns }
    }
}

impl Point {
    /// Asks the card whether the work is done, and settles it if it is. Returns whether nothing is pending any more.
    pub(crate) fn poll(&self) -> bool {
        match self.done.is_done() {
            Ok(true) => self.queued.settle_to(self),
            Ok(false) => return false,
            Err(error) => self.fail(&error),
        }
        true
    }

    /// Blocks until the work is done.
    pub(crate) fn wait(&self) {
        match self.done.synchronize() {
            Ok(()) => self.queued.settle_to(self),
            Err(error) => self.fail(&error),
        }
        // Another thread may be about to tell.
        std::thread::yield_now();
    }

    fn fail(&self, error: &cuda::CudaError) {
        self.accelerator.fail(error.to_string());
        self.queued.fail_all();
    }
}

/// The body of a copy.
pub(super) fn copy(
    stream: cuda::Stream,
    (from, to): (Address, Address),
    places: (Place, Place),
    bytes: usize,
) -> Body {
    Box::new(move || {
        // SAFETY: both ranges have this length. They are queued for this work, so they stay in place, nobody else writes to
        // them meanwhile, and they do not overlap, since one is read and one is written.
        let copied = unsafe {
            match (places.0 == Place::Device, places.1 == Place::Device) {
                (false, _) => stream.copy_to_card(from.pointer(), to.number(), bytes),
                (true, false) => stream.copy_to_host(from.number(), to.pointer(), bytes),
                (true, true) => stream.copy_on_card(from.number(), to.number(), bytes),
            }
        };
        copied.map_err(|error| error.to_string())
    })
}

/// The body of setting all bytes of a range.
pub(super) fn fill(stream: cuda::Stream, at: Address, value: u8, bytes: usize) -> Body {
    Box::new(move || {
        // SAFETY: the range has this length, and is queued for this work.
        unsafe { stream.fill(at.number(), value, bytes) }.map_err(|error| error.to_string())
    })
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.stream)
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.done)
    }
}
