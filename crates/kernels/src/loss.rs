//! Losses over a batch, with their gradients.
//!
//! Both return sums over the samples, so that the sums of shares of a batch can be added up. The caller
//! divides by the actual number of samples. The gradient is scaled by `scale`, which for the
//! mean over `n` samples is `1 / n`.

use paceline_memory::{DType, Tensor};

use crate::error::expect_shape;
use crate::{KernelError, Real, Result};

/// The result of a loss for a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Sum of the samples' losses.
    pub loss: f64,
    /// Number of samples that are classified correctly; zero for losses without classes.
    pub correct: usize,
}

/// `loss = sum over rows of ln(sum over j of exp(x[i, j])) - x[i, label[i]]`, and
/// `d_logits[i, j] = scale * (softmax(x[i])[j] - (j == label[i]))` if requested.
///
/// Shapes: logits (m, classes), labels (m) of i64, d_logits as logits. f32 and f64; overwrites. The
/// largest logit is subtracted first, so that nothing overflows.
pub fn cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    scale: f64,
    d_logits: Option<&Tensor>,
) -> Result<LossSums> {
    let op = "cross_entropy";
    let &[m, classes] = logits.dims() else {
        let (expected, got) = ([0, 0].into(), logits.shape());
        return Err(KernelError::Shape { op, operand: "logits", expected, got });
    };
    expect_shape(op, "labels", labels.shape(), [m])?;
    if let Some(d_logits) = d_logits {
        expect_shape(op, "d_logits", d_logits.shape(), [m, classes])?;
    }
    let labels = labels.read::<i64>()?;
    let num_classes = classes;
    for (row, &label) in labels.iter().enumerate() {
        if !(0..num_classes as i64).contains(&label) {
            return Err(KernelError::Label { row, label, num_classes });
        }
    }
    match logits.dtype() {
        DType::F32 => cross_entropy_of::<f32>(classes, logits, &labels, scale, d_logits),
        DType::F64 => cross_entropy_of::<f64>(classes, logits, &labels, scale, d_logits),
        dtype => Err(KernelError::DType { op, dtype }),
    }
}

fn cross_entropy_of<T: Real>(
    classes: usize,
    logits: &Tensor,
    labels: &[i64],
    scale: f64,
    d_logits: Option<&Tensor>,
) -> Result<LossSums> {
    let logits = logits.read::<T>()?;
    let mut d_logits = d_logits.map(|d| d.write::<T>()).transpose()?;
    let mut sums = LossSums::default();
    let mut exps = vec![T::default(); classes];
    for (i, (row, &label)) in logits.chunks_exact(classes).zip(labels).enumerate() {
        let label = label as usize;
        // The first of the largest logits, or the first NaN, which makes the loss NaN.
        let mut best = 0;
        for (j, x) in row.iter().enumerate() {
            if *x > row[best] || (x.is_nan() && !row[best].is_nan()) {
                best = j;
            }
        }
        let largest = row[best];
        let mut total = T::default();
        for (e, x) in exps.iter_mut().zip(row) {
            *e = (*x - largest).exp();
            total += *e;
        }
        sums.loss += (total.ln() + largest - row[label]).to_f64();
        sums.correct += usize::from(best == label && !largest.is_nan());
        if let Some(d_logits) = &mut d_logits {
            let scale = T::from_f64(scale);
            for (j, (d, e)) in
                d_logits[i * classes..(i + 1) * classes].iter_mut().zip(&exps).enumerate()
            {
                let target = if j == label { T::from_f64(1.0) } else { T::default() };
                *d = (*e / total - target) * scale;
            }
        }
    }
    Ok(sums)
}

/// `loss = sum over rows of (mean over j of (x[i, j] - t[i, j])^2)`, and
/// `d_input[i, j] = scale * 2 / columns * (x[i, j] - t[i, j])` if requested.
///
/// Shapes: all (m, columns). f32 and f64 (the target of the same type); overwrites.
pub fn mse(
    input: &Tensor,
    target: &Tensor,
    scale: f64,
    d_input: Option<&Tensor>,
) -> Result<LossSums> {
    let op = "mse";
    expect_shape(op, "target", target.shape(), input.shape())?;
    if let Some(d_input) = d_input {
        expect_shape(op, "d_input", d_input.shape(), input.shape())?;
    }
    match input.dtype() {
        DType::F32 => mse_of::<f32>(input, target, scale, d_input),
        DType::F64 => mse_of::<f64>(input, target, scale, d_input),
        dtype => Err(KernelError::DType { op, dtype }),
    }
}

/// Number of partial sums, which the compiler may keep in registers. With several of them, additions
/// overlap.
const LANES: usize = 16;

fn mse_of<T: Real>(
    input: &Tensor,
    target: &Tensor,
    scale: f64,
    d_input: Option<&Tensor>,
) -> Result<LossSums> {
    let columns = input.dims().last().copied().unwrap_or(1).max(1);
    let (x, t) = (input.read::<T>()?, target.read::<T>()?);
    let mut lanes = [0.0f64; LANES];
    if let Some(d_input) = d_input {
        let factor = T::from_f64(scale * 2.0 / columns as f64);
        for ((d, x), t) in d_input.write::<T>()?.iter_mut().zip(x.iter()).zip(t.iter()) {
            *d = (*x - *t) * factor;
        }
    }
    for (x, t) in x.chunks(LANES).zip(t.chunks(LANES)) {
        for ((lane, x), t) in lanes.iter_mut().zip(x).zip(t) {
            let difference = (*x - *t).to_f64();
            *lane += difference * difference;
        }
    }
    Ok(LossSums { loss: lanes.iter().sum::<f64>() / columns as f64, correct: 0 })
}
