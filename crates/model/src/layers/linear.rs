//! The fully connected layer, optionally followed by ReLU.

use paceline_kernels::elementwise;
use paceline_kernels::linear::{self, Activation};
use paceline_memory::Tensor;

use crate::{Context, Init, Layer, LayoutBuilder, ParamId, Result, Saved, Which};

/// Maps (n, inputs) to (n, outputs).
#[derive(Clone, Debug)]
pub struct Linear {
    outputs: usize,
    activation: Activation,
    weight: ParamId,
    bias: ParamId,
}

impl Linear {
    /// Registers weight (outputs, inputs) and bias (outputs).
    pub fn new(
        layout: &mut LayoutBuilder,
        inputs: usize,
        outputs: usize,
        activation: Activation,
    ) -> Self {
        let init = Init::fan_in(inputs);
        let weight = layout.param("weight", [outputs, inputs], init);
        let bias = layout.param("bias", [outputs], init);
        Self { outputs, activation, weight, bias }
    }

    /// A layer that is tied to another layer: it uses the same parameters.
    pub fn tied_to(layout: &mut LayoutBuilder, other: &Linear, activation: Activation) -> Self {
        let (weight, bias) = (layout.tie(other.weight), layout.tie(other.bias));
        Self { outputs: other.outputs, activation, weight, bias }
    }
}

impl Layer for Linear {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation(input.dtype(), [input.dims()[0], self.outputs])?;
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        linear::forward(cx.compute, &input, &weight, &bias, self.activation, &output)?;
        Ok((output.clone(), Saved::of([input, output])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        which: Which,
    ) -> Result<Option<Tensor>> {
        let [input, output] = saved.tensors()?;
        let d_sum = match self.activation {
            Activation::None => d_output,
            Activation::Relu => {
                let d_sum = cx.activation(output.dtype(), output.shape())?;
                elementwise::relu_backward(cx.compute, output, &d_output, &d_sum)?;
                d_sum
            }
        };
        if which != Which::Input && cx.trains(self.weight) {
            let (dw, db) = (cx.grad(self.weight)?, cx.grad(self.bias)?);
            linear::backward_weight(
                cx.compute,
                input,
                &d_sum,
                &dw,
                &db,
                cx.accumulates(self.weight),
            )?;
            cx.gradient_ready(self.bias)?;
            cx.gradient_ready(self.weight)?;
        }
        if which == Which::Weight {
            return Ok(None);
        }
        let d_input = cx.activation(input.dtype(), input.shape())?;
        linear::backward_input(cx.compute, &cx.param(self.weight)?, &d_sum, &d_input)?;
        Ok(Some(d_input))
    }
}
