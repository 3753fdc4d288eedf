//! ReLU.

use paceline_kernels::elementwise;
use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// `max(0, x)`, element by element, in the type of its input.
#[derive(Debug, Default)]
pub struct Relu;

impl Layer for Relu {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.scratch(input.dtype(), input.shape())?;
        elementwise::relu(cx.compute, &input, &output)?;
        Ok((output.clone(), Saved::of([output])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [output] = saved.tensors()?;
        let d_input = cx.gradient_of(output)?;
        elementwise::relu_backward(cx.compute, output, &d_output, &d_input)?;
        Ok(Some(d_input))
    }
}
