//! Accelerators: memory of their own, streams, and copies. One is emulated on the processor, and so on every machine; the
//! others are cards of NVIDIA's.
//!
//! Work that is put into a [`DeviceStream`] runs later. The host cannot reach the memory of the device; copies bring data
//! there and back. A card runs what its driver was told. The emulated accelerator has two modes:
//!
//! - *timed*: each stream has a thread that runs its work in order. A copy takes the stated latency and bandwidth, and the
//!   two directions have one engine each. Kernels take what they take.
//! - *late*: nothing runs until somebody waits for it. A wait runs exactly what comes before the event that it waits for, in
//!   an order that a seed draws among all that the program allows. Freed memory is overwritten. So a wait that a program
//!   has forgotten shows, whatever the timing.
//!
//! | file | what it has |
//! |---|---|
//! | here | the device, its settings, its streams |
//! | `submit` | how work comes into a stream |
//! | [`timed`] | work on threads |
//! | [`late`] | work in a drawn order |
//! | [`card`] | work on a card |
//! | [`graph`] | work of a card that is told once and launched again |
//! | [`what`] | kinds of work |
//! | [`times`] | when work was done, for each moment of the host |
//!
//! This module does not know what kernels compute.

mod card;
mod graph;
mod late;
mod submit;
mod timed;
mod times;
mod what;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use paceline_trace::{Place, Shapes, Span, Track, lock, now_ns};

use crate::event::{Event, EventState};
use crate::stream::Stream;
use crate::{Access, Allocator, Device, MemoryError, Result, Tensor};
use card::Feed;
pub(crate) use card::Point;
use graph::Capture;
pub(crate) use graph::Noted;
pub use graph::{Arena, Segment};
use late::Late;
use timed::{CopyEngines, Thread};
pub use times::DoneTimes;
use times::Log;
use what::{Copy, What};

/// What an emulated device is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimSpec {
    /// Bytes that a copy between the host and the device moves per second, if the host's memory is pinned.
    pub copy_bytes_per_s: f64,
    /// What each copy takes besides.
    pub copy_latency: Duration,
    /// What launching a kernel or a copy takes of the host's time.
    pub launch: Duration,
    /// The seed of the order of work in the late mode; `None` for the timed mode.
    pub late: Option<u64>,
}

impl SimSpec {
    /// A card on a bus of 16 Gbyte/s: copies with 10 us, launches with 5 us.
    pub const DEFAULT: Self = Self {
        copy_bytes_per_s: 16e9,
        copy_latency: Duration::from_micros(10),
        launch: Duration::from_micros(5),
        late: None,
    };

    /// The same in the late mode.
    pub fn late(seed: u64) -> Self {
        Self { late: Some(seed), ..Self::DEFAULT }
    }

    /// The time of a copy. From or to memory that is not pinned it takes twice as long, since it goes through a pinned
    /// buffer of the driver.
    fn copy_time(&self, copy: &Copy) -> Duration {
        let share = if copy.is_pageable() { 0.5 } else { 1.0 };
        let seconds = copy.bytes as f64 / (share * self.copy_bytes_per_s);
        self.copy_latency + Duration::from_secs_f64(seconds)
    }
}

/// A device. Clones are the same device.
#[derive(Clone)]
pub struct Accelerator(Arc<Engine>);

struct Engine {
    kind: Kind,
    /// Memory of the host for what is on its way to the device.
    host: OnceLock<Allocator>,
    /// Where traces of the work of streams with these names go.
    tracks: OnceLock<Vec<Arc<Track>>>,
    /// What the first work that failed has said. Later work is not run.
    failure: Mutex<Option<String>>,
}

enum Kind {
    Emulated(Emulated),
    Card(paceline_cuda::Card),
}

struct Emulated {
    spec: SimSpec,
    copies: CopyEngines,
    late: Late,
}

/// A queue of a device. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct DeviceStream(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    accelerator: Accelerator,
    stream: Stream,
    state: Mutex<QueueState>,
    /// When another thread may put work into the stream.
    is_free: Condvar,
    runs: Runs,
}

/// Who runs the work of a stream.
#[derive(Debug)]
enum Runs {
    /// A thread, as soon as it can.
    Thread(Thread),
    /// Whoever waits for it.
    Late,
    /// A card.
    Card(Feed),
}

