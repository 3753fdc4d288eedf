//! What a piece of work is.
//!
//! Input: what was put into a stream. Output: what its time depends on, and what traces say of it.

use paceline_trace::{self as trace, Place, Shapes, Span};

/// What a piece of work is, for its time and for traces.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Kernel {
        name: &'static str,
        shapes: Shapes,
    },
    Copy(Copy),
    /// Freed memory is overwritten.
    Poison,
}

/// A copy from one place to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) places: (Place, Place),
    pub(super) bytes: usize,
}

impl Copy {
    pub(super) fn to_device(self) -> bool {
        self.places.1 == Place::Device
    }

    /// Whether one side is memory of the host.
    pub(super) fn uses_bus(&self) -> bool {
        self.places != (Place::Device, Place::Device)
    }

    pub(super) fn is_pageable(&self) -> bool {
        self.places.0 == Place::Pageable || self.places.1 == Place::Pageable
    }
}

impl What {
    /// The same for traces.
    pub(super) fn event(self, launched: Span, span: Span) -> Option<trace::Event> {
        Some(match self {
            What::Kernel { name, shapes } => trace::Event::Kernel { name, launched, span, shapes },
            What::Copy(Copy { places, bytes }) => {
                trace::Event::Copy { launched, span, bytes: bytes as u64, places }
            }
            What::Poison => return None,
        })
    }
}
