//! The capture of a stream's work for a graph of a card.
//!
//! While a thread captures, its work does not run. Work of other threads waits until the capture ends. A stream that waits for the
//! captured one is captured with it.

use std::sync::PoisonError;
use std::thread::ThreadId;

use paceline_cuda as cuda;
use paceline_trace::{Shapes, lock};

use super::device_stream::{DeviceStream, QueueState};
use super::event::{Event, Signal};
use super::work::{Body, WorkKind};
use crate::{MemoryError, Result};

/// A capture in progress, as its stream knows it.
pub(super) struct OpenCapture {
    thread: ThreadId,
    pub(super) graph_pool: u32,
    /// The streams whose work is captured with that of this one.
    joined: Vec<DeviceStream>,
    /// The last work that was put into the stream.
    before: Option<Event>,
    work: CapturedWork,
}

/// Work that is done when its graph is.
type CapturedWork = Vec<(Event, Signal)>;

/// A capture that has begun. It ends with this value, also if something panics.
pub(crate) struct CaptureGuard<'a> {
    stream: &'a DeviceStream,
    on_card: &'a cuda::Stream,
    is_open: bool,
}

impl CaptureGuard<'_> {
    /// Ends the capture. Returns the work and the graph.
    pub(crate) fn end(&mut self) -> (CapturedWork, cuda::Result<cuda::Graph>) {
        self.is_open = false;
        let mut ended = None;
        let work = self.stream.leave_capture(&mut || ended = Some(self.on_card.end_capture()));
        (work, ended.expect("the stream has ended it"))
    }
}

impl Drop for CaptureGuard<'_> {
    fn drop(&mut self) {
        if self.is_open {
            withdraw(self.end().0);
        }
    }
}

/// The work will not run.
pub(crate) fn withdraw(work: CapturedWork) {
    work.into_iter().for_each(|(_, signal)| signal.withdraw());
}

impl QueueState {
    /// Whether another thread captures, so that this one has to wait with its own work.
    pub(super) fn is_captured_elsewhere(&self) -> bool {
        self.capture.as_ref().is_some_and(|of| of.thread != std::thread::current().id())
    }

    /// Lets the driver capture work of this thread.
    pub(super) fn capture(&mut self, body: Body, event: Event, signal: Signal) -> Result<Event> {
        match (body(), &mut self.capture) {
            (Ok(()), Some(capture)) => {
                capture.work.push((event.clone(), signal));
                self.last = Some(event.clone());
                Ok(event)
            }
            (outcome, _) => {
                signal.withdraw();
                Err(MemoryError::NotCaptured(outcome.err().unwrap_or_default()))
            }
        }
    }
}

/// Errors if this work cannot be captured.
pub(super) fn check(kind: WorkKind, waits: &[Event]) -> Result<()> {
    let problem = match kind {
        WorkKind::Copy(copy) if copy.uses_bus() => "a copy from or to memory of the host",
        _ if !waits.is_empty() => "a wait for another stream",
        _ => return Ok(()),
    };
    Err(MemoryError::NotCaptured(problem.to_owned()))
}

impl DeviceStream {
    /// Ends the capture by `end`, and then the captures of the streams that joined. Returns all captured work.
    fn leave_capture(&self, end: &mut dyn FnMut()) -> CapturedWork {
        let mut state = lock(&self.0.state);
        let OpenCapture { joined, before, mut work, .. } =
            state.capture.take().expect("begun, and not ended yet");
        end();
        // The captured work is not in the stream.
        state.last = before;
        drop(state);
        self.0.is_free.notify_all();
        work.extend(joined.iter().flat_map(|of| of.leave_capture(&mut || ())));
        work
    }

    /// Lets all later work of this stream wait for all work of another one so far. While this thread captures the other stream,
    /// this one is captured too, and must be waited for before the capture ends. Errors if this stream has work that is not submitted
    /// yet, if either is not a card's, or if the driver refuses.
    pub fn wait_for(&self, other: &DeviceStream) -> Result<()> {
        let last = other.record();
        let captured = lock(&other.0.state).capture.as_ref().map(|of| (of.thread, of.graph_pool));
        let own = std::thread::current().id();
        let Some((_, graph_pool)) = captured.filter(|(thread, _)| *thread == own) else {
            self.wait(&last);
            return Ok(());
        };
        let refuse = |problem: &str| Err(MemoryError::NotCaptured(problem.to_owned()));
        let (Some(own_queue), Some(queue)) = (self.card(), other.card()) else {
            return refuse("work of two devices");
        };
        let mut state = lock(&self.0.state);
        if state.capture.is_none() {
            if !state.waits.is_empty() || state.preparing.is_some() || !self.is_up_to_date() {
                return refuse("another stream that has work in preparation");
            }
            let (before, work, joined) = (state.last.clone(), Vec::new(), Vec::new());
            state.capture = Some(OpenCapture { thread: own, graph_pool, joined, before, work });
            let mut of_other = lock(&other.0.state);
            of_other.capture.as_mut().expect("as above").joined.push(self.clone());
        }
        drop(state);
        let event = cuda::Event::new(queue.card())?;
        queue.record(&event)?;
        own_queue.wait(&event)?;
        self.stream().wait(&last);
        Ok(())
    }

    /// Errors with the host's action if this thread captures.
    pub(super) fn refuse_in_capture(&self, action: &str) -> Result<()> {
        let state = lock(&self.0.state);
        if state.capture.is_some() && !state.is_captured_elsewhere() {
            return Err(MemoryError::NotCaptured(action.to_owned()));
        }
        Ok(())
    }

    pub(crate) fn begin_capture<'a>(
        &'a self,
        on_card: &'a cuda::Stream,
        graph_pool: u32,
    ) -> Result<CaptureGuard<'a>> {
        self.refuse_in_capture("another graph")?;
        // The events that the stream waits for come before the graph.
        self.launch::<MemoryError>("capture", Shapes::default(), |_| Ok(Box::new(|| Ok(()))))?;
        let mut state = lock(&self.0.state);
        // Work that another thread prepares goes into the stream and not into the graph, as does work that waits for the host.
        loop {
            let has_kept_work = !self.is_up_to_date();
            state = match state.last.clone() {
                Some(last) if has_kept_work => {
                    drop(state);
                    last.block();
                    // The thread that keeps the work counts it a moment after it is done.
                    std::thread::yield_now();
                    lock(&self.0.state)
                }
                _ if state.preparing.is_some() || state.is_captured_elsewhere() => {
                    self.0.is_free.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
                _ => break,
            };
        }
        on_card.begin_capture()?;
        state.capture = Some(OpenCapture {
            thread: std::thread::current().id(),
            graph_pool,
            joined: Vec::new(),
            before: state.last.clone(),
            work: Vec::new(),
        });
        Ok(CaptureGuard { stream: self, on_card, is_open: true })
    }
}
