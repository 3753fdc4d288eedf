//! Losses over a batch, with their gradients.
//!
//! Both add to `sums`, f64 (3): the sum of the samples' losses, the number of samples that are classified correctly (zero for
//! losses without classes), and the number of samples. So batches and shares of batches add up, and the caller divides at the
//! end. A batch is summed first and added once, so `sums` have the bits of `sums += batch`.
//!
//! The gradient is scaled by `scale`, which for the mean over `n` samples is `1 / n`.
//!
//! A bf16 output is computed with in f32, and its gradient is rounded to bf16 at the end.
//!
//! A card adds in another order and has another exponential function and logarithm: its gradients are within 1e-6 of the
//! largest, of 2^-8 in bf16, its losses within 1e-6. There a label that is no class makes the loss NaN.

use paceline_cuda::kernel::Out;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::{NUMBERS, REDUCE};
use crate::error::matrix_sizes;
use crate::operands::card_scratch;
use crate::stored::{Stored, dispatch, wide};
use crate::{Compute, KernelError, Op, Real, Result, read, update, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("loss.cu", include_str!("loss.cu"), &[NUMBERS, REDUCE]);

/// Number of elements of the sums of a loss.
pub const SUMS_LEN: usize = 3;

/// `loss = sum over rows of ln(sum over j of exp(x[i, j])) - x[i, label[i]]`, and
/// `d_logits[i, j] = scale * (softmax(x[i])[j] - (j == label[i]))` if requested.
///
/// Shapes: logits (m, classes), labels (m) of i64, d_logits as logits, sums (3) of f64. f32, f64 and bf16;
/// overwrites `d_logits` and adds to `sums`. The largest logit is subtracted first, so that nothing overflows.
pub fn cross_entropy(
    compute: &Compute,
    logits: &Tensor,
    labels: &Tensor,
    scale: f64,
    d_logits: Option<&Tensor>,
    sums: &Tensor,
) -> Result<()> {
    let op = Op::new("cross_entropy").elementwise([Op::EXP + 4, logits.num_elems()]);
    let [m, num_classes] = matrix_sizes(op.name, "logits", logits)?;
    dispatch!(op.name, logits.dtype(), S => {
        let operands = (
            read::<S>("logits", logits, logits.shape()),
            read::<i64>("labels", labels, [m]),
            d_logits.map(|d_logits| write::<S>("d_logits", d_logits, logits.shape())),
            update::<f64>("sums", sums, [SUMS_LEN]),
            card_scratch::<f64>(compute, 2 * m),
        );
        compute.launch_with_card(op, operands, move |_, (logits, labels, d_logits, sums, _)| {
            for (row, &label) in labels.iter().enumerate() {
                if !(0..num_classes as i64).contains(&label) {
                    return Err(KernelError::Label { row, label, num_classes });
                }
            }
            add(sums, cross_entropy_of::<S>(num_classes, logits, labels, scale, d_logits));
            Ok(())
        }, move |card, operands| {
            let (logits, labels, d_logits, sums, of_rows) = operands;
            let (rows, classes) = (m as u64, num_classes as u32);
            let (d_logits, scale) = (d_logits.unwrap_or(Out::NONE), wide::<S>(scale));
            // SAFETY: the matrices have `rows` times `classes` elements, the labels `rows`, and the scratch memory two for each.
            unsafe {
                let arguments = (logits, labels, d_logits, of_rows, scale, classes, rows);
                card.launch(CARD.of::<S>("cross_entropy"), arguments, Grid::elements(32 * m))?;
                card.launch(CARD.kernel("add_rows"), (of_rows.as_in(), sums, rows), Grid::blocks(1, 256))
            }
        })
    })
}

/// On a card: what a block squares at least, and the most blocks.
const MSE_ELEMS_PER_BLOCK: usize = 2048;
const MOST_MSE_BLOCKS: usize = 1024;

/// `sums += batch`.
fn add(sums: &mut [f64], batch: [f64; SUMS_LEN]) {
    sums.iter_mut().zip(batch).for_each(|(sum, x)| *sum += x);
}

/// The sums of the batch.
fn cross_entropy_of<S: Stored>(
    classes: usize,
    logits: &[S],
    labels: &[i64],
    scale: f64,
    mut d_logits: Option<&mut [S]>,
) -> [f64; SUMS_LEN] {
    let (mut loss, mut correct) = (0.0, 0usize);
    let mut exps = vec![S::Real::default(); classes];
    for (i, (row, &label)) in logits.chunks_exact(classes).zip(labels).enumerate() {
        let label = label as usize;
        // The first of the largest logits, or the first NaN, which makes the loss NaN.
        let mut best = 0;
        for (j, x) in row.iter().enumerate() {
            let (x, largest) = (x.load(), row[best].load());
            if x > largest || (x.is_nan() && !largest.is_nan()) {
                best = j;
            }
        }
        let largest = row[best].load();
        let mut total = S::Real::default();
        for (e, x) in exps.iter_mut().zip(row) {
            *e = (x.load() - largest).exp();
            total += *e;
        }
        loss += (total.ln() + largest - row[label].load()).to_f64();
        correct += usize::from(best == label && !largest.is_nan());
        if let Some(d_logits) = &mut d_logits {
            let scale = S::Real::from_f64(scale);
            for (j, (d, e)) in
                d_logits[i * classes..(i + 1) * classes].iter_mut().zip(&exps).enumerate()
            {
                let target = S::Real::from_f64(if j == label { 1.0 } else { 0.0 });
                *d = S::store((*e / total - target) * scale);
            }
        }
    }
    [loss, correct as f64, labels.len() as f64]
}

/// `loss = sum over rows of (mean over j of (x[i, j] - t[i, j])^2)`, and
/// `d_input[i, j] = scale * 2 / columns * (x[i, j] - t[i, j])` if requested.
///
/// Shapes: all (m, columns), but sums (3) of f64. f32, f64 and bf16; the target has the type that is computed in, f32 for
/// bf16. Overwrites `d_input` and adds to `sums`.
pub fn mse(
    compute: &Compute,
    input: &Tensor,
    target: &Tensor,
    scale: f64,
    d_input: Option<&Tensor>,
    sums: &Tensor,
) -> Result<()> {
    let op = Op::new("mse").elementwise([4, input.num_elems()]);
    let columns = input.dims().last().copied().unwrap_or(1).max(1);
    dispatch!(op.name, input.dtype(), S => {
        let n = input.num_elems();
        let blocks = n.div_ceil(MSE_ELEMS_PER_BLOCK).clamp(1, MOST_MSE_BLOCKS) as u32;
        let operands = (
            read::<S>("input", input, input.shape()),
            read::<<S as Stored>::Real>("target", target, input.shape()),
            d_input.map(|d_input| write::<S>("d_input", d_input, input.shape())),
            update::<f64>("sums", sums, [SUMS_LEN]),
            card_scratch::<f64>(compute, blocks as usize),
        );
        compute.launch_with_card(op, operands, move |_, (x, t, d_input, sums, _)| {
            add(sums, mse_of::<S>(columns, x, t, scale, d_input));
            Ok(())
        }, move |card, (x, t, d_input, sums, of_blocks)| {
            let factor = wide::<S>(scale * 2.0 / columns as f64);
            let d_input = d_input.unwrap_or(Out::NONE);
            let (rows, columns) = ((n / columns) as f64, columns as f64);
            // SAFETY: the matrices have `n` elements, and the scratch memory one for each block.
            unsafe {
                let arguments = (x, t, d_input, of_blocks, factor, n as u64);
                card.launch(CARD.of::<S>("mse"), arguments, Grid::blocks(blocks, 256))?;
                let arguments = (of_blocks.as_in(), sums, blocks, columns, rows);
                card.launch(CARD.kernel("add_blocks"), arguments, Grid::blocks(1, 256))
            }
        })
    })
}

/// Number of partial sums, which the compiler may keep in registers. With several of them, additions
/// overlap.
const LANES: usize = 16;

/// The sums of the batch.
fn mse_of<S: Stored>(
    columns: usize,
    x: &[S],
    t: &[S::Real],
    scale: f64,
    d_input: Option<&mut [S]>,
) -> [f64; SUMS_LEN] {
    let mut lanes = [0.0f64; LANES];
    if let Some(d_input) = d_input {
        let factor = S::Real::from_f64(scale * 2.0 / columns as f64);
        for ((d, x), t) in d_input.iter_mut().zip(x).zip(t) {
            *d = S::store((x.load() - *t) * factor);
        }
    }
    for (x, t) in x.chunks(LANES).zip(t.chunks(LANES)) {
        for ((lane, x), t) in lanes.iter_mut().zip(x).zip(t) {
            let difference = (x.load() - *t).to_f64();
            *lane += difference * difference;
        }
    }
    let loss = lanes.iter().sum::<f64>() / columns as f64;
    [loss, 0.0, (x.len() / columns) as f64]
}
