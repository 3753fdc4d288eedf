//! A layer whose input is added to its output.

use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// `y = x + inner(x)`. The output of the inner layer is of the type of its input.
///
/// The sum takes the place of the inner layer's output. If the inner layer saves its output, as one that ends with ReLU or
/// attention does, or returns its input, the sum takes memory of its own.
pub struct Residual<L>(pub L);

impl<L: Layer> Layer for Residual<L> {
    fn has_parameters(&self) -> bool {
        self.0.has_parameters()
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        self.0.forward_onto(cx, input.clone(), &input)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        self.0.backward_onto(cx, saved, d_output.clone(), half, &d_output)
    }
}
