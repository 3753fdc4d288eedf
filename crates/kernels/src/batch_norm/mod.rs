//! Batch normalization (Ioffe and Szegedy, 2015), optionally followed by ReLU:
//! `y = (x - mean) / sqrt(variance + eps) * weight + bias`, channel by channel.
//!
//! Shapes: x, y and their gradients (n, h, w, c) or (n, c); weight, bias and running statistics (c).
//! f32, f64, or x, y and their gradients in bf16 and everything else in f32. Then only results that go from layer to layer
//! are rounded, when they are stored.
//!
//! Each pass has two halves. The first computes sums over the batch ([`sums`] in the forward pass, [`gradient_sums`] in
//! the backward pass): small tensors of f64, which may be added up over several shares of a batch, also empty ones, before
//! the second half begins. Sums are taken over blocks of rows, and then over the blocks in order, so no result depends on
//! the number of threads.

use std::marker::PhantomData;

use paceline_cuda::kernel::{In, Out, Record};
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::{Shape, Tensor};

use crate::activation::Activation;
use crate::card::NUMBERS;
use crate::operands::write_or_update;
use crate::simd::vectorized;
use crate::stored::dispatch;
use crate::threads::batches;
use crate::{
    Compute, KernelError, OnCard, Op, Processor, Read, Real, Result, read, scratch, update, write,
};

pub(crate) static CARD: KernelSource =
    KernelSource::new("batch_norm/card.cu", include_str!("card.cu"), &[NUMBERS]);

mod rows;

use rows::{Factors, add_gradient_sums, add_sums, input_rows, normalize_rows};

/// The struct `Norm` of the card's source: the operands of [`Factors`], and the settings.
#[derive(Clone, Copy)]
#[repr(C)]
struct CardNorm<R> {
    moments: In<f64>,
    weight: In<R>,
    bias: In<R>,
    eps: f64,
    channels: u32,
    with_relu: u32,
}

// SAFETY: laid out as in C; four numbers of 8 bytes come before two of 4, so there are no gaps.
unsafe impl<R: Copy> Record for CardNorm<R> {}

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

    /// The shape that `x` must have, whose last extent is the channels.
    fn shape_of(&self, op: Op, x: &Tensor) -> Result<Shape> {
        if self.channels == 0 {
            let reason = "there are no channels".into();
            return Err(KernelError::Geometry { op: op.name, reason });
        }
        let mut dims = x.dims().to_vec();
        match dims.last_mut() {
            Some(last) => *last = self.channels,
            None => dims = vec![0, self.channels],
        }
        Ok(Shape::from(dims.as_slice()))
    }

    /// Elements of the sums of all blocks of rows of `x`, two sums for each channel.
    fn blocks_len(&self, x: &Tensor) -> usize {
        let rows = x.num_elems() / self.channels;
        rows.div_ceil(ROWS_PER_BLOCK).saturating_mul(2 * self.channels)
    }

    /// On a card: a thread for each channel and block of rows.
    fn grid(&self, rows: usize) -> Grid {
        let mut grid = Grid::elements(self.channels);
        grid.blocks[1] = rows.div_ceil(ROWS_PER_BLOCK) as u32;
        grid
    }

    /// The operands of [`BatchNorm::parameters`] and the settings, for a card's kernels.
    fn on_card<R>(&self, (moments, weight, bias): (In<f64>, In<R>, In<R>)) -> CardNorm<R> {
        let with_relu = u32::from(self.activation == Activation::Relu);
        let (eps, channels) = (self.eps, self.channels as u32);
        CardNorm { moments, weight, bias, eps, channels, with_relu }
    }

    /// Adds the sums of blocks of rows, and writes the number of rows to `count` if there is one.
    ///
    /// # Safety
    ///
    /// There are two sums for each channel and block.
    unsafe fn add_blocks_on(
        &self,
        card: &OnCard,
        blocks: Out<f64>,
        sums: Out<f64>,
        count: Out<f64>,
        rows: usize,
    ) -> paceline_cuda::Result<()> {
        let (len, num_blocks) = (2 * self.channels, rows.div_ceil(ROWS_PER_BLOCK) as u32);
        let (blocks, len_word) = (blocks.as_in(), len as u32);
        // SAFETY: the caller's.
        unsafe {
            card.launch(
                CARD.kernel("norm_add_blocks"),
                (blocks, sums, count, len_word, num_blocks, rows as f64),
                Grid::elements(len),
            )
        }
    }

    /// The operands from which [`Factors`] are made.
    fn parameters<'t, T: Real>(
        &self,
        moments: &'t Tensor,
        weight: &'t Tensor,
        bias: &'t Tensor,
    ) -> (Read<'t, f64>, Read<'t, T>, Read<'t, T>) {
        (
            read("moments", moments, [self.sums_len()]),
            read("weight", weight, [self.channels]),
            read("bias", bias, [self.channels]),
        )
    }
}

