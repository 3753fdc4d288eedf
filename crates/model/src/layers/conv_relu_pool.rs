//! Convolution, bias, ReLU and 2x2 max-pool in one layer.

use paceline_kernels::{conv_relu_pool, conv2d};
use paceline_memory::{DType, Tensor};

use super::Conv2d;
use crate::{Context, Half, Layer, Result, Saved, UnitBuilder};

/// Maps (n, h, w, c_in) to (n, h'/2, w'/2, c_out), or (n, c_in, h, w) to (n, c_out, h'/2, w'/2). An input of f32 is fine where
/// the network computes in bf16.
#[derive(Debug)]
pub struct ConvReluPool(Conv2d);

impl ConvReluPool {
    /// Registers the parameters of a [`Conv2d`]. Errors if the geometry is invalid.
    pub fn new(unit: &mut UnitBuilder, geometry: conv2d::Conv2d) -> Result<Self> {
        conv_relu_pool::check(&geometry)?;
        Conv2d::new(unit, geometry).map(Self)
    }
}

impl Layer for ConvReluPool {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let Conv2d { geometry, weight, bias } = &self.0;
        let shape = conv_relu_pool::output_shape(geometry, input.dims()[0]);
        let (output, winners) = (cx.activation(shape)?, cx.scratch(DType::U8, shape)?);
        let (weight, bias) = (cx.param(*weight)?, cx.param(*bias)?);
        conv_relu_pool::forward(cx.compute, geometry, &input, &weight, &bias, &output, &winners)?;
        Ok((output, Saved::of([input, winners])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let Conv2d { geometry, weight, bias } = &self.0;
        let ([input, winners], compute, dy) = (saved.tensors()?, cx.compute, &d_output);
        if half.writes_weights() && cx.trains(*weight) {
            let (dw, db, add) = (cx.grad(*weight)?, cx.grad(*bias)?, cx.accumulates(*weight));
            conv_relu_pool::backward_weight(compute, geometry, input, winners, dy, &dw, &db, add)?;
            cx.gradient_ready(*bias)?;
            cx.gradient_ready(*weight)?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let (weight, d_input) = (cx.param(*weight)?, cx.gradient_of(input)?);
        conv_relu_pool::backward_input(compute, geometry, &weight, winners, dy, &d_input)?;
        Ok(Some(d_input))
    }
}
