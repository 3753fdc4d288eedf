//! A linear layer without bias and the softmax cross-entropy of its outputs, in chunks of rows.
//!
//! The outputs of a language model's head are its largest tensor. So they are computed for a chunk of rows at a time, and turned
//! into their gradient in place, in scratch memory that does not depend on the number of rows. Chunks are large, because each one
//! reads and writes the gradient of the weight once.

mod card;
mod products;

use paceline_cuda::{Grid, KernelSource};

pub(crate) static CARD: KernelSource =
    KernelSource::new("linear_cross_entropy/card.cu", include_str!("card.cu"), &[NUMBERS, EXP]);
use paceline_memory::{Device, MemoryError, Tensor};

use self::card::CardHead;
use crate::card::{EXP, NUMBERS};
use crate::error::{expect_shape, matrix_sizes};
use crate::loss::SUMS_LEN;
use crate::matmul::{Matrix, Multiply};
use crate::operands::write_or_update;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::batches;
use crate::{
    Compute, KernelError, Op, Processor, Real, Result, lanes, read, scratch, update, write,
};

const OP: &str = "linear_cross_entropy";

/// The label of a row without a target, as in PyTorch: the row adds nothing to the sums, and its gradient is zero.
pub const IGNORED: i64 = -100;

const MOST_ROWS: usize = 512;
/// The fewest rows of a chunk, however many classes there are.
const FEWEST_ROWS: usize = 32;
/// About how many outputs a chunk has: 32 MiB of f32.
const CHUNK_ELEMS: usize = 8 << 20;

/// Where [`differentiate`] writes gradients.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// (n, inputs); overwritten.
    pub d_input: &'a Tensor,
    /// The use of the gradient of the outputs.
    pub then: Then<'a>,
}

/// A further use of the gradient of the outputs by [`differentiate`], which always computes that of the input.
#[derive(Clone, Copy, Debug)]
pub enum Then<'a> {
    /// Nothing: the weight is not trained.
    Nothing,
    /// The gradient of the weight, (classes, inputs).
    Weight {
        /// Where it is written.
        d_weight: &'a Tensor,
        /// Whether to add to it instead of overwriting it.
        accumulate: bool,
    },
    /// It is written to this tensor, (n, classes) of the type of the weight, for [`backward_weight`]: as large as all outputs.
    Keep(&'a Tensor),
}

impl<'a> Then<'a> {
    /// The gradient of the weight, if it is trained.
    pub fn weight(d_weight: Option<&'a Tensor>, accumulate: bool) -> Self {
        d_weight.map_or(Self::Nothing, |d_weight| Self::Weight { d_weight, accumulate })
    }
}

/// The number of rows of a chunk, except the last one.
pub fn chunk_rows(rows: usize, classes: usize) -> usize {
    (CHUNK_ELEMS / classes.max(1)).clamp(FEWEST_ROWS, MOST_ROWS).min(rows)
}

/// The same on the device that computes. A card reads and writes the gradient of the weight in the time in which it multiplies 300
/// rows, so its chunks are 8 times as large, and alike.
fn chunk_of(compute: &Compute, rows: usize, classes: usize) -> usize {
    if !compute.is_card() {
        return chunk_rows(rows, classes);
    }
    let most = (8 * CHUNK_ELEMS / classes.max(1)).clamp(FEWEST_ROWS, 8 * MOST_ROWS);
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(64).min(rows)
}

/// The number of rows that have a target.
pub fn count(labels: &Tensor) -> Result<usize> {
    match labels.device() {
        Device::Cpu => Ok(labels.read::<i64>()?.iter().filter(|label| **label != IGNORED).count()),
        // All of them, as if none were ignored.
        Device::Meta => Ok(labels.num_elems()),
        device @ (Device::Sim | Device::Cuda) => Err(MemoryError::NotReachable(device).into()),
    }
}

/// The number of rows that have a target. Labels are (n, seq); sequence `i` has the first `lengths[i]` of its row.
pub fn count_within(labels: &Tensor, lengths: &Tensor) -> Result<usize> {
    let [_, seq] = extents(labels, lengths)?;
    match labels.device() {
        Device::Cpu => {
            let (labels, lengths) = (labels.read::<i64>()?, lengths.read::<i64>()?);
            let rows = labels.chunks_exact(seq.max(1)).zip(lengths.iter());
            let real = rows.flat_map(|(row, length)| &row[..within(*length, seq)]);
            Ok(real.filter(|label| **label != IGNORED).count())
        }
        Device::Meta => Ok(labels.num_elems()),
        device @ (Device::Sim | Device::Cuda) => Err(MemoryError::NotReachable(device).into()),
    }
}

