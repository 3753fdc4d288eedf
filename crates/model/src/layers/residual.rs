//! A layer whose input is added to its output.

use paceline_kernels::elementwise;
use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// `y = x + inner(x)`. The output of the inner layer is of the type of its input.
///
/// The sum takes the place of the inner layer's output. If the inner layer saves its output, as one that ends with ReLU or
/// attention does, or returns its input, the sum takes memory of its own.
pub struct Residual<L>(pub L);

/// `x + y`, in the memory of `y` if nobody else needs `y`.
fn sum(cx: &Context, saved: &Saved, x: &Tensor, y: Tensor) -> Result<Tensor> {
    let is_needed = saved.holds(&y) || x.buffer().is_same(y.buffer());
    let sum = if is_needed { cx.scratch(y.dtype(), y.shape())? } else { y.clone() };
    if is_needed {
        cx.compute.copy(&y, &sum)?;
    }
    elementwise::add(cx.compute, x, &sum)?;
    Ok(sum)
}

impl<L: Layer> Layer for Residual<L> {
    fn has_parameters(&self) -> bool {
        self.0.has_parameters()
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (output, saved) = self.0.forward(cx, input.clone())?;
        Ok((sum(cx, &saved, &input, output)?, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let d_input = self.0.backward(cx, saved, d_output.clone(), half)?;
        d_input.map(|d_input| sum(cx, saved, &d_output, d_input)).transpose()
    }
}
