//! Batch normalization (Ioffe and Szegedy, 2015), optionally followed by ReLU:
//! `y = (x - mean) / sqrt(variance + eps) * weight + bias`, channel by channel.
//!
//! Shapes: x, y and their gradients (n, h, w, c) or (n, c); weight, bias and running statistics (c).
//! f32, f64, or x, y and their gradients in bf16 and everything else in f32. Then only results that go from layer to layer
//! are rounded, when they are stored.
//!
//! Each pass has two halves. The first half computes sums over the batch: [`sums`] in the forward pass,
//! [`gradient_sums`] in the backward pass. Both are small tensors of f64, which may be added up over
//! several shares of a batch before the second half begins; a share may be empty. Sums are taken over
//! blocks of rows, and then over the blocks in order, so no result depends on the number of threads.

use paceline_memory::{Category, DType, Device, Shape, Tensor};

use crate::activation::Activation;
use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::{self, MetaScratch};
use crate::stored::{self, for_stored};
use crate::{Compute, KernelError, Real, Result};

mod rows;

use rows::{Factors, add_gradient_sums, add_sums, input_rows, normalize_rows};

const OP: &str = "batch_norm";

/// Number of rows (positions of all images) in a block.
const ROWS_PER_BLOCK: usize = 256;

/// The settings of a batch normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Channels.
    pub channels: usize,
    /// Added to the variance.
    pub eps: f64,
    /// The weight of a batch in the running statistics.
    pub momentum: f64,
    /// The activation that follows the normalization.
    pub activation: Activation,
}

impl BatchNorm {
    /// With the settings of PyTorch's `BatchNorm2d`: eps 1e-5, momentum 0.1.
    pub fn new(channels: usize, activation: Activation) -> Self {
        Self { channels, eps: 1e-5, momentum: 0.1, activation }
    }

    /// Number of elements that [`sums`] and [`moments`] write.
    pub fn sums_len(&self) -> usize {
        1 + 2 * self.channels
    }

    /// Number of elements that [`gradient_sums`] writes.
    pub fn gradient_sums_len(&self) -> usize {
        2 * self.channels
    }

