//! How batches are made, and how they come to a device.

use serde::Serialize;

/// How batches come to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Copies {
    /// From pinned memory.
    pub pinned: bool,
    /// While the host goes on.
    pub non_blocking: bool,
    /// The next one, on a stream of its own, beside the step.
    pub own_stream: bool,
    /// Generated ones too, which are made on the device otherwise.
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
