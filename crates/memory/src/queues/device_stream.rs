//! Streams of an accelerator.
//!
//! Input: the kind of the work, and a function that prepares it, which gets the event of its end. Output: that event. A stream
//! takes one piece of work after the other. Refused work leaves nothing in the stream. This module knows neither memory nor the
//! work itself.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use paceline_cuda as cuda;
use paceline_trace::{Shapes, Span, Track, lock, now_ns};

use super::accelerator::{Accelerator, DeviceKind};
use super::capture::{self, OpenCapture};
use super::card::Submitter;
use super::event::{Event, Signal, WorkRunner};
use super::sim::Simulator;
use super::stream::Stream;
use super::timed::{self, WorkerThread};
use super::times::{DoneTimes, SubmissionLog};
use super::work::{Body, CompletionReport, QueuedWork, SendPtr, WorkKind};
use crate::{MemoryError, Result};

/// A queue of a device. Clones are the same queue.
#[derive(Clone)]
pub struct DeviceStream(pub(super) Arc<DeviceQueue>);

pub(super) struct DeviceQueue {
    accelerator: Accelerator,
    stream: Stream,
    pub(super) state: Mutex<QueueState>,
    /// Signaled when another thread may put work into the stream.
    pub(super) is_free: Condvar,
    runs_on: RunsOn,
}

/// The runner of a stream's work.
enum RunsOn {
    /// A thread of the emulated device, whose launches take this time of the host.
    Thread(WorkerThread, Duration),
    /// The threads that wait for the work.
    Waiters(Arc<Simulator>),
    Card(Submitter),
}

#[derive(Default)]
pub(super) struct QueueState {
    pub(super) waits: Vec<Event>,
    pub(super) last: Option<Event>,
    /// The thread that is preparing work, whose position in the stream is taken already.
    pub(super) preparing: Option<ThreadId>,
    /// Memory that was freed meanwhile, to be overwritten after that work.
    freed: Vec<(SendPtr, usize)>,
    /// The submissions of the host, while times are asked for.
    log: Option<SubmissionLog>,
    /// While work is captured and does not run.
    pub(super) capture: Option<OpenCapture>,
}

impl Accelerator {
    /// A new stream. Errors if the system refuses a thread for it, or the driver a stream.
    pub fn stream(&self, name: &str) -> Result<DeviceStream> {
        let runs_on = match &self.0.kind {
            DeviceKind::Card(card) => {
                RunsOn::Card(Submitter::new(card, name, self.0.failure.clone())?)
            }
            DeviceKind::Sim(simulator) if simulator.spec.late.is_some() => {
                RunsOn::Waiters(simulator.clone())
            }
            DeviceKind::Sim(simulator) => {
                let (simulator, launch) = (simulator.clone(), simulator.spec.launch);
                let run = move |work: QueuedWork| {
                    // Waiting here orders nothing for the host.
                    for event in &work.waits {
                        event.block();
                    }
                    simulator.run(work);
                };
                let thread = WorkerThread::start(format!("sim-{name}"), run);
                RunsOn::Thread(thread.map_err(MemoryError::NoThread)?, launch)
            }
        };
        Ok(DeviceStream(Arc::new(DeviceQueue {
            accelerator: self.clone(),
            stream: Stream::new(name),
            state: Mutex::default(),
            is_free: Condvar::new(),
            runs_on,
        })))
    }
}

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceStream({})", self.0.stream.name())
    }
}

impl DeviceStream {
    /// The device.
    pub fn accelerator(&self) -> &Accelerator {
        &self.0.accelerator
    }

    /// The queue of a card; `None` on the emulated device.
    pub fn card(&self) -> Option<&cuda::Stream> {
        match &self.0.runs_on {
            RunsOn::Card(submitter) => Some(submitter.stream()),
            RunsOn::Thread(..) | RunsOn::Waiters(_) => None,
        }
    }

    /// Its order.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Whether all work is in the stream of the card.
    pub(super) fn is_up_to_date(&self) -> bool {
        !matches!(&self.0.runs_on, RunsOn::Card(submitter) if !submitter.is_up_to_date())
    }

    /// Lets all later work of this stream wait for an event.
    pub fn wait(&self, event: &Event) {
        self.0.stream.wait(event);
        let mut state = lock(&self.0.state);
        state.waits.push(event.clone());
        if let Some(log) = &mut state.log {
            log.push(now_ns(), event);
        }
    }

    /// An event after all work of this stream so far.
    pub fn record(&self) -> Event {
        lock(&self.0.state).last.clone().unwrap_or_else(Event::complete)
    }

    /// From now until [`DeviceStream::end_times`], keeps when work was submitted to this stream, and when it was done.
    pub fn begin_times(&self) {
        lock(&self.0.state).log = Some(SubmissionLog::default());
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
        self.submit(WorkKind::Kernel { name, shapes }, prepare)
    }

