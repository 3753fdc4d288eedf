//! A layer whose input is added to its output.

use paceline_kernels::elementwise;
use paceline_memory::Tensor;

use crate::{Context, Layer, Result, Saved};

/// `y = x + inner(x)`. The inner layer must not need its own output in its backward pass, because the sum is computed in
/// place. The output of the inner layer is of the type of its input.
pub struct Residual<L>(pub L);

impl<L: Layer> Layer for Residual<L> {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (output, saved) = self.0.forward(cx, input.clone())?;
        elementwise::add(cx.compute, &input, &output)?;
        Ok((output, saved))
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        self.0.backward_weight(cx, saved, d_output)
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let d_input = self.0.backward_input(cx, saved, d_output)?;
        elementwise::add(cx.compute, d_output, &d_input)?;
        Ok(d_input)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: Saved,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        let d_input = self.0.backward(cx, saved, d_output.clone(), wants_input)?;
        if let Some(d_input) = &d_input {
            elementwise::add(cx.compute, &d_output, d_input)?;
        }
        Ok(d_input)
    }
}
