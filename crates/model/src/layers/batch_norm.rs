//! Batch normalization, optionally followed by ReLU.

use paceline_kernels::batch_norm;
use paceline_kernels::linear::Activation;
use paceline_memory::{DType, Tensor};

use crate::{BufferId, Context, Half, Init, Layer, Mode, ParamId, Result, Saved, UnitBuilder};

/// Normalizes (n, h, w, c) or (n, c), channel by channel, in the type of its input. In training, the statistics are those
/// of this rank's share of the batch, or of all shares if [`Context::syncs_statistics`] is true, and they
/// update the running statistics. In evaluation, the running statistics are used.
///
/// An empty share changes the running statistics only if the statistics are computed over all shares.
#[derive(Debug)]
pub struct BatchNorm {
    config: batch_norm::BatchNorm,
    weight: ParamId,
    bias: ParamId,
    running_mean: BufferId,
    running_var: BufferId,
}

impl BatchNorm {
    /// Registers weight (c) and bias (c), and the buffers running_mean (c) and running_var (c), with
    /// PyTorch's settings.
    pub fn new(unit: &mut UnitBuilder, channels: usize, activation: Activation) -> Self {
        Self {
            config: batch_norm::BatchNorm::new(channels, activation),
            weight: unit.param("weight", [channels], Init::Constant(1.0)),
            bias: unit.param("bias", [channels], Init::Constant(0.0)),
            running_mean: unit.buffer("running_mean", [channels], 0.0),
            running_var: unit.buffer("running_var", [channels], 1.0),
        }
    }

    /// The statistics to normalize with, in the form that the kernels expect.
    fn moments(&self, cx: &mut Context, input: &Tensor) -> Result<Tensor> {
        let moments = cx.scratch(DType::F64, [self.config.sums_len()])?;
        let (mean, var) = (cx.buffer(self.running_mean)?, cx.buffer(self.running_var)?);
        match cx.mode() {
            Mode::Evaluate => {
                batch_norm::running_moments(cx.compute, &self.config, &mean, &var, &moments)?
            }
            Mode::Train => {
                let sums = cx.scratch(DType::F64, [self.config.sums_len()])?;
                batch_norm::sums(cx.compute, &self.config, input, &sums)?;
                if cx.syncs_statistics() {
                    cx.sum_over_ranks(&sums)?;
                }
                batch_norm::moments(cx.compute, &self.config, &sums, &moments)?;
                if cx.updates_statistics() {
                    batch_norm::update_running(cx.compute, &self.config, &moments, &mean, &var)?;
                }
            }
        }
        Ok(moments)
    }

    /// The sums over this share from which both halves of the backward pass begin; the first half computes them.
    fn gradient_sums(&self, cx: &Context, saved: &mut Saved, d_output: &Tensor) -> Result<Tensor> {
        if let [sums] = saved.kept() {
            return Ok(sums.clone());
        }
        let ([input, moments], config) = (saved.tensors()?, &self.config);
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        let sums = cx.scratch(DType::F64, [config.gradient_sums_len()])?;
        batch_norm::gradient_sums(
            cx.compute, config, input, moments, &weight, &bias, d_output, &sums,
        )?;
        saved.keep(sums.clone());
        Ok(sums)
    }
}

impl Layer for BatchNorm {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let moments = self.moments(cx, &input)?;
        let output = cx.scratch(input.dtype(), input.shape())?;
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        batch_norm::normalize(cx.compute, &self.config, &input, &moments, &weight, &bias, &output)?;
        Ok((output, Saved::of([input, moments])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        if half.writes_weights() && cx.trains(self.weight) {
            // The gradients of this share only: the strategy averages them over the ranks.
            let sums = self.gradient_sums(cx, saved, &d_output)?;
            let (dw, db) = (cx.grad(self.weight)?, cx.grad(self.bias)?);
            let accumulate = cx.accumulates(self.weight);
            batch_norm::backward_weight(cx.compute, &self.config, &sums, &dw, &db, accumulate)?;
            cx.gradient_ready(self.bias)?;
            cx.gradient_ready(self.weight)?;
        }
        if !half.wants_input() {
            return Ok(None);
        }
        let mut sums = self.gradient_sums(cx, saved, &d_output)?;
        if cx.syncs_statistics() {
            // The other half may come later, and needs the sums of this share.
            let own = sums;
            sums = cx.scratch(own.dtype(), own.shape())?;
            cx.compute.copy(&own, &sums)?;
            cx.sum_over_ranks(&sums)?;
        }
        let ([input, moments], config, dy) = (saved.tensors()?, &self.config, &d_output);
        let (weight, bias) = (cx.param(self.weight)?, cx.param(self.bias)?);
        let d_input = cx.gradient_of(input)?;
        batch_norm::backward_input(
            cx.compute, config, input, moments, &weight, &bias, dy, &sums, &d_input,
        )?;
        Ok(Some(d_input))
    }
}
