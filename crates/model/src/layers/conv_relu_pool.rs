//! Convolution, bias, ReLU and 2x2 max-pool in one layer.

use paceline_kernels::conv_relu_pool;
use paceline_kernels::conv2d::Conv2d;
use paceline_memory::{DType, Tensor};

use crate::{Context, Half, Init, Layer, LayoutBuilder, ParamId, Result, Saved};

/// Maps (n, h, w, c_in) to (n, h'/2, w'/2, c_out), or (n, c_in, h, w) to (n, c_out, h'/2, w'/2). An input of f32 is fine where
/// the network computes in bf16.
#[derive(Debug)]
pub struct ConvReluPool {
    geometry: Conv2d,
    weight: ParamId,
    bias: ParamId,
}

impl ConvReluPool {
    /// Registers weight (kh, kw, c_in, c_out) and bias (c_out). Errors if the geometry is invalid.
    pub fn new(layout: &mut LayoutBuilder, geometry: Conv2d) -> Result<Self> {
        conv_relu_pool::check(&geometry)?;
        let init = Init::fan_in(geometry.kernel.0 * geometry.kernel.1 * geometry.c_in);
        let weight = layout.param("weight", geometry.weight_shape(), init);
        let bias = layout.param("bias", [geometry.c_out], init);
        Ok(Self { geometry, weight, bias })
    }
}

impl Layer for ConvReluPool {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let shape = conv_relu_pool::output_shape(&self.geometry, input.dims()[0]);
        let output = cx.activation(shape)?;
        let winners = cx.scratch(DType::U8, shape)?;
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        conv_relu_pool::forward(
            cx.compute,
            &self.geometry,
            &input,
            &weight,
            &bias,
            &output,
            &winners,
        )?;
        Ok((output, Saved::of([input, winners])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let [input, winners] = saved.tensors()?;
        let (compute, geometry, dy) = (cx.compute, &self.geometry, &d_output);
        if half.writes_weights() && cx.trains(self.weight) {
            let (dw, db) = (cx.grad(self.weight)?, cx.grad(self.bias)?);
            let add = cx.accumulates(self.weight);
            conv_relu_pool::backward_weight(compute, geometry, input, winners, dy, &dw, &db, add)?;
            cx.gradient_ready(self.bias)?;
            cx.gradient_ready(self.weight)?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let (weight, d_input) = (cx.param(self.weight)?, cx.gradient_of(input)?);
        conv_relu_pool::backward_input(compute, geometry, &weight, winners, dy, &d_input)?;
        Ok(Some(d_input))
    }
}
