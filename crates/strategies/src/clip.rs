//! Gradient clipping by global norm, for every strategy.
//!
//! This module does not know how gradients are distributed over the ranks: the strategy computes their
//! norm, and the optimizer scales them.

use crate::{Result, StepContext, Strategy, span};

/// Added to the norm before the division, as in PyTorch.
const EPS: f64 = 1e-6;

/// The norm of all gradients of the last training step, without the scale of the loss
/// ([`StepState::loss_scale`](crate::StepState::loss_scale)), and the
/// factor that makes it at most `max_norm`: an optimizer scales by it in the same pass as the update
/// ([`Optimizer::set_grad_factor`](paceline_model::Optimizer::set_grad_factor), until it is called again: pass the
/// factor divided by the scale of the loss). As in PyTorch's `clip_grad_norm_` the factor is
/// `max_norm / (norm + 1e-6)`, and at most 1. Every rank must call this.
///
/// If the norm is not finite, the factor is 1; the caller should then stop training, or skip the step. With an infinite
/// `max_norm` nothing is clipped. The time is recorded as part of the optimizer.
pub fn clip_factor(
    strategy: &mut dyn Strategy,
    cx: &mut StepContext,
    max_norm: f64,
) -> Result<(f64, f64)> {
    let start_ns = cx.track.begin(span::OPTIMIZER);
    let norm = strategy.grad_norm(cx)? / cx.state.loss_scale;
    cx.track.end(span::OPTIMIZER, start_ns);
    cx.end_barrier(start_ns);
    let factor = max_norm / (norm + EPS);
    Ok((norm, if norm.is_finite() { factor.min(1.0) } else { 1.0 }))
}
