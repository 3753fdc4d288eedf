//! The capture of a stream's work for a graph of a card.
//!
//! While a thread captures, its work does not run. Work of other threads waits until the capture ends.

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
        let mut state = lock(&self.stream.0.state);
        let capture = state.capture.take().expect("begun with this value");
        let ended = self.on_card.end_capture();
        // The captured work is not in the stream.
        state.last = capture.before;
        drop(state);
        self.stream.0.is_free.notify_all();
        (capture.work, ended)
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
            before: state.last.clone(),
            work: Vec::new(),
        });
        Ok(CaptureGuard { stream: self, on_card, is_open: true })
    }
}
