//! Normalization by the root mean square.

use paceline_kernels::rms_norm;
use paceline_memory::Tensor;

use super::part_of;
use crate::{Context, Half, Init, Layer, ParamId, Result, Saved, UnitBuilder};

/// Divides each row of (n, columns) by its root mean square, and multiplies it by a weight (columns). The rows are of the
/// type of the weight.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    eps: f64,
    weight: ParamId,
}

impl RmsNorm {
    /// Registers the weight under this name. `eps` is added to the mean square.
    pub fn new(unit: &mut UnitBuilder, name: &str, columns: usize, eps: f64) -> Self {
        Self { eps, weight: unit.param(name, [columns], Init::Constant(1.0)) }
    }
}

impl RmsNorm {
    /// The backward pass, and `onto` added to the gradient of the input if it is given.
    fn pass_back(
        &self,
        cx: &mut Context,
        saved: &Saved,
        d_output: &Tensor,
        half: Half,
        onto: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let [input, r] = saved.tensors()?;
        if half.writes_weights() && cx.trains(self.weight) {
            let rows = (input.dims()[0], true);
            cx.gradient_over_rows(self.weight, rows, |cx, rows, d_weight, accumulate| {
                let of = |tensor: &Tensor| part_of(tensor, &rows);
                let (x, r, dy) = (of(input)?, of(r)?, of(d_output)?);
                Ok(rms_norm::backward_weight(cx.compute, &x, &r, &dy, d_weight, accumulate)?)
            })?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let d_input = cx.gradient_of(input)?;
        let weight = cx.param(self.weight)?;
        rms_norm::backward_input(cx.compute, input, &weight, r, d_output, onto, &d_input)?;
        Ok(Some(d_input))
    }
}

impl Layer for RmsNorm {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation(input.shape())?;
        let r = cx.wide_activation([input.dims()[0]])?;
        let weight = cx.widened(cx.param(self.weight)?)?;
        rms_norm::forward(cx.compute, &input, &weight, self.eps, &output, &r)?;
        Ok((output, Saved::of([input, r])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        self.pass_back(cx, saved, &d_output, half, None)
    }

    fn backward_onto(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
        onto: &Tensor,
    ) -> Result<Option<Tensor>> {
        self.pass_back(cx, saved, &d_output, half, Some(onto))
    }
}
