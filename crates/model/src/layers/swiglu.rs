//! The gated activation of a feed-forward layer.

use paceline_kernels::swiglu;
use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// Maps gate and up, side by side as (n, 2 * columns), to `silu(gate) * up`, (n, columns).
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu;

impl Layer for SwiGlu {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation([input.dims()[0], input.dims()[1] / 2])?;
        swiglu::forward(cx.compute, &input, &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        swiglu::backward(cx.compute, input, &d_output, &d_input)?;
        Ok(Some(d_input))
    }
}
