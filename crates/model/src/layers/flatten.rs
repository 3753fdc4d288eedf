//! Flattens images to rows.

use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

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

    fn backward(
        &self,
        _: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        Ok(Some(d_output.view(input.shape())?))
    }
}
