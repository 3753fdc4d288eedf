//! Convolution with bias.

use paceline_kernels::conv2d;
use paceline_memory::Tensor;

use crate::{Context, Half, Init, Layer, ParamId, Result, Saved, UnitBuilder};

/// Maps (n, h, w, c_in) to (n, h', w', c_out), or (n, c_in, h, w) to (n, c_out, h', w'). An input of f32 is fine where the
/// network computes in bf16.
#[derive(Debug)]
pub struct Conv2d {
    pub(super) geometry: conv2d::Conv2d,
    pub(super) weight: ParamId,
    pub(super) bias: ParamId,
}

impl Conv2d {
    /// Registers weight (kh, kw, c_in, c_out) and bias (c_out). Errors if the geometry is invalid.
    pub fn new(unit: &mut UnitBuilder, geometry: conv2d::Conv2d) -> Result<Self> {
        geometry.check()?;
        let init = Init::fan_in(geometry.kernel.0 * geometry.kernel.1 * geometry.c_in);
        let weight = unit.param("weight", geometry.weight_shape(), init);
        let bias = unit.param("bias", [geometry.c_out], init);
        Ok(Self { geometry, weight, bias })
    }
}

impl Layer for Conv2d {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let batch = input.dims()[0];
        let output = cx.activation(self.geometry.output_shape(batch))?;
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        conv2d::forward(cx.compute, &self.geometry, &input, &weight, &bias, &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        if half.writes_weights() && cx.trains(self.weight) {
            let (dw, db) = (cx.grad(self.weight)?, cx.grad(self.bias)?);
            let (dy, accumulate) = (&d_output, cx.accumulates(self.weight));
            conv2d::backward_weight(cx.compute, &self.geometry, input, dy, &dw, &db, accumulate)?;
            cx.gradient_ready(self.bias)?;
            cx.gradient_ready(self.weight)?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let d_input = cx.gradient_of(input)?;
        let weight = cx.param(self.weight)?;
        conv2d::backward_input(cx.compute, &self.geometry, &weight, &d_output, &d_input)?;
        Ok(Some(d_input))
    }
}