/// Writes `sums` (1 + 2c) of f64: the number of values of a channel, the sum of each channel's values,
/// and the sum of their squares.
///
/// A variance computed from such sums loses 2k digits if the mean is 10^k deviations. f64, in which the square of an f32
/// is exact, still leaves ten digits for a mean of 1000 and a deviation of 1: more than the values have.
pub fn sums(compute: &Compute, config: &BatchNorm, input: &Tensor, sums: &Tensor) -> Result<()> {
    let (op, config) = (Op::new("batch_norm_sums").elementwise([3, input.num_elems()]), *config);
    let shape = config.shape_of(op, input)?;
    dispatch!(op.name, input.dtype(), S => {
        let operands = (
            read::<S>("input", input, shape),
            write::<f64>("sums", sums, [config.sums_len()]),
            scratch::<f64>(config.blocks_len(input)),
        );
        let rows = input.num_elems() / config.channels;
        compute.launch_with_card(op, operands, move |cpu, (x, sums, blocks)| {
            let channels = config.channels;
            sums[0] = (x.len() / channels) as f64;
            add_blocks(cpu, x.len() / channels, &mut sums[1..], blocks, |range, sums| {
                let x = &x[range.start * channels..range.end * channels];
                vectorized!(cpu.simd, add_sums::<S>, x, sums);
            });
            Ok(())
        }, move |card, (x, sums, blocks)| {
            let (channels, rows_of_block) = (config.channels as u32, ROWS_PER_BLOCK as u32);
            let after_count = Out(sums.0 + size_of::<f64>() as u64, PhantomData);
            // SAFETY: the input has `rows` times `channels` elements; there are two sums for each channel and block.
            unsafe {
                let arguments = (x, blocks, channels, rows as u64, rows_of_block);
                card.launch(CARD.of::<S>("norm_sums"), arguments, config.grid(rows))?;
                config.add_blocks_on(card, blocks, after_count, sums, rows)
            }
        })
    })
}

/// Writes `moments` (1 + 2c) of f64 from [`sums`]: the count, each channel's mean, and its variance
/// (the mean of the squared deviations). Without any values they are zero.
pub fn moments(
    compute: &Compute,
    config: &BatchNorm,
    sums: &Tensor,
    moments: &Tensor,
) -> Result<()> {
    let channels = config.channels;
    let shape = [config.sums_len()];
    let operands = (read::<f64>("sums", sums, shape), write::<f64>("moments", moments, shape));
    let op = Op::new("batch_norm_moments");
    compute.launch_with_card(
        op,
        operands,
        move |_, (sums, moments)| {
            let count = sums[0];
            moments.fill(0.0);
            moments[0] = count;
            if count > 0.0 {
                for c in 1..=channels {
                    let mean = sums[c] / count;
                    moments[c] = mean;
                    // Rounding may make it negative. `max` is not used, because it would turn NaN into zero.
                    let variance = sums[c + channels] / count - mean * mean;
                    moments[c + channels] = if variance < 0.0 { 0.0 } else { variance };
                }
            }
            Ok(())
        },
        move |card, (sums, moments)| {
            // SAFETY: both have a count and two numbers for each channel.
            unsafe {
                card.launch(
                    CARD.kernel("norm_moments"),
                    (sums, moments, channels as u32),
                    Grid::elements(channels),
                )
            }
        },
    )
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
    let op = Op::new("batch_norm_running_moments");
    let shape = [config.channels];
    dispatch!(op.name, running_mean.dtype(), T: f32 | f64 => {
        let operands = (
            read::<T>("running_mean", running_mean, shape),
            read::<T>("running_var", running_var, shape),
            write::<f64>("moments", moments, [config.sums_len()]),
        );
        let channels = config.channels;
        compute.launch_with_card(op, operands, |_, (mean, var, moments)| {
            moments[0] = f64::INFINITY;
            let running = mean.iter().chain(var);
            moments[1..].iter_mut().zip(running).for_each(|(to, from)| *to = from.to_f64());
            Ok(())
        }, move |card, (mean, var, moments)| {
            let arguments = (mean, var, moments, channels as u32);
            // SAFETY: the statistics have `channels` elements, the moments twice as many and a count.
            unsafe { card.launch(CARD.of::<T>("norm_running_moments"), arguments, Grid::elements(channels)) }
        })
    })
}

