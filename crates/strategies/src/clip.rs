//! Gradient clipping by global norm, for every strategy.
//!
//! This module knows nothing of how gradients are distributed over the ranks: the strategy computes their
//! norm, and the optimizer scales them.

use paceline_trace::{SpanTrack, now_ns};

use crate::strategy::span;
use crate::{Replica, Result, Strategy};

/// Added to the norm before the division, as in PyTorch.
const EPS: f64 = 1e-6;

/// The norm of all gradients of the last training step together, without the scale of the loss ([`Replica::loss_scale`]), and the
/// factor that makes it at most `max_norm`: an optimizer scales by it in the same pass as the update
/// ([`Optimizer::set_grad_factor`](paceline_model::Optimizer::set_grad_factor), which holds until it is called again: pass the
/// factor divided by the scale of the loss). As in PyTorch's `clip_grad_norm_` the factor is
/// `max_norm / (norm + 1e-6)`, and at most 1. Every rank must call this.
///
/// If the norm is not finite, the factor is 1; the caller should then stop training, or skip the step. With an infinite
/// `max_norm` nothing is clipped. The time is recorded as part of the optimizer.
pub fn clip_factor(
    strategy: &mut dyn Strategy,
    replica: &Replica,
    max_norm: f64,
    track: &mut SpanTrack,
) -> Result<(f64, f64)> {
    let start_ns = now_ns();
    let norm = track.record(span::OPTIMIZER, || strategy.grad_norm(replica))?;
    let norm = norm / replica.loss_scale;
    replica.ends_barrier(start_ns, track);
    let factor = max_norm / (norm + EPS);
    Ok((norm, if norm.is_finite() { factor.min(1.0) } else { 1.0 }))
}
