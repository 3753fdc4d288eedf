//! The fully connected layer, with or without a bias, optionally followed by ReLU.

use paceline_kernels::linear::{self, Activation};
use paceline_kernels::{cast, elementwise};
use paceline_memory::{DType, Device, Tensor};

use crate::layer::sum;
use crate::{
    Context, Half, Init, Layer, LayoutBuilder, ModelError, ParamId, Result, Saved, UnitBuilder,
};

/// Maps (n, inputs) to (n, outputs).
///
/// The weight (outputs, inputs) consists of one or more parameters, one below the other, as those of queries, keys and values. So there
/// is one product instead of one for each parameter.
///
/// Errors with another shape. In a network of bf16 the input may be of f32.
///
/// ```
/// use paceline_kernels::linear::Activation;
/// use paceline_model::layers::Linear;
/// use paceline_model::{LayoutBuilder, gradcheck};
///
/// let mut layout = LayoutBuilder::new();
/// let layer = Linear::new(&mut layout.unit("fc"), 3, 2, Activation::None);
/// let layout = layout.finish(1);
/// assert!(gradcheck::worst_error(&layer, &layout, &[4, 3], 42)? < 1e-7);
/// let refused = gradcheck::worst_error(&layer, &layout, &[4, 5], 42).unwrap_err();
/// assert_eq!(refused.to_string(), "linear_forward: input must have shape [4, 3], got [4, 5]");
/// # Ok::<(), paceline_model::ModelError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    activation: Activation,
    weights: Vec<ParamId>,
    bias: Option<ParamId>,
    is_wide: bool,
}

impl Linear {
    /// Registers weight (outputs, inputs) and bias (outputs).
    pub fn new(
        unit: &mut UnitBuilder,
        inputs: usize,
        outputs: usize,
        activation: Activation,
    ) -> Self {
        let init = Init::fan_in(inputs);
        let weights = vec![unit.param("weight", [outputs, inputs], init)];
        let bias = Some(unit.param("bias", [outputs], init));
        Self { inputs, outputs, activation, weights, bias, is_wide: false }
    }

    /// A layer without bias and activation. Registers a weight (outputs, inputs) for each name and its outputs.
    ///
    /// Errors if the weights cannot lie side by side, because one of them, except the last, has a number of elements
    /// that is no multiple of the alignment of parameters.
    pub fn projection(
        unit: &mut UnitBuilder,
        inputs: usize,
        parts: &[(&str, usize)],
        init: Init,
    ) -> Result<Self> {
        let mut weights = Vec::new();
        for &(name, outputs) in parts {
            weights.push(unit.param(name, [outputs, inputs], init));
        }
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
        let align = LayoutBuilder::ALIGN_ELEMS;
        let before_last = &parts[..parts.len().saturating_sub(1)];
        let is_odd = |(_, outputs): &&(&str, usize)| !(outputs * inputs).is_multiple_of(align);
        if let Some((name, outputs)) = before_last.iter().find(is_odd) {
            return Err(ModelError::Config(format!(
                "{name} has {outputs} x {inputs} elements, and this number must be a multiple of {align}"
            )));
        }
        let activation = Activation::None;
        Ok(Self { inputs, outputs, activation, weights, bias: None, is_wide: false })
    }

    /// The same layer with an output of the type of the parameters, which can be added to a residual stream.
    pub fn into_residual(self) -> Self {
        Self { is_wide: true, ..self }
    }

    /// A layer that is tied to another layer: it uses the same parameters.
    pub fn tied_to(layout: &mut LayoutBuilder, other: &Linear, activation: Activation) -> Self {
        let weights = other.weights.iter().map(|weight| layout.tie(*weight)).collect();
        let bias = other.bias.map(|bias| layout.tie(bias));
        Self { activation, weights, bias, ..other.clone() }
    }

    fn weight(&self, cx: &Context) -> Result<Tensor> {
        Ok(cx.params(&self.weights)?.view([self.outputs, self.inputs])?)
    }

