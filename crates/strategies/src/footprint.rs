//! The memory that a strategy takes on a rank, known before the rank exists.

use paceline_model::{Layout, Precision};

/// Bytes that a strategy takes on one rank, by category, apart from the optimizer's state. The optimizer's state follows
/// from [`Owned::state`](paceline_model::Owned::state).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters that the rank holds between two steps, with padding, and buffers.
    pub parameters: usize,
    /// Gradients that the rank holds after the backward pass, with padding.
    pub gradients: usize,
    /// Memory for the parameters and gradients of open units.
    pub unsharded: usize,
    /// Further memory for communication.
    pub communication: usize,
}

impl Footprint {
    /// All parameters, buffers and gradients.
    pub fn of_replica(layout: &Layout, precision: Precision) -> Self {
        Self {
            parameters: layout.num_bytes(precision.master) + buffer_bytes(layout, precision),
            gradients: layout.trained_bytes(precision.grads),
            ..Self::default()
        }
    }
}

/// Bytes of the buffers, which every rank holds.
pub(crate) fn buffer_bytes(layout: &Layout, precision: Precision) -> usize {
    layout.num_buffer_elems() * precision.master.size_bytes()
}
