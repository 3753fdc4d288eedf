//! Work for a stream of an accelerator: its kind, its body, and the failure after which a device runs nothing.
//!
//! This module does not know who runs the work.

use std::any::Any;
use std::sync::{Arc, Mutex};

use paceline_trace::{self as trace, Place, Shapes, Span, Track, lock};

use super::event::{Event, Signal};
use crate::{MemoryError, Result};

/// The function of a piece of work. Its error is returned by the next synchronization.
pub type Body = Box<dyn FnOnce() -> Result<(), String> + Send>;

pub(super) struct QueuedWork {
    pub(super) waits: Vec<Event>,
    /// The work of the same stream before it.
    pub(super) before: Option<Event>,
    pub(super) body: Body,
    pub(super) event: Event,
    pub(super) completion: CompletionReport,
}

/// Reported when a piece of work is done.
pub(super) struct CompletionReport {
    pub(super) signal: Signal,
    pub(super) kind: WorkKind,
    /// When the host submitted the work, and the track of its trace.
    pub(super) traced: Option<(Span, Arc<Track>)>,
}

impl CompletionReport {
    /// The work is done, and ran at these times.
    pub(super) fn complete(self, ran: Span) {
        self.signal.complete_in(ran);
        if let Some((launched, track)) = self.traced {
            self.kind.record_on(&track, launched, ran);
        }
    }
}

/// The kind of a piece of work, for its time and for traces.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WorkKind {
    Kernel {
        name: &'static str,
        shapes: Shapes,
    },
    Copy(CopyKind),
    /// Overwrites freed memory.
    Poison,
}

/// The kinds of memory of a copy, and its size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyKind {
    pub(crate) places: (Place, Place),
    pub(crate) bytes: usize,
}

impl CopyKind {
    /// Whether one side is memory of the host.
    pub(super) fn uses_bus(&self) -> bool {
        self.places != (Place::Device, Place::Device)
    }

    pub(crate) fn is_pageable(&self) -> bool {
        self.places.0 == Place::Pageable || self.places.1 == Place::Pageable
    }
}

impl WorkKind {
    pub(crate) fn record_on(self, track: &Track, launched: Span, span: Span) {
        track.record(match self {
            WorkKind::Kernel { name, shapes } => {
                trace::Event::Kernel { name, launched, span, shapes }
            }
            WorkKind::Copy(CopyKind { places, bytes }) => {
                trace::Event::Copy { launched, span, bytes: bytes as u64, places }
            }
            WorkKind::Poison => return,
        });
    }
}

/// The message of the first work that failed on a device. Later work is not run.
#[derive(Debug, Default)]
pub(super) struct FirstFailure(Mutex<Option<String>>);

impl FirstFailure {
    /// Errors with the message.
    pub(super) fn check(&self) -> Result<()> {
        lock(&self.0).clone().map_or(Ok(()), |message| Err(MemoryError::DeviceFailed(message)))
    }

    pub(super) fn set(&self, message: String) {
        lock(&self.0).get_or_insert(message);
    }

    pub(super) fn set_panic(&self, subject: &str, panic: &(dyn Any + Send)) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied());
        self.set(format!("{subject} panicked: {}", text.unwrap_or("for an unknown reason")));
    }
}

/// An address for the thread that runs a piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendPtr(pub(crate) *mut u8);

impl SendPtr {
    /// The address, for a closure that captures this value as a whole.
    pub(crate) fn get(self) -> *mut u8 {
        self.0
    }

    /// The address in the memory of a card.
    pub(crate) fn on_card(self) -> u64 {
        self.0.addr() as u64
    }
}

// SAFETY: an address is a number; each use of the memory there has its own argument.
unsafe impl Send for SendPtr {}