/// `real[i, t] = labels[i, t]` for `t` below `lengths[i]`, and [`IGNORED`] from there on. Shapes: labels and real (n, seq), lengths
/// (n), all of i64; overwrites.
pub fn ignore_padding(
    compute: &Compute,
    labels: &Tensor,
    lengths: &Tensor,
    real: &Tensor,
) -> Result<()> {
    let [n, seq] = extents(labels, lengths)?;
    let operands = (
        read::<i64>("labels", labels, [n, seq]),
        read::<i64>("lengths", lengths, [n]),
        write::<i64>("real", real, [n, seq]),
    );
    let (op, count) = (Op::new("ignore_padding"), labels.num_elems());
    compute.launch_with_card(
        op,
        operands,
        move |_, (labels, lengths, real)| {
            real.copy_from_slice(labels);
            for (row, length) in real.chunks_exact_mut(seq.max(1)).zip(lengths) {
                row[within(*length, seq)..].fill(IGNORED);
            }
            Ok(())
        },
        move |card, (labels, lengths, real)| {
            // SAFETY: labels and `real` have `count` elements, and there is a length for each `seq` of them.
            unsafe {
                card.launch(
                    CARD.kernel("ignore_padding"),
                    (labels, lengths, seq as u64, real, count as u64),
                    Grid::elements(count),
                )
            }
        },
    )
}

/// The extents of labels (n, seq) of sequences with lengths (n).
fn extents(labels: &Tensor, lengths: &Tensor) -> Result<[usize; 2]> {
    let [n, seq] = matrix_sizes(OP, "labels", labels)?;
    expect_shape(OP, "lengths", lengths.shape(), [n])?;
    Ok([n, seq])
}

/// A length as a number of labels.
fn within(length: i64, seq: usize) -> usize {
    usize::try_from(length).unwrap_or(0).min(seq)
}

/// Adds to `sums`, f64 (3), over the rows that have a target: the losses, `ln(sum over j of exp(z[j])) - z[label]` with
/// `z = w x`; the number of rows whose largest output is that of the label; and the number of rows.
///
/// Shapes: input (n, inputs), weight (classes, inputs), labels of i64 with n elements, [`IGNORED`] for a row without a
/// target. f32 and f64; or an input of bf16 and a weight of f32: products then round their operands to bf16, and the
/// outputs and their losses are f32. Scratch memory: a chunk of outputs, of at most 512 rows and about 32 MiB, or 8 times as much on a
/// card, and that of products in bf16.
///
/// Errors if a label is no class. A card cannot report it: there the loss and the gradients become NaN. Results of a card are off
/// by as much as those of its products, see [`linear`](crate::linear).
pub fn evaluate(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    sums: &Tensor,
) -> Result<()> {
    run(compute, input, weight, labels, 1.0, None, sums)
}

/// Like [`evaluate`]. Also writes the gradients of `scale` times the summed loss, each of the type of its tensor.
pub fn differentiate(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    scale: f64,
    gradients: Gradients<'_>,
    sums: &Tensor,
) -> Result<()> {
    run(compute, input, weight, labels, scale, Some(gradients), sums)
}

