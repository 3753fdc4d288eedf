//! What a model's output is measured against.

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
    /// Sums over the samples; no gradient.
    pub fn evaluate(self, output: &Tensor, target: &Tensor) -> Result<LossSums> {
        Ok(self.run(output, target, 1.0, None)?)
    }

    /// Sums over the samples, and `scale` times the gradient of their sum.
    pub fn differentiate(
        self,
        cx: &Context,
        output: &Tensor,
        target: &Tensor,
        scale: f64,
    ) -> Result<(LossSums, Tensor)> {
        let gradient = cx.activation(output.dtype(), output.shape())?;
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
