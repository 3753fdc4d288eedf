//! How batches are made, and how they come to a device.

use serde::Serialize;

/// How batches come to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Copies {
    /// Whether they are copied from pinned memory.
    pub pinned: bool,
    /// Whether the host goes on during the copy.
    pub non_blocking: bool,
    /// Whether the next one is copied on a stream of its own, beside the step.
    pub own_stream: bool,
    /// Whether generated ones are copied too, instead of being made on the device.
    pub of_generated: bool,
}

/// How batches are made on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Loading {
    /// Batches that a thread makes ahead of the step; with zero, each is made in line, when the step asks for it.
    pub ahead: usize,
    /// Microseconds of a core that each sample takes more, as if it had to be decoded.
    pub decode_us: f64,
}
