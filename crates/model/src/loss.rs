//! The loss of a model's output against its targets.

use paceline_kernels::loss::{self, LossSums};
use paceline_memory::Tensor;

use crate::{Context, Result};

/// A loss over a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Cross-entropy of logits (n, classes) with labels (n) of i64.
    CrossEntropy,
    /// Mean squared error of (n, columns) with targets of the same shape.
    Mse,
}

impl Loss {
    /// The sums of loss and correct samples, without a gradient.
    pub fn evaluate(self, output: &Tensor, target: &Tensor) -> Result<LossSums> {
        Ok(self.run(output, target, 1.0, None)?)
    }

    /// The sums of loss and correct samples, and `scale` times the gradient of the summed loss with respect
    /// to the output.
    pub fn differentiate(
        self,
        cx: &Context,
        output: &Tensor,
        target: &Tensor,
        scale: f64,
    ) -> Result<(LossSums, Tensor)> {
        let gradient = cx.activation(output.shape())?;
        let name = match self {
            Loss::CrossEntropy => "cross_entropy",
            Loss::Mse => "mse",
        };
        let _time = cx.compute.time(name, [output, target]);
        let sums = self.run(output, target, scale, Some(&gradient))?;
        Ok((sums, gradient))
    }

    fn run(
        self,
        output: &Tensor,
        target: &Tensor,
        scale: f64,
        gradient: Option<&Tensor>,
    ) -> paceline_kernels::Result<LossSums> {
        match self {
            Loss::CrossEntropy => loss::cross_entropy(output, target, scale, gradient),
            Loss::Mse => loss::mse(output, target, scale, gradient),
        }
    }
}
