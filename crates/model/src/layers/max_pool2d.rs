//! Max-pooling.

use paceline_kernels::pool2d;
use paceline_memory::{DType, Tensor};

use crate::{Context, Half, Layer, Result, Saved};

/// Maps (n, h, w, c) to (n, h', w', c), or planes to planes, in the type of its input.
#[derive(Debug)]
pub struct MaxPool2d {
    geometry: pool2d::MaxPool2d,
}

impl MaxPool2d {
    /// A pool with this geometry. Errors if the geometry is invalid.
    pub fn new(geometry: pool2d::MaxPool2d) -> Result<Self> {
        geometry.check()?;
        Ok(Self { geometry })
    }
}

impl Layer for MaxPool2d {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let shape = self.geometry.output_shape(input.dims()[0]);
        let output = cx.scratch(input.dtype(), shape)?;
        let winners = cx.scratch(DType::U8, shape)?;
        pool2d::forward(cx.compute, &self.geometry, &input, &output, &winners)?;
        Ok((output, Saved::of([winners])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [winners] = saved.tensors()?;
        let shape = self.geometry.input_shape(d_output.dims()[0]);
        let d_input = cx.scratch(d_output.dtype(), shape)?;
        pool2d::backward(cx.compute, &self.geometry, winners, &d_output, &d_input)?;
        Ok(Some(d_input))
    }
}
