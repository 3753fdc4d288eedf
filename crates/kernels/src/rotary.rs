//! Rotary position embeddings: queries and keys are rotated by angles that grow with their position.
//!
//! Input: a [`RotaryConfig`]. Output: a [`RotaryTable`] of cosines and sines. [`attention`](crate::attention) applies it to one
//! tile at a time. This module does not know how queries and keys are used.
//!
//! Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Pairs and scaling are those
//! of Hugging Face's `transformers`: element `j` of a head forms a pair with element `j + head_dim / 2`, so weights of
//! its Llama models can be used as they are.

use std::f64::consts::TAU;

use paceline_memory::{Allocator, Category, DType, Device, Tensor};

use crate::stored::Stored;
use crate::{KernelError, Real, Result};

const OP: &str = "rotary";

/// By which angles positions are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryConfig {
    /// Elements of a head; even.
    pub head_dim: usize,
    /// The base of the wavelengths (`rope_theta`).
    pub theta: f64,
    /// How the frequencies are changed for contexts that are longer than those of the training (`rope_scaling`).
    pub scaling: Option<RotaryScaling>,
}

/// How frequencies are changed for longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// All positions are divided by a factor (rope type `linear`).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies are divided, high ones are kept (rope type `llama3`).
    Llama3(Llama3Scaling),
}

/// The scaling of Llama 3.1. A pair with wavelength `w`, in positions, keeps its frequency `f` if
/// `w < original_max_position / high_freq_factor`, and has `f / factor` if `w > original_max_position / low_freq_factor`.
/// In between it has `(1 - s) f / factor + s f`, where
/// `s = (original_max_position / w - low_freq_factor) / (high_freq_factor - low_freq_factor)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// Bounds the wavelengths that are divided.
    pub low_freq_factor: f64,
    /// Bounds the wavelengths that are kept.
    pub high_freq_factor: f64,
    /// The longest context of the training before.
    pub original_max_position: usize,
}

impl RotaryConfig {
    /// The angle per position of each pair: `theta^(-2 j / head_dim)` for pair `j`, scaled. Errors if the sizes are
    /// invalid.
    pub fn frequencies(&self) -> Result<Vec<f64>> {
        self.check()?;
        let plain = |j: usize| self.theta.powf(-(2.0 * j as f64) / self.head_dim as f64);
        let frequencies = (0..self.head_dim / 2).map(plain);
        Ok(match self.scaling {
            None => frequencies.collect(),
            Some(RotaryScaling::Linear { factor }) => frequencies.map(|f| f / factor).collect(),
            Some(RotaryScaling::Llama3(scaling)) => {
                frequencies.map(|f| scaling.scaled(f)).collect()
            }
        })
    }

    fn check(&self) -> Result<()> {
        let is_positive = |x: f64| x > 0.0 && x.is_finite();
        let problem = match self.scaling {
            _ if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) => {
                format!("head_dim must be even and not zero, got {}", self.head_dim)
            }
            _ if !is_positive(self.theta) => format!("theta must be positive, got {}", self.theta),
            Some(RotaryScaling::Linear { factor }) if !is_positive(factor) => {
                format!("factor must be positive, got {factor}")
            }
            Some(RotaryScaling::Llama3(scaling)) if !scaling.is_valid() => {
                format!(
                    "factors and original_max_position must be positive and high_freq_factor must be larger than \
                     low_freq_factor, got {scaling:?}"
                )
            }
            _ => return Ok(()),
        };
        Err(KernelError::Geometry { op: OP, reason: problem })
    }
}