    /// Puts work into the stream that `prepare` makes, which gets the event of its end. No other work comes between.
    pub(crate) fn submit<E: From<MemoryError>>(
        &self,
        kind: WorkKind,
        prepare: impl FnOnce(&Event) -> Result<Body, E>,
    ) -> Result<Event, E> {
        // Every operation of every program has a copy of this function, so it does nothing that needs `prepare`'s type.
        let started_ns = now_ns();
        let (event, signal) = self.begin(kind)?;
        let mut refused = None;
        let body = prepare(&event).map_err(|error| refused = Some(error)).ok();
        let ended = self.end(kind, started_ns, (event, signal), body);
        refused.map_or_else(|| ended.map_err(E::from), Err)
    }

    /// Takes a position in the stream for work that is prepared next.
    fn begin(&self, kind: WorkKind) -> Result<(Event, Signal)> {
        self.0.accelerator.check()?;
        let mut state = lock(&self.0.state);
        while state.preparing.is_some() || state.is_captured_elsewhere() {
            state = self.0.is_free.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let graph_pool = state.capture.as_ref().map(|capture| capture.graph_pool);
        if graph_pool.is_some() {
            capture::check(kind, &state.waits)?;
        }
        state.preparing = Some(std::thread::current().id());
        let runner = match &self.0.runs_on {
            RunsOn::Waiters(simulator) => Some(simulator.clone() as Arc<dyn WorkRunner>),
            RunsOn::Thread(..) | RunsOn::Card(_) => None,
        };
        Ok(self.0.stream.submit_to(runner, graph_pool))
    }

    /// Submits the prepared work. Without a body it is withdrawn.
    fn end(
        &self,
        kind: WorkKind,
        started_ns: u64,
        (event, signal): (Event, Signal),
        body: Option<Body>,
    ) -> Result<Event> {
        if let RunsOn::Thread(_, launch) = self.0.runs_on
            && !matches!(kind, WorkKind::Poison)
        {
            timed::spin_until(started_ns + launch.as_nanos() as u64);
        }
        let mut state = lock(&self.0.state);
        state.preparing = None;
        let outcome = match body {
            None => {
                signal.withdraw();
                Ok(event)
            }
            Some(body) if state.capture.is_some() => state.capture(body, event, signal),
            Some(body) => {
                signal.commit();
                let before = state.last.replace(event.clone());
                let waits = std::mem::take(&mut state.waits);
                if let Some(log) = &mut state.log {
                    log.push(started_ns, &event);
                }
                // A copy that blocks the host is recorded when that ends.
                let blocks = matches!(kind, WorkKind::Copy(copy) if copy.is_pageable());
                let track = self.track().filter(|track| track.is_on() && !blocks);
                let launched = Span { start_ns: started_ns, end_ns: now_ns() };
                let traced = track.map(|track| (launched, track.clone()));
                let completion = CompletionReport { signal, kind, traced };
                let work = QueuedWork { waits, before, body, event: event.clone(), completion };
                match &self.0.runs_on {
                    RunsOn::Thread(thread, _) => thread.push(work),
                    RunsOn::Waiters(simulator) => simulator.late.push(work),
                    RunsOn::Card(submitter) => submitter.push(work),
                }
                Ok(event)
            }
        };
        let freed = std::mem::take(&mut state.freed);
        drop(state);
        // The thread that captures may go on, and others may not.
        self.0.is_free.notify_all();
        freed.into_iter().for_each(|(address, len_bytes)| self.poison(address.0, len_bytes));
        outcome
    }

    /// Blocks until all work of this stream is done, and all that it waits for.
    pub(crate) fn drain(&self) {
        let state = lock(&self.0.state);
        let events: Vec<Event> = state.last.iter().chain(&state.waits).cloned().collect();
        drop(state);
        for event in events {
            event.block();
        }
    }

    /// Blocks until all work of this stream is done. Errors with the message of the device's first work that failed.
    pub fn synchronize(&self) -> Result<()> {
        self.refuse_in_capture("the host waits for its stream")?;
        self.record().wait();
        self.0.accelerator.check()
    }

    pub(crate) fn track(&self) -> Option<&Arc<Track>> {
        self.0.accelerator.track(self.0.stream.name())
    }

    /// In the late mode, overwrites memory that has been freed, after all work of this stream so far.
    pub(crate) fn poison(&self, base: *mut u8, len_bytes: usize) {
        if !matches!(self.0.runs_on, RunsOn::Waiters(_)) {
            return;
        }
        let address = SendPtr(base);
        let mut state = lock(&self.0.state);
        if state.preparing == Some(std::thread::current().id()) {
            return state.freed.push((address, len_bytes));
        }
        drop(state);
        let body: Body = Box::new(move || {
            // SAFETY: the allocator gives the block to no other stream before this work is done, and the work of this stream
            // that uses the block again comes after it.
            unsafe { address.get().write_bytes(POISON, len_bytes) };
            Ok(())
        });
        // Preparing this body cannot fail; after a failure of the device nothing runs any more.
        let _ = self.submit(WorkKind::Poison, |_| Ok::<_, MemoryError>(body));
    }
}

/// The value of each byte of freed memory: a NaN in every floating-point type.
const POISON: u8 = 0xff;
