//! Flattens images to rows.

use paceline_memory::Tensor;

use crate::{Context, Layer, Result, Saved};

/// Maps (n, ...) to (n, product of the other extents). Copies nothing.
#[derive(Debug, Default)]
pub struct Flatten;

impl Layer for Flatten {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, _cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (batch, rest) = (input.dims()[0], input.dims()[1..].iter().product::<usize>());
        Ok((input.view([batch, rest])?, Saved::of([input])))
    }

    fn backward_input(
        &self,
        _cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let [input] = saved.tensors()?;
        Ok(d_output.view(input.shape())?)
    }
}