    /// Checks that the last extent is the channels, and returns the product of the others.
    fn rows(&self, operand: &'static str, x: &Tensor) -> Result<usize> {
        if self.channels == 0 {
            return Err(KernelError::Geometry { op: OP, reason: "there are no channels".into() });
        }
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.channels;
        } else {
            dims = vec![0, self.channels];
        }
        expect_shape(OP, operand, x.shape(), Shape::from(dims.as_slice()))?;
        Ok(x.num_elems() / self.channels)
    }

    fn check_channels(&self, operands: &[(&'static str, &Tensor)]) -> Result<()> {
        operands.iter().try_for_each(|(name, t)| expect_shape(OP, name, t.shape(), [self.channels]))
    }
}

/// Writes `sums` (1 + 2c) of f64: the number of values of a channel, the sum of each channel's values,
/// and the sum of their squares.
///
/// A variance computed from such sums loses digits if the mean is large compared with the deviation:
/// a mean of 10^k deviations costs 2k digits. The sums are kept in f64, in which the square of an f32 is
/// exact, so this is accurate enough: a mean of 1000 with a deviation of 1 leaves ten digits, more than
/// the values themselves have.
pub fn sums(compute: &Compute, config: &BatchNorm, input: &Tensor, sums: &Tensor) -> Result<()> {
    let _time = compute.time_old("batch_norm_sums", [input]);
    let rows = config.rows("input", input)?;
    expect_shape(OP, "sums", sums.shape(), [config.sums_len()])?;
    match compute.device_of(OP, [input, sums])? {
        Device::Cpu => {
            let mut sums = sums.write::<f64>()?;
            sums[0] = rows as f64;
            let (channels, sums) = (config.channels, &mut sums[1..]);
            for_stored!(OP, input.dtype(), S => {
                let x = input.read::<S>()?;
                add_blocks(compute, rows, sums, |range, sums| {
                    let x = &x[range.start * channels..range.end * channels];
                    add_sums::<S>(compute.simd, x, sums);
                })
            })
        }
        Device::Meta => {
            let (dtype, _) = stored::types(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [input])?;
            let mut pretended = pretended.writes(DType::F64, [sums])?;
            pretended.scratch(DType::F64, blocks_len(rows, 2 * config.channels))
        }
    }
}

/// Writes `moments` (1 + 2c) of f64 from [`sums`]: the count, each channel's mean, and its variance
/// (the mean of the squared deviations). Without any values they are zero.
pub fn moments(
    compute: &Compute,
    config: &BatchNorm,
    sums: &Tensor,
    moments: &Tensor,
) -> Result<()> {
    expect_shape(OP, "sums", sums.shape(), [config.sums_len()])?;
    expect_shape(OP, "moments", moments.shape(), [config.sums_len()])?;
    match compute.device_of(OP, [sums, moments])? {
        Device::Cpu => {
            let (sums, mut moments) = (sums.read::<f64>()?, moments.write::<f64>()?);
            let count = sums[0];
            moments.fill(0.0);
            moments[0] = count;
            if count > 0.0 {
                for c in 1..=config.channels {
                    let mean = sums[c] / count;
                    moments[c] = mean;
                    // Rounding may make it negative. `max` is not used, because it would turn NaN into zero.
                    let variance = sums[c + config.channels] / count - mean * mean;
                    moments[c + config.channels] = if variance < 0.0 { 0.0 } else { variance };
                }
            }
        }
        Device::Meta => {
            MetaScratch::new(compute, OP)
                .reads(DType::F64, [sums])?
                .writes(DType::F64, [moments])?;
        }
    }
    Ok(())
}

/// Writes `moments` from running statistics. The count is infinite, because the batch does not change
/// these statistics; [`backward_input`] then treats them as constants.
pub fn running_moments(
    compute: &Compute,
    config: &BatchNorm,
    running_mean: &Tensor,
    running_var: &Tensor,
    moments: &Tensor,
) -> Result<()> {
    config.check_channels(&[("running_mean", running_mean), ("running_var", running_var)])?;
    expect_shape(OP, "moments", moments.shape(), [config.sums_len()])?;
    match compute.device_of(OP, [running_mean, running_var, moments])? {
        Device::Cpu => {
            let mut moments = moments.write::<f64>()?;
            moments[0] = f64::INFINITY;
            let (means, variances) = moments[1..].split_at_mut(config.channels);
            for (from, to) in [(running_mean, means), (running_var, variances)] {
                match from.dtype() {
                    DType::F32 => widen::<f32>(&from.read()?, to),
                    DType::F64 => widen::<f64>(&from.read()?, to),
                    dtype => return Err(KernelError::DType { op: OP, dtype }),
                }
            }
        }
        Device::Meta => {
            let dtype = meta::float(OP, running_mean)?;
            let pretended =
                MetaScratch::new(compute, OP).reads(dtype, [running_mean, running_var])?;
            pretended.writes(DType::F64, [moments])?;
        }
    }
    Ok(())
}

/// `running = (1 - momentum) * running + momentum * batch` for mean and variance, with the unbiased
/// variance, divided by the count minus one. Fewer than two values have no such variance and change
/// nothing.
pub fn update_running(
    compute: &Compute,
    config: &BatchNorm,
    moments: &Tensor,
    running_mean: &Tensor,
    running_var: &Tensor,
) -> Result<()> {
    config.check_channels(&[("running_mean", running_mean), ("running_var", running_var)])?;
    expect_shape(OP, "moments", moments.shape(), [config.sums_len()])?;
    match compute.device_of(OP, [moments, running_mean, running_var])? {
        Device::Cpu => {
            let moments = moments.read::<f64>()?;
            let count = moments[0];
            if count < 2.0 {
                return Ok(());
            }
            let (means, variances) = moments[1..].split_at(config.channels);
            for (running, batch, factor) in
                [(running_mean, means, 1.0), (running_var, variances, count / (count - 1.0))]
            {
                match running.dtype() {
                    DType::F32 => {
                        follow::<f32>(&mut running.write()?, batch, factor, config.momentum)
                    }
                    DType::F64 => {
                        follow::<f64>(&mut running.write()?, batch, factor, config.momentum)
                    }
                    dtype => return Err(KernelError::DType { op: OP, dtype }),
                }
            }
        }
        Device::Meta => {
            let dtype = meta::float(OP, running_mean)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::F64, [moments])?;
            pretended.writes(dtype, [running_mean, running_var])?;
        }
    }
    Ok(())
}

