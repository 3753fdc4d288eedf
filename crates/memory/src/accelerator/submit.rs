//! How work comes into a stream.
//!
//! Input: what the work is, and a function that prepares it, which is told the event of its end. Output: that event. A stream takes one
//! piece of work after the other, and knows of none that was refused. This file does not know how work runs.

use std::sync::{OnceLock, PoisonError};
use std::time::Instant;

use paceline_trace::{Span, now_ns};

use super::graph::{self, Capture};
use super::what::What;
use super::{Body, DeviceStream, Runs, Task, lock, timed};
use crate::event::{Event, Signal, Waiter};
use crate::{MemoryError, Result};

/// Work that a stream has a place for, while it is prepared.
struct Begun {
    what: What,
    event: Event,
    signal: Signal,
    is_captured: bool,
    started: Instant,
    started_ns: u64,
}

impl DeviceStream {
    /// Puts work into the stream that `prepare` makes, which is told the event of its end. Nothing else comes between.
    pub(super) fn submit<E: From<MemoryError>>(
        &self,
        what: What,
        prepare: impl FnOnce(&Event) -> Result<Body, E>,
    ) -> Result<Event, E> {
        // Every operation of every program has a copy of this function, so it does nothing that needs `prepare`'s type.
        let begun = self.begin(what)?;
        let mut refused = None;
        let body = prepare(&begun.event).map_err(|error| refused = Some(error)).ok();
        let ended = self.end(begun, body);
        refused.map_or_else(|| ended.map_err(E::from), Err)
    }

    fn begin(&self, what: What) -> Result<Begun> {
        self.0.accelerator.check()?;
        let (started, started_ns) = (Instant::now(), now_ns());
        let mut state = lock(&self.0.state);
        while state.preparing.is_some() || state.is_captured_elsewhere() {
            state = self.0.is_free.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let captured = state.capture.as_ref().map(Capture::noted);
        let is_captured = captured.is_some();
        if is_captured {
            graph::check(what, &state.waits)?;
        }
        state.preparing = Some(std::thread::current().id());
        let waiter = match &self.0.runs {
            Runs::Thread(_) => Waiter::Sleeps,
            Runs::Late => Waiter::Runs(self.0.accelerator.clone()),
            Runs::Card(_) => Waiter::Asks { point: OnceLock::new(), captured },
        };
        let (event, signal) = self.0.stream.submit_on(waiter);
        Ok(Begun { what, event, signal, is_captured, started, started_ns })
    }

    /// Hands over what was begun. Without a body it is withdrawn.
    fn end(&self, begun: Begun, body: Option<Body>) -> Result<Event> {
        let Begun { what, event, signal, is_captured, started, started_ns } = begun;
        if let (Runs::Thread(_), Some(emulated)) = (&self.0.runs, self.0.accelerator.emulated())
            && !matches!(what, What::Poison)
        {
            timed::spin_until(started + emulated.spec.launch);
        }
        let mut state = lock(&self.0.state);
        state.preparing = None;
        let outcome = match body {
            None => {
                signal.withdraw();
                Ok(event)
            }
            Some(body) if is_captured => state.capture(body, event, signal),
            Some(body) => {
                let before = state.last.replace(event.clone());
                let waits = std::mem::take(&mut state.waits);
                state.log(started_ns, &event);
                // A copy that blocks the host is recorded when that ends.
                let blocks = matches!(what, What::Copy(copy) if copy.is_pageable());
                let track = self.track().filter(|track| track.is_on() && !blocks);
                let launched = Span { start_ns: started_ns, end_ns: now_ns() };
                let traced = track.map(|track| (launched, track.clone()));
                let task = Task { waits, before, what, body, event: event.clone(), signal, traced };
                match &self.0.runs {
                    Runs::Thread(thread) => thread.push(task),
                    Runs::Late => {
                        if let Some(emulated) = self.0.accelerator.emulated() {
                            emulated.late.push(task);
                        }
                    }
                    Runs::Card(feed) => feed.push(&self.0.accelerator, task),
                }
                Ok(event)
            }
        };
        let freed = std::mem::take(&mut state.freed);
        drop(state);
        // Whoever captures may go on, and others may not.
        self.0.is_free.notify_all();
        freed.into_iter().for_each(|(address, len_bytes)| self.poison(address.0, len_bytes));
        outcome
    }
}
