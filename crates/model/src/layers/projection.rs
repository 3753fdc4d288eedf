//! Linear maps of the same input, without bias, as one matrix product.

use paceline_kernels::linear::{self, Activation};
use paceline_memory::Tensor;

use crate::{Context, Init, Layer, LayoutBuilder, ModelError, ParamId, Result, Saved};

/// Maps (n, inputs) to (n, outputs). The weight (outputs, inputs) consists of one or more parameters, whose rows lie one
/// below the other, as those of queries, keys and values. So there is one product instead of one for each parameter.
#[derive(Clone, Debug)]
pub struct Projection {
    inputs: usize,
    outputs: usize,
    weights: Vec<ParamId>,
    is_wide: bool,
}

impl Projection {
    /// Registers a weight (outputs, inputs) for each name and its outputs.
    ///
    /// Errors if the weights cannot lie side by side, because one of them, the last one apart, has a number of elements
    /// that is no multiple of the alignment of parameters.
    pub fn new(
        layout: &mut LayoutBuilder,
        inputs: usize,
        parts: &[(&str, usize)],
        init: Init,
    ) -> Result<Self> {
        let mut weights = Vec::new();
        for &(name, outputs) in parts {
            weights.push(layout.param(name, [outputs, inputs], init));
        }
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
        let align = LayoutBuilder::ALIGN_ELEMS;
        let before_last = &parts[..parts.len().saturating_sub(1)];
        match before_last.iter().find(|(_, outputs)| !(outputs * inputs).is_multiple_of(align)) {
            None => Ok(Self { inputs, outputs, weights, is_wide: false }),
            Some((name, outputs)) => Err(ModelError::Config(format!(
                "{name} has {outputs} x {inputs} elements, and this number must be a multiple of {align}"
            ))),
        }
    }

    /// The same layer with an output of the type of the parameters, which can be added to a residual stream.
    pub fn into_residual(self) -> Self {
        Self { is_wide: true, ..self }
    }
}

impl Layer for Projection {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let shape = [input.dims()[0], self.outputs];
        let output = if self.is_wide { cx.wide_activation(shape) } else { cx.activation(shape) }?;
        let weight = cx.params(&self.weights)?.view([self.outputs, self.inputs])?;
        linear::forward(cx.compute, &input, &weight, None, Activation::None, &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        if !cx.trains(self.weights[0]) {
            return Ok(());
        }
        let [input] = saved.tensors()?;
        let d_weight = cx.grads(&self.weights)?.view([self.outputs, self.inputs])?;
        let accumulate = cx.accumulates(self.weights[0]);
        linear::backward_weight(cx.compute, input, d_output, &d_weight, None, accumulate)?;
        self.weights.iter().rev().try_for_each(|weight| cx.gradient_ready(*weight))
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let [input] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        let weight = cx.params(&self.weights)?.view([self.outputs, self.inputs])?;
        linear::backward_input(cx.compute, &weight, d_output, &d_input)?;
        Ok(d_input)
    }
}
