//! Gradient clipping by global norm, for every strategy.
//!
//! It knows nothing of how gradients are spread over the ranks: a strategy says what their norm is.

use paceline_kernels::norm;
use paceline_trace::SpanTrack;

use crate::strategy::span;
use crate::{Replica, Result, Strategy};

/// Added to the norm before it divides, as PyTorch does.
const EPS: f64 = 1e-6;

/// Scales the gradients that a training step left, so that the norm of all of them together is at
/// most `max_norm`, and returns what it was. This is PyTorch's `clip_grad_norm_`: the factor is
/// `max_norm / (norm + 1e-6)`, and at most 1. Every rank calls it.
///
/// A norm that is not finite is returned, and the gradients are left alone: the caller is to stop.
/// Recorded as a part of the optimizer.
pub fn clip_grad_norm(
    strategy: &mut dyn Strategy,
    replica: &Replica,
    max_norm: f64,
    track: &mut SpanTrack,
) -> Result<f64> {
    track.record(span::OPTIMIZER, || {
        let norm = strategy.grad_norm(replica)?;
        let factor = max_norm / (norm + EPS);
        if norm.is_finite() && factor < 1.0 {
            norm::scale(&replica.compute, replica.storage.grads(), factor)?;
        }
        Ok(norm)
    })
}