fn widen<T: Real>(from: &[T], to: &mut [f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f64());
}

fn follow<T: Real>(running: &mut [T], batch: &[f64], factor: f64, momentum: f64) {
    for (running, batch) in running.iter_mut().zip(batch) {
        *running = T::from_f64((1.0 - momentum) * running.to_f64() + momentum * (factor * batch));
    }
}

/// Writes `output`: `y = x_hat * weight + bias` with `x_hat = (x - mean) / sqrt(variance + eps)`,
/// then the activation. Overwrites.
pub fn normalize(
    compute: &Compute,
    config: &BatchNorm,
    input: &Tensor,
    moments: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("batch_norm_normalize", [input]);
    let rows = config.rows("input", input)?;
    expect_shape(OP, "output", output.shape(), input.shape())?;
    match compute.device_of(OP, [input, moments, weight, bias, output])? {
        Device::Cpu => for_stored!(OP, input.dtype(), S => {
            let factors = Factors::new(config, moments, weight, bias)?;
            let (x, mut y) = (input.read::<S>()?, output.write::<S>()?);
            let items = batches(compute, &mut y, config.channels, rows);
            compute.threads.for_each(items, |(first, y)| {
                let x = &x[first * config.channels..][..y.len()];
                normalize_rows::<S>(compute.simd, &factors, x, y);
                Ok(())
            })
        }),
        Device::Meta => {
            let (dtype, real) = stored::types(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::F64, [moments])?;
            let pretended = pretended.reads(dtype, [input])?.reads(real, [weight, bias])?;
            pretended.writes(dtype, [output])?;
            Ok(())
        }
    }
}

/// Writes `gradient_sums` (2c) of f64: each channel's sum of `dz`, and its sum of `dz * x_hat`, where
/// `dz` is the gradient before the activation. The sums are the gradients of bias and weight.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn gradient_sums(
    compute: &Compute,
    config: &BatchNorm,
    input: &Tensor,
    moments: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    d_output: &Tensor,
    gradient_sums: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("batch_norm_gradient_sums", [input, d_output]);
    let rows = config.rows("input", input)?;
    expect_shape(OP, "d_output", d_output.shape(), input.shape())?;
    expect_shape(OP, "gradient_sums", gradient_sums.shape(), [config.gradient_sums_len()])?;
    let channels = config.channels;
    match compute.device_of(OP, [input, moments, weight, bias, d_output, gradient_sums])? {
        Device::Cpu => for_stored!(OP, input.dtype(), S => {
            let factors = Factors::new(config, moments, weight, bias)?;
            let (x, dy) = (input.read::<S>()?, d_output.read::<S>()?);
            add_blocks(compute, rows, &mut gradient_sums.write()?, |range, sums| {
                let range = range.start * channels..range.end * channels;
                let (x, dy) = (&x[range.clone()], &dy[range]);
                add_gradient_sums::<S>(compute.simd, &factors, x, dy, sums);
            })
        }),
        Device::Meta => {
            let (dtype, real) = stored::types(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::F64, [moments])?;
            let pretended = pretended.reads(dtype, [input, d_output])?;
            let pretended = pretended.reads(real, [weight, bias])?;
            let mut pretended = pretended.writes(DType::F64, [gradient_sums])?;
            pretended.scratch(DType::F64, blocks_len(rows, 2 * channels))
        }
    }
}

/// Gradients of weight and bias from the [`gradient_sums`] of only this share. Overwrites, or adds to the old
/// values if `accumulate`.
pub fn backward_weight(
    compute: &Compute,
    config: &BatchNorm,
    gradient_sums: &Tensor,
    d_weight: &Tensor,
    d_bias: &Tensor,
    accumulate: bool,
) -> Result<()> {
    expect_shape(OP, "gradient_sums", gradient_sums.shape(), [config.gradient_sums_len()])?;
    config.check_channels(&[("d_weight", d_weight), ("d_bias", d_bias)])?;
    match compute.device_of(OP, [gradient_sums, d_weight, d_bias])? {
        Device::Cpu => {
            let sums = gradient_sums.read::<f64>()?;
            let (of_bias, of_weight) = sums.split_at(config.channels);
            for (sums, to) in [(of_weight, d_weight), (of_bias, d_bias)] {
                match to.dtype() {
                    DType::F32 => put::<f32>(sums, &mut to.write()?, accumulate),
                    DType::F64 => put::<f64>(sums, &mut to.write()?, accumulate),
                    dtype => return Err(KernelError::DType { op: OP, dtype }),
                }
            }
        }
        Device::Meta => {
            let dtype = meta::float(OP, d_weight)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::F64, [gradient_sums])?;
            pretended.writes(dtype, [d_weight, d_bias])?;
        }
    }
    Ok(())
}

