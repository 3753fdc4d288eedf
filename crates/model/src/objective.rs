//! Objectives: how well a model's output fits a batch.
//!
//! Input: the output of the last block, and the batch. Output: sums over the batch, and the gradient of the output. An
//! objective does not know how many ranks share the batch: sums can be added up, and the caller divides.

use paceline_kernels::loss;
use paceline_memory::Tensor;

use crate::{Batch, Context, Result, UnitId};

/// The last part of a model, which compares its output with the batch. It may own parameters, for example a head that
/// is fused with the loss. Then it registers them in a unit, and writes and announces their gradients like any layer.
pub trait Objective: Send + Sync {
    /// The unit of the objective's parameters, if it has any. A pass opens the unit before it computes the objective, and
    /// closes the unit afterwards.
    fn unit(&self) -> Option<UnitId> {
        None
    }

    /// The number that the mean loss divides by: the samples of the batch by default, or its tokens.
    fn count(&self, batch: &Batch) -> Result<usize> {
        Ok(batch.num_samples())
    }

    /// Adds to `sums`, f64 (3): the sum of the losses, the number of correct predictions, and [`Objective::count`].
    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()>;

    /// Like [`Objective::evaluate`]. Also returns the gradient of `scale` times the summed loss with respect to the
    /// output.
    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
    ) -> Result<Tensor>;
}

/// Softmax cross-entropy of logits (n, classes) with targets (n) of i64.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let targets = cx.batch(Batch::TARGETS)?;
        Ok(loss::cross_entropy(cx.compute, output, targets, 1.0, None, sums)?)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
    ) -> Result<Tensor> {
        let gradient = cx.activation(output.shape())?;
        let targets = cx.batch(Batch::TARGETS)?;
        loss::cross_entropy(cx.compute, output, targets, scale, Some(&gradient), sums)?;
        Ok(gradient)
    }
}

/// Mean squared error of (n, columns) with targets of the same shape.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanSquaredError;

impl Objective for MeanSquaredError {
    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let targets = cx.batch(Batch::TARGETS)?;
        Ok(loss::mse(cx.compute, output, targets, 1.0, None, sums)?)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
    ) -> Result<Tensor> {
        let gradient = cx.activation(output.shape())?;
        let targets = cx.batch(Batch::TARGETS)?;
        loss::mse(cx.compute, output, targets, scale, Some(&gradient), sums)?;
        Ok(gradient)
    }
}