impl Llama3Scaling {
    fn is_valid(&self) -> bool {
        self.factor > 0.0
            && self.factor.is_finite()
            && self.low_freq_factor > 0.0
            && self.high_freq_factor > self.low_freq_factor
            && self.high_freq_factor.is_finite()
            && self.original_max_position > 0
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        // How often the pair turns within the original context.
        let turns = self.original_max_position as f64 * frequency / TAU;
        if turns < low {
            frequency / factor
        } else if turns > high {
            frequency
        } else {
            let smooth = (turns - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

/// The cosines and sines of all positions up to a length.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    config: RotaryConfig,
    /// (max_len, head_dim): for each position first the cosines of all pairs, then their sines.
    values: Tensor,
}

impl RotaryTable {
    /// A table for positions `0..max_len`, for tensors of `dtype` (f32 or f64) on the allocator's device. Angles, cosines
    /// and sines are computed in f64. The table takes `max_len * head_dim` elements, which count as activations. Errors if
    /// the sizes are invalid, or there is no memory.
    pub fn new(
        allocator: &Allocator,
        config: RotaryConfig,
        max_len: usize,
        dtype: DType,
    ) -> Result<Self> {
        let frequencies = config.frequencies()?;
        if !matches!(dtype, DType::F32 | DType::F64) {
            return Err(KernelError::DType { op: OP, dtype });
        }
        let shape = [max_len, config.head_dim];
        let values = allocator.tensor(dtype, shape, Category::Activations)?;
        match (allocator.device(), dtype) {
            (Device::Cpu, DType::F64) => fill::<f64>(&frequencies, &mut values.write()?),
            (Device::Cpu, _) => fill::<f32>(&frequencies, &mut values.write()?),
            (Device::Meta, _) => {}
            (Device::Sim | Device::Cuda, _) => {
                let stream = allocator.home().expect("memory of a device has a stream");
                let host = Allocator::pinned(stream.accelerator());
                let host = Self::new(&host, config, max_len, dtype)?;
                stream.copy(&host.values, &values)?;
            }
        }
        Ok(Self { config, values })
    }

    /// The number of positions.
    pub fn max_len(&self) -> usize {
        self.values.dims()[0]
    }

    /// The values, (max_len, head_dim): for each position first the cosines of all pairs, then their sines.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Errors if the table is not for heads of this size, or has fewer than `len` positions.
    pub(crate) fn check(&self, op: &'static str, head_dim: usize, len: usize) -> Result<()> {
        let (of, max_len) = (self.config.head_dim, self.max_len());
        let reason = if of != head_dim {
            format!("the rotary table is for heads of {of} elements, not of {head_dim}")
        } else if max_len < len {
            format!("the rotary table has {max_len} positions, {len} are needed")
        } else {
            return Ok(());
        };
        Err(KernelError::Geometry { op, reason })
    }
}

fn fill<T: Real>(frequencies: &[f64], values: &mut [T]) {
    let half = frequencies.len();
    for (position, row) in values.chunks_exact_mut(2 * half).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
            let angle = position as f64 * frequency;
            *cos = T::from_f64(angle.cos());
            *sin = T::from_f64(angle.sin());
        }
    }
}

/// `to = factor * (from, rotated)`, where `angles` is a row of a table. All have the elements of a head.
#[inline(always)]
pub(crate) fn turn<S: Stored, T: Stored<Real = S::Real>>(
    from: &[S],
    angles: &[S::Real],
    factor: S::Real,
    to: &mut [T],
) {
    for_each_pair(from, angles, to, |[x, y], cos, sin| {
        [(x * cos - y * sin) * factor, (y * cos + x * sin) * factor]
    });
}

/// `to = factor * (from, rotated back)`: the gradient before a rotation from the gradient after it.
#[inline(always)]
pub(crate) fn turn_back<S: Stored>(
    from: &[S::Real],
    angles: &[S::Real],
    factor: S::Real,
    to: &mut [S],
) {
    for_each_pair(from, angles, to, |[x, y], cos, sin| {
        [(x * cos + y * sin) * factor, (y * cos - x * sin) * factor]
    });
}

/// Pairs that are computed at a time.
const LANES: usize = 8;

/// Computes each pair of `to` from the same pair of `from`, its cosine and its sine.
#[inline(always)]
fn for_each_pair<F: Stored, T: Stored<Real = F::Real>>(
    from: &[F],
    angles: &[F::Real],
    to: &mut [T],
    compute: impl Fn([F::Real; 2], F::Real, F::Real) -> [F::Real; 2],
) {
    let half = from.len() / 2;
    let ((x, y), (cos, sin)) = (from.split_at(half), angles.split_at(half));
    let (first, second) = to.split_at_mut(half);
    // Parts of a fixed length: a compiler checks for every loop of another length whether slices overlap, which takes
    // longer than a head of usual size.
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    let (cosines, cos_rest) = cos.as_chunks::<LANES>();
    let (sines, sin_rest) = sin.as_chunks::<LANES>();
    let (firsts, first_rest) = first.as_chunks_mut::<LANES>();
    let (seconds, second_rest) = second.as_chunks_mut::<LANES>();
    for part in 0..xs.len() {
        let (x, y, cos, sin) = (xs[part], ys[part], cosines[part], sines[part]);
        let (mut a, mut b) = ([T::default(); LANES], [T::default(); LANES]);
        for j in 0..LANES {
            let [first, second] = compute([x[j].load(), y[j].load()], cos[j], sin[j]);
            (a[j], b[j]) = (T::store(first), T::store(second));
        }
        (firsts[part], seconds[part]) = (a, b);
    }
    for j in 0..x_rest.len() {
        let pair = [x_rest[j].load(), y_rest[j].load()];
        let [first, second] = compute(pair, cos_rest[j], sin_rest[j]);
        (first_rest[j], second_rest[j]) = (T::store(first), T::store(second));
    }
}