/// The gradient of the weight, from the gradient of the outputs that [`Then::Keep`] has kept, with the bits that [`Then::Weight`]
/// gives; on a card only if `classes` is a multiple of 64, because the library chooses a product by the alignment of its
/// operands. Overwrites, or adds to `d_weight` if `accumulate`.
///
/// Shapes: input (n, inputs), d_outputs (n, classes), d_weight (classes, inputs).
pub fn backward_weight(
    compute: &Compute,
    input: &Tensor,
    d_outputs: &Tensor,
    d_weight: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let [rows, inputs] = matrix_sizes(OP, "input", input)?;
    let [_, classes] = matrix_sizes(OP, "d_outputs", d_outputs)?;
    let chunk = chunk_of(compute, rows, classes);
    let op = Op::new("linear_cross_entropy_weight").backward_product([rows, classes, inputs, 1]);
    dispatch!(OP, input.dtype(), S => {
        let wants = (false, true);
        let packed = |n| products::scratch_len::<S>(compute.processor(), [n, classes, inputs], wants);
        let operands = (
            read::<S>("input", input, [rows, inputs]),
            read::<<S as Stored>::Real>("d_outputs", d_outputs, [rows, classes]),
            write_or_update(accumulate, "d_weight", d_weight, [classes, inputs]),
            scratch::<f32>(match rows {
                0 => 0,
                _ if compute.is_card() => 0,
                _ => packed(chunk).max(packed(rows % chunk)),
            }),
            card::rounded::<S>(compute, chunk * classes),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, dz, dw, packed, _)| {
            if rows == 0 && !accumulate {
                dw.fill(Default::default());
            }
            // In the chunks in which it is added up elsewhere.
            for begin in (0..rows).step_by(chunk.max(1)) {
                let end = rows.min(begin + chunk);
                let x = Matrix::new(&x[begin * inputs..end * inputs], end - begin, inputs);
                let dz = Matrix::new(&dz[begin * classes..end * classes], end - begin, classes);
                products::d_weight(cpu, dz, x, dw, accumulate || begin > 0, packed);
            }
            Ok(())
        }, move |card, (x, dz, dw, _, rounded)| {
            let sizes = [rows, classes, inputs];
            // SAFETY: the operands have these sizes, and the scratch memory is that of a chunk.
            unsafe { card::backward_weight(card, sizes, chunk, (x, dz), (dw, accumulate), rounded) }
        })
    })
}

fn run(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    scale: f64,
    gradients: Option<Gradients<'_>>,
    sums: &Tensor,
) -> Result<()> {
    let [rows, inputs] = matrix_sizes(OP, "input", input)?;
    let [classes, _] = matrix_sizes(OP, "weight", weight)?;
    let (d_weight, accumulate, kept) = match gradients.map_or(Then::Nothing, |g| g.then) {
        Then::Nothing => (None, false, None),
        Then::Weight { d_weight, accumulate } => (Some(d_weight), accumulate, None),
        Then::Keep(kept) => (None, false, Some(kept)),
    };
    let num_gradients = usize::from(gradients.is_some()) + usize::from(d_weight.is_some());
    let op = Op::new(OP).elementwise([Op::EXP + 4, rows, classes]);
    let op = op.forward_product([rows, classes, inputs]);
    let op = op.backward_product([rows, classes, inputs, num_gradients]);
    let chunk = chunk_of(compute, rows, classes);
    let labels = labels.view([labels.num_elems()])?;
    dispatch!(OP, input.dtype(), S => {
        let wants = (gradients.is_some(), d_weight.is_some());
        // All chunks but the last one are alike.
        let packed = |n| products::scratch_len::<S>(compute.processor(), [n, classes, inputs], wants);
        let packed = match rows {
            0 => 0,
            _ if compute.is_card() => 0,
            _ => packed(chunk).max(packed(rows % chunk)),
        };
        let operands = (
            read::<S>("input", input, [rows, inputs]),
            read::<<S as Stored>::Real>("weight", weight, [classes, inputs]),
            read::<i64>("labels", &labels, [rows]),
            gradients.map(|g| write::<S>("d_input", g.d_input, [rows, inputs])),
            d_weight.map(|d| write_or_update(accumulate, "d_weight", d, [classes, inputs])),
            update::<f64>("sums", sums, [SUMS_LEN]),
            kept.map(|kept| write::<<S as Stored>::Real>("d_outputs", kept, [rows, classes])),
            (
                scratch::<<S as Stored>::Real>(if kept.is_some() { 0 } else { chunk * classes }),
                scratch::<f32>(packed),
            ),
            card::memory::<S>(compute, [rows, classes, inputs], chunk, gradients.is_some()),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, labels, dx, dw, sums, kept, (z, packed), _)| {
            let head = LossHead { w: Matrix::new(w, classes, inputs), chunk, scale, accumulate };
            head.run::<S>(cpu, (x, labels), (dx, dw, sums), (kept, z, packed))
        }, move |card, (x, w, labels, dx, dw, sums, kept, (z, _), memory)| {
            let head = CardHead { rows, classes, inputs, chunk, scale, accumulate };
            // SAFETY: the operands and the scratch memory have these sizes.
            unsafe { head.run::<S>(card, (x, w, labels), (dx, dw, sums), (kept, z, memory)) }
        })
    })
}

