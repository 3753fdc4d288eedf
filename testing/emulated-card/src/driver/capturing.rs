//! Stream capture: where it begins and ends, and which calls it refuses.
//!
//! A refused call invalidates the captures that forbid it, as on a card.

use std::thread;

use crate::boundary::{Outcome, Status};

use super::graph::{CaptureMode, Graph, StreamCapture};
use super::state::{Driver, DriverObjects, Recording};
use super::streams::EmulatedStream;
use super::work::CardWork;

impl DriverObjects {
    fn capture_of(&self, stream: usize) -> Option<usize> {
        self.streams.get(&stream).and_then(|s| s.capture)
    }

    fn captures_where(&self, is_meant: impl Fn(&EmulatedStream) -> bool) -> Vec<usize> {
        self.streams.values().filter(|s| is_meant(s)).filter_map(|s| s.capture).collect()
    }
}

impl Driver {
    /// Begins a capture on a stream.
    pub fn begin_capture(&mut self, stream: usize, mode: CaptureMode) -> Outcome {
        if Self::is_null_stream(stream) {
            return Err(self.refuse(Status::CAPTURE_UNSUPPORTED, "stream 0 cannot be captured"));
        }
        if self.objects.streams.get(&stream).is_none_or(|s| s.capture.is_some()) {
            return Err(self.refuse(Status::ILLEGAL_STATE, "the stream is captured already"));
        }
        let id = self.objects.handle();
        self.objects.captures.insert(id, StreamCapture::new(stream, mode));
        if let Some(stream) = self.objects.streams.get_mut(&stream) {
            stream.capture = Some(id);
        }
        Ok(())
    }

    /// Ends the capture that began on a stream.
    pub fn end_capture(&mut self, stream: usize) -> Result<Graph, Status> {
        let id = self.objects.capture_of(stream).ok_or(Status::ILLEGAL_STATE)?;
        let capture = self.objects.captures.get(&id).ok_or(Status::UNKNOWN)?;
        if capture.origin != stream {
            return Err(Status::CAPTURE_UNMATCHED);
        }
        let same_thread = capture.thread == thread::current().id();
        if !same_thread && capture.mode != CaptureMode::Relaxed {
            return Err(Status::CAPTURE_WRONG_THREAD);
        }
        let capture = self.objects.captures.remove(&id).ok_or(Status::UNKNOWN)?;
        for stream in capture.streams() {
            if let Some(stream) = self.objects.streams.get_mut(&stream) {
                stream.capture = None;
            }
        }
        if capture.invalid {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        capture.finish()
    }

    /// 0 for none, 1 while a capture is active, 2 if it is invalid.
    pub fn capture_status(&self, stream: usize) -> u32 {
        let id = self.objects.capture_of(stream);
        match id.and_then(|id| self.objects.captures.get(&id)) {
            None => 0,
            Some(capture) if capture.invalid => 2,
            Some(_) => 1,
        }
    }

    /// Refuses a call that may not happen during a capture: an allocation, a query of an event.
    pub fn refuse_unsafe(&mut self, call: &str) -> Outcome {
        let thread = thread::current().id();
        let mut forbidding =
            self.objects.captures.values_mut().filter(|c| c.forbids(thread)).peekable();
        if forbidding.peek().is_none() {
            return Ok(());
        }
        forbidding.for_each(|capture| capture.invalid = true);
        let why = format!("{call} during a stream capture");
        Err(self.refuse(Status::CAPTURE_UNSUPPORTED, why))
    }

    /// Refuses to synchronize a card with a captured stream.
    pub fn refuse_card(&mut self, card: usize, call: &str) -> Outcome {
        let captured = self.objects.captures_where(|s| s.card == card);
        self.invalidate(&captured, call)
    }

    /// Refuses to wait for, or to ask, a captured stream.
    pub fn refuse_captured(&mut self, stream: usize, call: &str) -> Outcome {
        let captured: Vec<usize> = self.objects.capture_of(stream).into_iter().collect();
        self.invalidate(&captured, call)
    }

    fn invalidate(&mut self, captures: &[usize], call: &str) -> Outcome {
        if captures.is_empty() {
            return Ok(());
        }
        for id in captures {
            if let Some(capture) = self.objects.captures.get_mut(id) {
                capture.invalid = true;
            }
        }
        let why = format!("{call} of a stream that is captured");
        Err(self.refuse(Status::CAPTURE_UNSUPPORTED, why))
    }

    /// Refuses work of stream 0 while a stream that is ordered with it is captured.
    pub fn refuse_null_stream(&mut self, null: usize) -> Outcome {
        let card = self.objects.streams.get(&null).map_or(0, |s| s.card);
        let captured = self.objects.captures_where(|s| s.card == card && s.blocking);
        match self.invalidate(&captured, "work of stream 0 would wait for work") {
            Ok(()) => Ok(()),
            Err(_) => Err(Status::CAPTURE_IMPLICIT),
        }
    }

    /// Records an event.
    pub fn record_event(&mut self, event: usize, stream: usize) -> Outcome {
        if !self.objects.events.contains_key(&event) {
            return Err(Status::INVALID_HANDLE);
        }
        let capture = self.objects.capture_of(stream);
        let recorded = match capture.and_then(|id| Some((id, self.objects.captures.get(&id)?))) {
            Some((_, capture)) if capture.invalid => return Err(Status::CAPTURE_INVALIDATED),
            Some((id, capture)) => Recording::Capture { capture: id, nodes: capture.front(stream) },
            None => {
                self.submit(stream, CardWork::Record { event })?;
                let number = self.objects.streams.get(&stream).map_or(0, |s| s.submitted());
                Recording::Stream { stream, number }
            }
        };
        if let Some(event) = self.objects.events.get_mut(&event) {
            event.recorded = recorded;
            event.at = None;
        }
        Ok(())
    }

    /// Lets a stream wait for an event.
    pub fn wait_event(&mut self, stream: usize, event: usize) -> Outcome {
        let recorded =
            self.objects.events.get(&event).ok_or(Status::INVALID_HANDLE)?.recorded.clone();
        let own = self.objects.capture_of(stream);
        match recorded {
            Recording::Never => Ok(()),
            Recording::Stream { .. } if own.is_some() => {
                let why = "waits for an event that was recorded outside the capture";
                let _ = self.refuse_captured(stream, why);
                Err(self.refuse(Status::CAPTURE_ISOLATION, why))
            }
            Recording::Stream { stream: other, number } => {
                self.submit(stream, CardWork::Wait { stream: other, number })
            }
            Recording::Capture { capture: id, nodes } => {
                if own.is_some_and(|own| own != id) {
                    let _ = self.invalidate(&[id, own.unwrap_or(id)], "a wait for another capture");
                    return Err(Status::CAPTURE_MERGE);
                }
                let Some(capture) = self.objects.captures.get_mut(&id) else {
                    return Err(self.refuse(
                        Status::CAPTURED_EVENT,
                        "waits for an event of a capture that has ended",
                    ));
                };
                if capture.invalid {
                    return Err(Status::CAPTURE_INVALIDATED);
                }
                capture.join(stream, &nodes);
                if let Some(stream) = self.objects.streams.get_mut(&stream) {
                    stream.capture = Some(id);
                }
                Ok(())
            }
        }
    }
}