#[derive(Debug, Default)]
struct QueueState {
    /// Events that the next work waits for.
    waits: Vec<Event>,
    /// The last work.
    last: Option<Event>,
    /// The thread that is preparing work, whose place in the stream is taken already.
    preparing: Option<ThreadId>,
    /// Memory that was freed meanwhile, to be overwritten behind that work.
    freed: Vec<(Address, usize)>,
    /// What the host has put into the stream, while times are asked for.
    log: Option<Log>,
    /// What has been captured, while work is noted and does not run.
    capture: Option<Capture>,
}

/// What work does. An error is told to whoever synchronizes next.
pub type Body = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A piece of work.
struct Task {
    /// What has to be done before, besides the work of the same stream before it.
    waits: Vec<Event>,
    /// The work of the same stream before it.
    before: Option<Event>,
    what: What,
    body: Body,
    event: Event,
    signal: crate::event::Signal,
    /// When the host put it into the stream, and where a trace of it goes.
    traced: Option<(Span, Arc<Track>)>,
}

impl Accelerator {
    /// An emulated device.
    pub fn sim(spec: SimSpec) -> Self {
        let late = Late::new(spec.late.unwrap_or_default());
        Self::new(Kind::Emulated(Emulated { spec, copies: CopyEngines::default(), late }))
    }

    /// A card.
    pub fn cuda(card: paceline_cuda::Card) -> Self {
        Self::new(Kind::Card(card))
    }

    fn new(kind: Kind) -> Self {
        Self(Arc::new(Engine {
            kind,
            host: OnceLock::new(),
            tracks: OnceLock::new(),
            failure: Mutex::default(),
        }))
    }

    /// The device that tensors in its memory name.
    pub fn device(&self) -> Device {
        match self.0.kind {
            Kind::Emulated(_) => Device::Sim,
            Kind::Card(_) => Device::Cuda,
        }
    }

    /// The card; `None` on the emulated device.
    pub fn card(&self) -> Option<&paceline_cuda::Card> {
        match &self.0.kind {
            Kind::Emulated(_) => None,
            Kind::Card(card) => Some(card),
        }
    }

    /// Whether its work runs on the processor.
    pub fn is_emulated(&self) -> bool {
        self.card().is_none_or(|card| card.name() == paceline_cuda::card::EMULATED)
    }

    /// Memory of the host, which the device copies by itself, for what is on its way.
    pub(crate) fn host_memory(&self) -> &Allocator {
        self.0.host.get_or_init(|| Allocator::pinned(self))
    }

    fn emulated(&self) -> Option<&Emulated> {
        match &self.0.kind {
            Kind::Emulated(emulated) => Some(emulated),
            Kind::Card(_) => None,
        }
    }

    fn is_late(&self) -> bool {
        self.emulated().is_some_and(|emulated| emulated.spec.late.is_some())
    }

    /// A new stream. Errors if the system refuses a thread for it, or the driver a stream.
    pub fn stream(&self, name: &str) -> Result<DeviceStream> {
        let stream = Stream::new(name);
        let runs = match &self.0.kind {
            Kind::Card(card) => Runs::Card(Feed::new(card, name)?),
            Kind::Emulated(_) if self.is_late() => Runs::Late,
            Kind::Emulated(_) => {
                let sim = self.clone();
                let run = move |task: Task| {
                    // Waiting here orders nothing for the host.
                    for event in &task.waits {
                        event.block();
                    }
                    sim.run(task);
                };
                let thread = Thread::start(format!("sim-{name}"), run);
                Runs::Thread(thread.map_err(MemoryError::NoThread)?)
            }
        };
        let (accelerator, state, is_free) = (self.clone(), Mutex::default(), Condvar::new());
        Ok(DeviceStream(Arc::new(Queue { accelerator, stream, state, is_free, runs })))
    }

    /// Records the work of each stream on the track with the stream's name, while the recorder is on. Only the first call
    /// counts.
    pub fn record_on(&self, tracks: Vec<Arc<Track>>) {
        self.0.tracks.get_or_init(|| tracks);
    }

    /// Errors with what the first work that failed has said.
    pub fn check(&self) -> Result<()> {
        match lock(&self.0.failure).clone() {
            Some(message) => Err(MemoryError::DeviceFailed(message)),
            None => Ok(()),
        }
    }

    /// Notes that work has failed, so that no later work is run.
    fn fail(&self, message: String) {
        lock(&self.0.failure).get_or_insert(message);
    }