/// A head whose rows are computed chunk by chunk.
struct LossHead<'a, T> {
    w: Matrix<'a, T>,
    chunk: usize,
    scale: f64,
    accumulate: bool,
}

impl<T: Real> LossHead<'_, T> {
    fn run<S: Multiply<Real = T>>(
        &self,
        cpu: &Processor,
        (x, labels): (&[S], &[i64]),
        (mut dx, mut dw, sums): (Option<&mut [S]>, Option<&mut [T]>, &mut [f64]),
        (mut kept, scratch, packed): (Option<&mut [T]>, &mut [T], &mut [f32]),
    ) -> Result<()> {
        let Self { w, chunk, scale, mut accumulate } = *self;
        let (rows, num_classes, inputs) = (labels.len(), w.rows(), w.columns());
        for (row, &label) in labels.iter().enumerate() {
            if label != IGNORED && !(0..num_classes as i64).contains(&label) {
                return Err(KernelError::Label { row, label, num_classes });
            }
        }
        if let (Some(dw), 0, false) = (&mut dw, rows, accumulate) {
            dw.fill(T::default());
        }
        let mut found = vec![(0.0, false); chunk];
        let mut batch = [0.0; SUMS_LEN];
        for begin in (0..rows).step_by(chunk.max(1)) {
            let labels = &labels[begin..rows.min(begin + chunk)];
            let n = labels.len();
            let z = match &mut kept {
                Some(kept) => &mut kept[begin * num_classes..][..n * num_classes],
                None => &mut scratch[..n * num_classes],
            };
            let part = begin * inputs..(begin + n) * inputs;
            let x = Matrix::new(&x[part.clone()], n, inputs);
            products::outputs(cpu, x, w, z, packed);
            let parts = batches(cpu, z, num_classes, n).into_iter();
            let parts = parts.zip(batches(cpu, &mut found[..n], 1, n)).collect();
            cpu.threads.for_each(parts, |((first, z), (_, found))| {
                vectorized!(cpu.simd, rows_of::<T>, num_classes, &labels[first..], scale, z, found);
            });
            for ((loss, is_correct), label) in found.iter().zip(labels) {
                if *label != IGNORED {
                    batch[0] += loss;
                    batch[1] += f64::from(u8::from(*is_correct));
                    batch[2] += 1.0;
                }
            }
            let dz = Matrix::new(z, n, num_classes);
            if let Some(dx) = &mut dx {
                products::d_input(cpu, dz, w, &mut dx[part], packed);
            }
            if let Some(dw) = &mut dw {
                products::d_weight(cpu, dz, x, dw, accumulate, packed);
                accumulate = true;
            }
        }
        sums.iter_mut().zip(batch).for_each(|(sum, x)| *sum += x);
        Ok(())
    }
}

/// Turns outputs into `scale * (softmax(z)[j] - (j == label))`, after subtracting the largest output against overflow. Finds the
/// loss of each row, and whether its label has the largest output, the first one of equals.
#[inline(always)]
fn rows_of<T: Real>(
    classes: usize,
    labels: &[i64],
    scale: f64,
    z: &mut [T],
    found: &mut [(f64, bool)],
) {
    for ((z, label), found) in z.chunks_exact_mut(classes.max(1)).zip(labels).zip(found) {
        if *label == IGNORED {
            z.fill(T::default());
            continue;
        }
        let label = *label as usize;
        let largest = lanes::max(z);
        let of_label = z[label];
        let is_correct = of_label == largest && z[..label].iter().all(|x| *x < largest);
        for x in z.iter_mut() {
            *x = (*x - largest).fast_exp();
        }
        let total = lanes::sum(classes, |j| z[j]);
        *found = ((total.ln() + largest - of_label).to_f64(), is_correct && !total.is_nan());
        let factor = T::from_f64(scale) / total;
        for x in z.iter_mut() {
            *x = *x * factor;
        }
        z[label] = z[label] - T::from_f64(scale);
    }
}