    /// The input that the forward pass has saved. It saves the output too if there is an activation.
    fn input<'a>(&self, saved: &'a Saved) -> Result<&'a Tensor> {
        match self.activation {
            Activation::None => saved.tensors().map(|[input]| input),
            Activation::Relu => saved.tensors().map(|[input, _]| input),
        }
    }

    /// The gradient of the sum before the activation, for both halves of the backward pass; the first one computes it.
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
        saved.keep_for_weights(d_sum.clone());
        Ok(d_sum)
    }

    /// The gradient of the output as a card's products of both halves round it.
    fn rounded_once(
        &self,
        cx: &Context,
        saved: &Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Tensor> {
        let is_read_twice = half == (Half::Whole { wants_input: true }) && self.bias.is_none();
        if !is_read_twice || d_output.dtype() != DType::F32 || cx.compute.device() != Device::Cuda {
            return Ok(d_output);
        }
        let dtype = self.input(saved)?.dtype();
        if dtype == DType::F32 {
            return Ok(d_output);
        }
        let rounded = cx.scratch(dtype, d_output.shape())?;
        cast::narrow(cx.compute, &d_output, &rounded)?;
        Ok(rounded)
    }
}

impl Layer for Linear {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let shape = [input.dims()[0], self.outputs];
        let output = if self.is_wide { cx.wide_activation(shape) } else { cx.activation(shape) }?;
        let weight = self.weight(cx)?;
        let bias = self.bias.map(|bias| cx.param(bias)).transpose()?;
        let is_product = self.bias.is_none() && self.activation == Activation::None;
        if shape[0] == 1 && is_product && cx.cache().is_some() {
            linear::forward_row(cx.compute, &input, &weight, &output)?;
        } else {
            linear::forward(cx.compute, &input, &weight, bias.as_ref(), self.activation, &output)?;
        }
        let saved = match self.activation {
            Activation::None => Saved::of([input]),
            Activation::Relu => Saved::of([input, output.clone()]),
        };
        Ok((output, saved))
    }

    fn forward_onto(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: &Tensor,
    ) -> Result<(Tensor, Saved)> {
        let is_product = self.bias.is_none() && self.activation == Activation::None;
        let is_wide = self.is_wide && matches!(onto.dtype(), DType::F32 | DType::F64);
        if !is_product || !is_wide || cx.cache().is_some() {
            let (output, saved) = self.forward(cx, input)?;
            return Ok((sum(cx, &saved, onto, output)?, saved));
        }
        let output = cx.wide_activation([input.dims()[0], self.outputs])?;
        linear::forward_onto(cx.compute, &input, &self.weight(cx)?, onto, &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let d_output = self.rounded_once(cx, saved, d_output, half)?;
        if half.writes_weights() && cx.trains(self.weights[0]) {
            let d_sum = self.d_sum(cx, saved, &d_output)?;
            let d_weight = cx.grads(&self.weights)?.view([self.outputs, self.inputs])?;
            let d_bias = self.bias.map(|bias| cx.grad(bias)).transpose()?;
            let (input, accumulate) = (self.input(saved)?, cx.accumulates(self.weights[0]));
            let d_bias = d_bias.as_ref();
            linear::backward_weight(cx.compute, input, &d_sum, &d_weight, d_bias, accumulate)?;
            let params = self.bias.iter().chain(self.weights.iter().rev());
            params.copied().try_for_each(|param| cx.gradient_ready(param))?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let d_sum = self.d_sum(cx, saved, &d_output)?;
        // The input of a part of a layer may be without the rows of other ranks.
        let d_input = cx.scratch(self.input(saved)?.dtype(), [d_sum.dims()[0], self.inputs])?;
        linear::backward_input(cx.compute, &self.weight(cx)?, &d_sum, &d_input)?;
        Ok(Some(d_input))
    }
}