    /// Runs the body of a task on the emulated device, unless earlier work has failed.
    fn run(&self, task: Task) {
        let Some(emulated) = self.emulated() else { return task.signal.fail() };
        // What waits for failed work, such as a collective that has lost a peer, is not done either.
        let has_failed = |event: &Event| event.peek() == EventState::Failed;
        if lock(&self.0.failure).is_some() || task.waits.iter().any(has_failed) {
            return task.signal.fail();
        }
        let copy = match task.what {
            What::Copy(copy) if copy.uses_bus() => Some(copy),
            _ => None,
        };
        let engine = copy.map(|copy| emulated.copies.lock(copy.to_device()));
        let started = Instant::now();
        task.signal.begin();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task.body));
        if let (Some(copy), None) = (copy, emulated.spec.late) {
            timed::sleep_until(started + emulated.spec.copy_time(&copy));
        }
        drop(engine);
        let failed = match outcome {
            Ok(Ok(())) => {
                task.signal.complete();
                if let (Some((launched, track)), Some(ran)) = (task.traced, task.event.ran()) {
                    task.what
                        .event(launched, ran)
                        .into_iter()
                        .for_each(|event| track.record(event));
                }
                return;
            }
            Ok(Err(message)) => message,
            Err(panic) => format!("a kernel panicked: {}", words_of(&*panic)),
        };
        self.fail(failed);
        task.signal.fail();
    }

    /// In the late mode, runs what comes before an event, and its own work.
    pub(crate) fn run_before(&self, event: &Event) {
        if let Some(emulated) = self.emulated() {
            emulated.late.run_before(self, event);
        }
    }
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("for an unknown reason")
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.kind {
            Kind::Emulated(emulated) => f.debug_tuple("Sim").field(&emulated.spec).finish(),
            Kind::Card(card) => card.fmt(f),
        }
    }
}

impl QueueState {
    /// Notes that the host has put something into the stream since `started_ns`, which is done with this event.
    fn log(&mut self, started_ns: u64, event: &Event) {
        if let Some(log) = &mut self.log {
            let now_ns = now_ns();
            log.push(now_ns, now_ns - started_ns, event);
        }
    }
}

impl DeviceStream {
    /// The device.
    pub fn accelerator(&self) -> &Accelerator {
        &self.0.accelerator
    }

    /// The queue of a card; `None` on the emulated device.
    pub fn card(&self) -> Option<&paceline_cuda::Stream> {
        match &self.0.runs {
            Runs::Card(feed) => Some(feed.stream()),
            Runs::Thread(_) | Runs::Late => None,
        }
    }

    /// Its order.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Lets all later work of this stream wait for an event.
    pub fn wait(&self, event: &Event) {
        self.0.stream.wait(event);
        let mut state = lock(&self.0.state);
        state.waits.push(event.clone());
        state.log(now_ns(), event);
    }

    /// An event behind all work of this stream so far.
    pub fn record(&self) -> Event {
        lock(&self.0.state).last.clone().unwrap_or_else(Event::complete)
    }

    /// From now until [`DeviceStream::end_times`], keeps when work was put into this stream, and when it was done.
    pub fn begin_times(&self) {
        lock(&self.0.state).log = Some(Log::default());
    }

    /// When the work was done since [`DeviceStream::begin_times`]. Blocks until it is.
    pub fn end_times(&self) -> DoneTimes {
        let log = lock(&self.0.state).log.take();
        log.unwrap_or_default().done()
    }

    /// Puts a kernel into the stream. `prepare` makes its body; the uses of memory are those of the event that it gets.
    /// Traces have `name` and `shapes`. Errors if `prepare` does, or if earlier work has failed; then nothing is put into
    /// the stream.
    pub fn launch<E: From<MemoryError>>(
        &self,
        name: &'static str,
        shapes: Shapes,
        prepare: impl FnOnce(&Event) -> Result<Body, E>,
    ) -> Result<Event, E> {
        self.submit(What::Kernel { name, shapes }, prepare)
    }

