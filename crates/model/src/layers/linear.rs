//! The fully connected layer, optionally followed by ReLU.

use paceline_kernels::elementwise;
use paceline_kernels::linear::{self, Activation};
use paceline_memory::Tensor;

use crate::{Context, Init, Layer, LayoutBuilder, ParamId, Result, Saved};

/// Maps (n, inputs) to (n, outputs), with a bias. [`Projection`](super::Projection) has none. An input of f32 is fine where
/// the network computes in bf16.
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

    /// The gradient of the sum before the activation. Both halves of the backward pass need it; the first one computes it.
    fn d_sum(&self, cx: &Context, saved: &mut Saved, d_output: &Tensor) -> Result<Tensor> {
        if self.activation == Activation::None {
            return Ok(d_output.clone());
        }
        if let [d_sum] = saved.kept() {
            return Ok(d_sum.clone());
        }
        let [_, output] = saved.tensors()?;
        let d_sum = cx.activation(output.shape())?;
        elementwise::relu_backward(cx.compute, output, d_output, &d_sum)?;
        saved.keep(d_sum.clone());
        // The weight half asks for nothing else.
        if let Some(d_output) = &mut saved.d_output {
            *d_output = d_sum.clone();
        }
        Ok(d_sum)
    }
}

impl Layer for Linear {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation([input.dims()[0], self.outputs])?;
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        linear::forward(cx.compute, &input, &weight, Some(&bias), self.activation, &output)?;
        Ok((output.clone(), Saved::of([input, output])))
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        if !cx.trains(self.weight) {
            return Ok(());
        }
        let d_sum = self.d_sum(cx, saved, d_output)?;
        let [input, _] = saved.tensors()?;
        let (dw, db) = (cx.grad(self.weight)?, cx.grad(self.bias)?);
        let accumulate = cx.accumulates(self.weight);
        linear::backward_weight(cx.compute, input, &d_sum, &dw, Some(&db), accumulate)?;
        cx.gradient_ready(self.bias)?;
        cx.gradient_ready(self.weight)
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let d_sum = self.d_sum(cx, saved, d_output)?;
        let [input, _] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        linear::backward_input(cx.compute, &cx.param(self.weight)?, &d_sum, &d_input)?;
        Ok(d_input)
    }
}