fn put<T: Real>(sums: &[f64], to: &mut [T], accumulate: bool) {
    for (to, sum) in to.iter_mut().zip(sums) {
        let sum = T::from_f64(*sum);
        *to = if accumulate { *to + sum } else { sum };
    }
}

/// Gradient of the input, from the [`gradient_sums`] of all shares from which `moments` were computed:
/// `dx = weight / sqrt(variance + eps) * (dz - (sum of dz + x_hat * sum of dz x_hat) / count)`.
/// Overwrites.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn backward_input(
    compute: &Compute,
    config: &BatchNorm,
    input: &Tensor,
    moments: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    d_output: &Tensor,
    gradient_sums: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("batch_norm_backward_input", [input, d_output]);
    let rows = config.rows("input", input)?;
    expect_shape(OP, "d_output", d_output.shape(), input.shape())?;
    expect_shape(OP, "d_input", d_input.shape(), input.shape())?;
    expect_shape(OP, "gradient_sums", gradient_sums.shape(), [config.gradient_sums_len()])?;
    match compute.device_of(OP, [input, moments, weight, bias, d_output, gradient_sums, d_input])? {
        Device::Cpu => for_stored!(OP, input.dtype(), S => {
            let mut factors = Factors::new(config, moments, weight, bias)?;
            factors.set_means(&gradient_sums.read::<f64>()?, moments.read::<f64>()?[0]);
            let (x, dy) = (input.read::<S>()?, d_output.read::<S>()?);
            let mut dx = d_input.write::<S>()?;
            let items = batches(compute, &mut dx, config.channels, rows);
            compute.threads.for_each(items, |(first, dx)| {
                let range = first * config.channels..first * config.channels + dx.len();
                let (x, dy) = (&x[range.clone()], &dy[range]);
                input_rows::<S>(compute.simd, &factors, x, dy, dx);
                Ok(())
            })
        }),
        Device::Meta => {
            let (dtype, real) = stored::types(OP, input)?;
            let pretended =
                MetaScratch::new(compute, OP).reads(DType::F64, [moments, gradient_sums])?;
            let pretended = pretended.reads(dtype, [input, d_output])?;
            pretended.reads(real, [weight, bias])?.writes(dtype, [d_input])?;
            Ok(())
        }
    }
}

/// Elements of the sums of all blocks of rows, `num_sums` for each block.
fn blocks_len(rows: usize, num_sums: usize) -> usize {
    rows.div_ceil(ROWS_PER_BLOCK).saturating_mul(num_sums)
}

/// Writes `sums`: `add` computes the sums of each block of rows, the threads share the blocks, and the
/// sums of the blocks are added up in order.
fn add_blocks(
    compute: &Compute,
    rows: usize,
    sums: &mut [f64],
    add: impl Fn(std::ops::Range<usize>, &mut [f64]) + Sync,
) -> Result<()> {
    let num_blocks = rows.div_ceil(ROWS_PER_BLOCK);
    let shape = [blocks_len(rows, sums.len())];
    let parts = compute.allocator.tensor(DType::F64, shape, Category::Workspace)?;
    let mut parts = parts.write::<f64>()?;
    let items = batches(compute, &mut parts, sums.len(), num_blocks);
    compute.threads.for_each(items, |(first, parts)| -> Result<()> {
        for (at, part) in parts.chunks_exact_mut(sums.len()).enumerate() {
            let start = (first + at) * ROWS_PER_BLOCK;
            add(start..rows.min(start + ROWS_PER_BLOCK), part);
        }
        Ok(())
    })?;
    sums.fill(0.0);
    for part in parts.chunks_exact(sums.len()) {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    Ok(())
}