    /// Copies a tensor into another one with the same number of bytes, of which at least one lies on this device. From or
    /// to memory of the host that is not pinned, it returns when the copy is done, as on a card.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<Event> {
        if from.num_bytes() != to.num_bytes() || from.dtype() != to.dtype() {
            return Err(MemoryError::WrongShape { from: from.shape(), to: to.shape() });
        }
        let place = |tensor: &Tensor| match tensor.device() {
            Device::Cpu if tensor.buffer().allocator().is_pinned() => Place::Pinned,
            Device::Cpu => Place::Pageable,
            _ => Place::Device,
        };
        let copy = Copy { places: (place(from), place(to)), bytes: from.num_bytes() };
        let what = What::Copy(copy);
        let started_ns = now_ns();
        let event = self.submit(what, |event| {
            let source = from.queue(Access::Read, "copy", event)?;
            let target = to.queue(Access::Write, "copy", event)?;
            let (source, target, len) =
                (Address::of(&source), Address::of(&target), from.num_bytes());
            if let Some(stream) = self.card() {
                return Ok(card::copy(stream.clone(), (source, target), copy.places, len));
            }
            let body: Body = Box::new(move || {
                // SAFETY: both ranges have this length. They are queued for this work, so they stay in place, nobody else
                // writes to them meanwhile, and they do not overlap, since one is read and one is written.
                unsafe { target.pointer().copy_from_nonoverlapping(source.pointer(), len) };
                Ok(())
            });
            Ok::<_, MemoryError>(body)
        })?;
        if copy.is_pageable() {
            event.wait();
            self.0.accelerator.check()?;
            let launched = Span { start_ns: started_ns, end_ns: now_ns() };
            if let (Some(track), Some(ran)) = (self.track(), event.ran()) {
                what.event(launched, ran).into_iter().for_each(|event| track.record(event));
            }
        }
        Ok(event)
    }

    /// Sets all bytes of a tensor of this device.
    pub fn fill(&self, tensor: &Tensor, value: u8) -> Result<Event> {
        self.launch("fill", Shapes::default(), |event| {
            let claim = tensor.queue(Access::Write, "fill", event)?;
            let (address, len) = (Address::of(&claim), tensor.num_bytes());
            if let Some(stream) = self.card() {
                return Ok(card::fill(stream.clone(), address, value, len));
            }
            let body: Body = Box::new(move || {
                // SAFETY: the range has this length, and is queued for this work.
                unsafe { address.pointer().write_bytes(value, len) };
                Ok(())
            });
            Ok(body)
        })
    }

    /// Blocks until all work of this stream is done, and all that it waits for.
    pub(crate) fn drain(&self) {
        let (last, waits) = {
            let state = lock(&self.0.state);
            (state.last.clone(), state.waits.clone())
        };
        for event in last.iter().chain(&waits) {
            event.block();
        }
    }

    /// Blocks until all work of this stream is done. Errors with what work of the device has said that failed.
    pub fn synchronize(&self) -> Result<()> {
        self.refuse_in_capture("the host waits for its stream")?;
        self.record().wait();
        self.0.accelerator.check()
    }

    fn track(&self) -> Option<&Arc<Track>> {
        let tracks = self.0.accelerator.0.tracks.get()?;
        tracks.iter().find(|track| track.name() == self.0.stream.name())
    }

    /// In the late mode, overwrites memory that has been freed, behind all work of this stream so far.
    pub(crate) fn poison(&self, base: *mut u8, len_bytes: usize) {
        if !self.0.accelerator.is_late() {
            return;
        }
        let address = Address(base);
        let mut state = lock(&self.0.state);
        if state.preparing == Some(std::thread::current().id()) {
            return state.freed.push((address, len_bytes));
        }
        drop(state);
        let body: Body = Box::new(move || {
            // SAFETY: the allocator gives the block to no other stream before this work is done, and the work of this stream
            // that uses the block again comes behind.
            unsafe { address.pointer().write_bytes(POISON, len_bytes) };
            Ok(())
        });
        // Nothing is prepared that could be refused; after a failure nothing runs any more.
        let _ = self.submit(What::Poison, |_| Ok::<_, MemoryError>(body));
    }
}

/// The value of each byte of freed memory: a NaN in every floating-point type.
const POISON: u8 = 0xff;

/// An address that is sent to the thread of a stream.
#[derive(Clone, Copy, Debug)]
struct Address(*mut u8);

impl Address {
    fn of(claim: &crate::Claim) -> Self {
        Self(claim.base().as_ptr())
    }

    fn pointer(self) -> *mut u8 {
        self.0
    }

    /// The same as a card counts.
    fn number(self) -> u64 {
        self.0.addr() as u64
    }
}

// SAFETY: an address is a number; whoever follows it argues that it may.
unsafe impl Send for Address {}

#[cfg(test)]
mod tests;