/// `running = (1 - momentum) * running + momentum * batch` for mean and variance, with the unbiased variance, divided by
/// the count minus one. Fewer than two values change nothing.
pub fn update_running(
    compute: &Compute,
    config: &BatchNorm,
    moments: &Tensor,
    running_mean: &Tensor,
    running_var: &Tensor,
) -> Result<()> {
    let (op, momentum) = (Op::new("batch_norm_update_running"), config.momentum);
    let shape = [config.channels];
    dispatch!(op.name, running_mean.dtype(), T: f32 | f64 => {
        let operands = (
            read::<f64>("moments", moments, [config.sums_len()]),
            update::<T>("running_mean", running_mean, shape),
            update::<T>("running_var", running_var, shape),
        );
        let channels = config.channels;
        compute.launch_with_card(op, operands, move |_, (moments, mean, var)| {
            let count = moments[0];
            if count < 2.0 {
                return Ok(());
            }
            let (means, variances) = moments[1..].split_at(mean.len());
            follow(mean, means, 1.0, momentum);
            follow(var, variances, count / (count - 1.0), momentum);
            Ok(())
        }, move |card, (moments, mean, var)| {
            let arguments = (moments, mean, var, momentum, channels as u32);
            // SAFETY: the statistics have `channels` elements, the moments twice as many and a count.
            unsafe { card.launch(CARD.of::<T>("norm_update_running"), arguments, Grid::elements(channels)) }
        })
    })
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
    let (op, config) =
        (Op::new("batch_norm_normalize").elementwise([4, input.num_elems()]), *config);
    let shape = config.shape_of(op, input)?;
    dispatch!(op.name, input.dtype(), S => {
        let operands = (
            read::<S>("input", input, shape),
            config.parameters(moments, weight, bias),
            write::<S>("output", output, shape),
        );
        let n = input.num_elems();
        compute.launch_with_card(op, operands, move |cpu, (x, parameters, y)| {
            let (factors, channels) = (Factors::new(&config, parameters), config.channels);
            let parts = batches(cpu, y, channels, x.len() / channels);
            cpu.threads.for_each(parts, |(first, y)| {
                vectorized!(cpu.simd, normalize_rows::<S>, &factors, &x[first * channels..][..y.len()], y);
            });
            Ok(())
        }, move |card, (x, parameters, y)| {
            let arguments = (x, config.on_card(parameters), y, n as u64);
            // SAFETY: both images have `n` elements, and the parameters `channels`.
            unsafe { card.launch(CARD.of::<S>("norm_normalize"), arguments, Grid::elements(n)) }
        })
    })
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
    let (op, config) =
        (Op::new("batch_norm_gradient_sums").elementwise([5, input.num_elems()]), *config);
    let shape = config.shape_of(op, input)?;
    dispatch!(op.name, input.dtype(), S => {
        let operands = (
            read::<S>("input", input, shape),
            read::<S>("d_output", d_output, shape),
            config.parameters(moments, weight, bias),
            write::<f64>("gradient_sums", gradient_sums, [config.gradient_sums_len()]),
            scratch::<f64>(config.blocks_len(input)),
        );
        let rows = input.num_elems() / config.channels;
        compute.launch_with_card(op, operands, move |cpu, operands| {
            let (x, dy, parameters, sums, blocks) = operands;
            let (factors, channels) = (Factors::new(&config, parameters), config.channels);
            add_blocks(cpu, x.len() / channels, sums, blocks, |range, sums| {
                let range = range.start * channels..range.end * channels;
                vectorized!(cpu.simd, add_gradient_sums::<S>, &factors, &x[range.clone()], &dy[range], sums);
            });
            Ok(())
        }, move |card, operands| {
            let (x, dy, parameters, sums, blocks) = operands;
            let (norm, rows_of_block) = (config.on_card(parameters), ROWS_PER_BLOCK as u32);
            // SAFETY: the images have `rows` times `channels` elements; there are two sums for each channel and block.
            unsafe {
                let arguments = (x, dy, norm, blocks, rows as u64, rows_of_block);
                card.launch(CARD.of::<S>("norm_gradient_sums"), arguments, config.grid(rows))?;
                config.add_blocks_on(card, blocks, sums, Out::NONE, rows)
            }
        })
    })
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
    let op = Op::new("batch_norm_backward_weight");
    let shape = [config.channels];
    dispatch!(op.name, d_weight.dtype(), T: f32 | f64 => {
        let operands = (
            read::<f64>("gradient_sums", gradient_sums, [config.gradient_sums_len()]),
            write_or_update::<T>(accumulate, "d_weight", d_weight, shape),
            write_or_update::<T>(accumulate, "d_bias", d_bias, shape),
        );
        let channels = config.channels;
        compute.launch_with_card(op, operands, move |_, (sums, d_weight, d_bias)| {
            let (of_bias, of_weight) = sums.split_at(d_bias.len());
            put(of_weight, d_weight, accumulate);
            put(of_bias, d_bias, accumulate);
            Ok(())
        }, move |card, (sums, d_weight, d_bias)| {
            let (adds, channels_word) = (u32::from(accumulate), channels as u32);
            let arguments = (sums, d_weight, d_bias, adds, channels_word);
            // SAFETY: the gradients have `channels` elements, and the sums twice as many.
            unsafe { card.launch(CARD.of::<T>("norm_backward_weight"), arguments, Grid::elements(channels)) }
        })
    })
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
    let (op, config) =
        (Op::new("batch_norm_backward_input").elementwise([6, input.num_elems()]), *config);
    let shape = config.shape_of(op, input)?;
    dispatch!(op.name, input.dtype(), S => {
        let operands = (
            read::<S>("input", input, shape),
            read::<S>("d_output", d_output, shape),
            config.parameters(moments, weight, bias),
            read::<f64>("gradient_sums", gradient_sums, [config.gradient_sums_len()]),
            write::<S>("d_input", d_input, shape),
        );
        let n = input.num_elems();
        compute.launch_with_card(op, operands, move |cpu, operands| {
            let (x, dy, parameters, gradient_sums, dx) = operands;
            let (mut factors, channels) = (Factors::new(&config, parameters), config.channels);
            factors.set_means(gradient_sums, parameters.0[0]);
            let parts = batches(cpu, dx, channels, x.len() / channels);
            cpu.threads.for_each(parts, |(first, dx)| {
                let range = first * channels..first * channels + dx.len();
                vectorized!(cpu.simd, input_rows::<S>, &factors, &x[range.clone()], &dy[range], dx);
            });
            Ok(())
        }, move |card, operands| {
            let (x, dy, parameters, sums, dx) = operands;
            let norm = config.on_card(parameters);
            let arguments = (x, dy, norm, sums, dx, n as u64);
            // SAFETY: the images have `n` elements, the parameters `channels`, and the sums twice as many.
            unsafe { card.launch(CARD.of::<S>("norm_backward_input"), arguments, Grid::elements(n)) }
        })
    })
}

/// Writes `sums`: `add` sums each block of rows, the threads share the blocks, and the blocks are added up in order.
fn add_blocks(
    cpu: &Processor,
    rows: usize,
    sums: &mut [f64],
    blocks: &mut [f64],
    add: impl Fn(std::ops::Range<usize>, &mut [f64]) + Sync,
) {
    let parts = batches(cpu, blocks, sums.len(), rows.div_ceil(ROWS_PER_BLOCK));
    cpu.threads.for_each(parts, |(first, blocks)| {
        for (at, block) in blocks.chunks_exact_mut(sums.len()).enumerate() {
            let start = (first + at) * ROWS_PER_BLOCK;
            add(start..rows.min(start + ROWS_PER_BLOCK), block);
        }
    });
    sums.fill(0.0);
    for block in blocks.chunks_exact(sums.len()) {
        sums.iter_mut().zip(block).for_each(|(sum, block)| *sum += block);
    }
}
