//! Objectives: how well a model's output fits a batch.
//!
//! Input: the output of the last block, and the batch. Output: sums over the batch, and the gradient of the output. An
//! objective does not know how many ranks share the batch: the caller adds up sums, and divides.

use paceline_kernels::{Compute, loss};
use paceline_memory::Tensor;

use crate::{Batch, Context, ParamId, Result, Saved, UnitId};

/// The last part of a model, which compares its output with the batch. It may own parameters, for example a head that
/// is fused with the loss. Then it registers them in a unit, and writes and announces their gradients like a layer.
pub trait Objective: Send + Sync {
    /// The unit of the objective's parameters, if any. A pass opens the unit before it computes the objective, and
    /// then closes it.
    fn unit(&self) -> Option<UnitId> {
        None
    }

    /// Whether the objective writes gradients of parameters: those of its unit, or a parameter of a root unit. Then the
    /// backward pass of a micro-batch begins with its loss.
    fn has_parameters(&self) -> bool {
        self.unit().is_some()
    }

    /// The parameter of a root unit that the objective uses, if any. A pipeline keeps a copy of it in its last stage.
    fn tied(&self) -> Option<ParamId> {
        None
    }

    /// Whether predictions are right or wrong, so that there is an accuracy. If not, nobody reads the number of correct
    /// predictions. There is no default: a regression must not report an accuracy of zero by being forgotten.
    fn classifies(&self) -> bool;

    /// The number that the mean loss divides by: the samples of the batch by default, or its tokens.
    fn count(&self, batch: &Batch) -> Result<usize> {
        Ok(batch.num_samples())
    }

    /// Adds to `sums`, f64 (3): the sum of the losses, the number of correct predictions, and [`Objective::count`].
    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()>;

    /// The logits of each sample's class, f32 (n, classes). `None` if a sample has no class, as with a language model, which
    /// predicts a token at each position.
    fn logits(&self, _cx: &mut Context, _output: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The number that the mean loss divides by in the shares of all ranks together, which have `num_samples` samples.
    /// `batch` is the share of one of them, which may have no sample. `None` if it does not follow from these: then the
    /// ranks add up [`Objective::count`] in each step. All ranks must give the same answer.
    fn count_of_all(&self, _batch: &Batch, num_samples: usize) -> Option<usize> {
        Some(num_samples)
    }

    /// Whether the objective leaves out the targets after the end of a sample
    /// ([`Batch::LENGTHS`]). If not, targets of different lengths are refused, because padding would be trained.
    fn reads_lengths(&self) -> bool {
        false
    }

    /// Like [`Objective::evaluate`]. Also returns the gradient of `scale` times the summed loss with respect to the
    /// output.
    ///
    /// The gradients of parameters are written and announced. If [`Objective::has_halves`] and `put_off` is given, they are put
    /// off, and what [`Objective::backward_weight`] needs stays there.
    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        put_off: Option<&mut Saved>,
    ) -> Result<Tensor>;

    /// Whether the gradients of parameters can be put off.
    fn has_halves(&self) -> bool {
        false
    }

    /// The gradients that [`Objective::differentiate`] has put off.
    fn backward_weight(&self, _cx: &mut Context, _saved: &Saved) -> Result<()> {
        Ok(())
    }
}

/// The arithmetic of a loss: output, targets, scale, gradient of the output if it is wanted, sums.
type Kernel =
    fn(&Compute, &Tensor, &Tensor, f64, Option<&Tensor>, &Tensor) -> paceline_kernels::Result<()>;

fn evaluate(kernel: Kernel, cx: &Context, output: &Tensor, sums: &Tensor) -> Result<()> {
    Ok(kernel(cx.compute, output, cx.batch(Batch::TARGETS)?, 1.0, None, sums)?)
}

fn differentiate(
    kernel: Kernel,
    cx: &Context,
    output: &Tensor,
    scale: f64,
    sums: &Tensor,
) -> Result<Tensor> {
    let gradient = cx.activation(output.shape())?;
    kernel(cx.compute, output, cx.batch(Batch::TARGETS)?, scale, Some(&gradient), sums)?;
    Ok(gradient)
}

/// Softmax cross-entropy of logits (n, classes) with targets (n) of i64.
///
/// Errors with a target that is no class. See [`Model`](crate::Model).
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn classifies(&self) -> bool {
        true
    }

    fn logits(&self, cx: &mut Context, output: &Tensor) -> Result<Option<Tensor>> {
        cx.widened(output.clone()).map(Some)
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        evaluate(loss::cross_entropy, cx, output, sums)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        _put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        differentiate(loss::cross_entropy, cx, output, scale, sums)
    }
}

/// Mean squared error of (n, columns) with targets of the same shape.
///
/// The loss of a sample is the mean over its columns. Errors with targets of another shape.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanSquaredError;

impl Objective for MeanSquaredError {
    fn classifies(&self) -> bool {
        false
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        evaluate(loss::mse, cx, output, sums)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        _put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        differentiate(loss::mse, cx, output, scale, sums)
    }
}
