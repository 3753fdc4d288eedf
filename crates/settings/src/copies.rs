//! How batches come to a device.

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
