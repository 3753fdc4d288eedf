//! A linear layer without bias and the softmax cross-entropy of its outputs, in chunks of rows.
//!
//! The outputs of a language model's head are its largest tensor: a row has an element for each word. So they are
//! computed for a chunk of rows at a time, and turned into their gradient in place, in scratch memory that does not
//! depend on the number of rows. Chunks are large, because each one reads and writes the gradient of the weight once.

mod products;

use half::bf16;
use paceline_memory::{Category, DType, Device, Element, Tensor};

use self::products::Products;
use crate::compute::batches;
use crate::error::expect_shape;
use crate::loss::SUMS_LEN;
use crate::matmul::Matrix;
use crate::meta::MetaScratch;
use crate::simd::multiversion;
use crate::stored;
use crate::{Compute, KernelError, Real, Result, lanes};

const OP: &str = "linear_cross_entropy";

/// The label of a row without a target, as in PyTorch: the row adds nothing to the sums, and its gradient is zero.
pub const IGNORED: i64 = -100;

/// The most rows of a chunk.
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
    /// (classes, inputs); `None` if the weight is not trained.
    pub d_weight: Option<&'a Tensor>,
    /// Whether to add to `d_weight` instead of overwriting it.
    pub accumulate: bool,
}

/// The rows of a chunk.
fn chunk_rows(rows: usize, classes: usize) -> usize {
    (CHUNK_ELEMS / classes.max(1)).clamp(FEWEST_ROWS, MOST_ROWS).min(rows)
}

/// The number of rows that have a target.
pub fn count(labels: &Tensor) -> Result<usize> {
    match labels.device() {
        Device::Cpu => Ok(labels.read::<i64>()?.iter().filter(|label| **label != IGNORED).count()),
        // All of them, as if none were ignored.
        Device::Meta => Ok(labels.num_elems()),
    }
}

/// The number of rows that have a target, of labels (n, seq) of which sequence `i` has the first `lengths[i]`.
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
    }
}

/// `real[i, t] = labels[i, t]` for `t` below `lengths[i]`, and [`IGNORED`] behind. Shapes: labels and real (n, seq), lengths
/// (n), all of i64; overwrites.
pub fn ignore_padding(
    compute: &Compute,
    labels: &Tensor,
    lengths: &Tensor,
    real: &Tensor,
) -> Result<()> {
    let [_, seq] = extents(labels, lengths)?;
    expect_shape(OP, "real", real.shape(), labels.shape())?;
    match compute.device_of(OP, [labels, lengths, real])? {
        Device::Cpu => {
            let (labels, lengths) = (labels.read::<i64>()?, lengths.read::<i64>()?);
            let mut real = real.write::<i64>()?;
            real.copy_from_slice(&labels);
            for (row, length) in real.chunks_exact_mut(seq.max(1)).zip(lengths.iter()) {
                row[within(*length, seq)..].fill(IGNORED);
            }
        }
        Device::Meta => {
            let pretended = MetaScratch::new(compute, OP).reads(DType::I64, [labels, lengths])?;
            pretended.writes(DType::I64, [real])?;
        }
    }
    Ok(())
}

/// The extents of labels (n, seq) of sequences with lengths (n).
fn extents(labels: &Tensor, lengths: &Tensor) -> Result<[usize; 2]> {
    let &[n, seq] = labels.dims() else {
        let (expected, got) = ([0, 0].into(), labels.shape());
        return Err(KernelError::Shape { op: OP, operand: "labels", expected, got });
    };
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
/// outputs and their losses are f32. Scratch memory: a chunk of outputs, of at most 512 rows and about 32 MiB, and that
/// of products in bf16.
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

fn run(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    scale: f64,
    gradients: Option<Gradients<'_>>,
    sums: &Tensor,
) -> Result<()> {
    let _time = compute.time_old(OP, [input, weight]);
    let (&[rows, inputs], &[classes, _]) = (input.dims(), weight.dims()) else {
        let (expected, got) = ([0, 0].into(), input.shape());
        return Err(KernelError::Shape { op: OP, operand: "input and weight", expected, got });
    };
    expect_shape(OP, "weight", weight.shape(), [classes, inputs])?;
    expect_shape(OP, "labels", labels.view([labels.num_elems()])?.shape(), [rows])?;
    expect_shape(OP, "sums", sums.shape(), [SUMS_LEN])?;
    if let Some(Gradients { d_input, d_weight, .. }) = gradients {
        expect_shape(OP, "d_input", d_input.shape(), input.shape())?;
        d_weight.map_or(Ok(()), |d| expect_shape(OP, "d_weight", d.shape(), weight.shape()))?;
    }
    let d_weight = gradients.and_then(|g| g.d_weight);
    let d_input = gradients.map(|g| g.d_input);
    let operands = [input, weight, labels, sums].into_iter().chain(d_input).chain(d_weight);
    match compute.device_of(OP, operands)? {
        Device::Cpu => match input.dtype() {
            DType::F32 => run_of::<f32>(compute, input, weight, labels, scale, gradients, sums),
            DType::F64 => run_of::<f64>(compute, input, weight, labels, scale, gradients, sums),
            DType::BF16 => run_of::<bf16>(compute, input, weight, labels, scale, gradients, sums),
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            compute.count_products([rows, classes, inputs]);
            for _ in d_input.iter().chain(&d_weight) {
                compute.count_backward([rows, classes, inputs]);
            }
            let (dtype, real) = stored::types(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [input])?;
            let pretended = pretended.reads(real, [weight])?.reads(DType::I64, [labels])?;
            let pretended = pretended.writes(dtype, d_input)?.writes(real, d_weight)?;
            let mut pretended = pretended.writes(DType::F64, [sums])?;
            let chunk = chunk_rows(rows, classes);
            pretended.scratch(real, chunk * classes)?;
            if dtype == DType::BF16 {
                // All chunks but the last one are alike, and no rows make no chunk.
                for n in [chunk, rows % chunk.max(1)].into_iter().filter(|n| *n > 0) {
                    let wants = (d_input.is_some(), d_weight.is_some());
                    products::pretend_bf16(compute, (n, classes, inputs), wants)?;
                }
            }
            Ok(())
        }
    }
}

/// An element type whose rows of outputs can be turned into gradients.
trait Softmax: Real {
    fn rows(
        compute: &Compute,
        classes: usize,
        labels: &[i64],
        scale: f64,
        z: &mut [Self],
        found: &mut [(f64, bool)],
    );
}

impl Softmax for f32 {
    fn rows(
        compute: &Compute,
        classes: usize,
        labels: &[i64],
        scale: f64,
        z: &mut [f32],
        found: &mut [(f64, bool)],
    ) {
        rows_f32(compute.simd, classes, labels, scale, z, found);
    }
}

impl Softmax for f64 {
    fn rows(
        _: &Compute,
        classes: usize,
        labels: &[i64],
        scale: f64,
        z: &mut [f64],
        found: &mut [(f64, bool)],
    ) {
        rows_body(classes, labels, scale, z, found);
    }
}

fn run_of<S: Products>(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    scale: f64,
    gradients: Option<Gradients<'_>>,
    sums: &Tensor,
) -> Result<()> {
    let (x, w, labels) = (input.read::<S>()?, weight.read::<S::Real>()?, labels.read::<i64>()?);
    let (rows, num_classes) = (labels.len(), weight.dims()[0]);
    let inputs = weight.dims()[1];
    for (row, &label) in labels.iter().enumerate() {
        if label != IGNORED && !(0..num_classes as i64).contains(&label) {
            return Err(KernelError::Label { row, label, num_classes });
        }
    }
    let mut d_input = gradients.map(|g| g.d_input.write::<S>()).transpose()?;
    let d_weight = gradients.and_then(|g| g.d_weight).map(|d| d.write::<S::Real>());
    let mut d_weight = d_weight.transpose()?;
    let mut accumulate = gradients.is_some_and(|g| g.accumulate);
    if let (Some(d_weight), 0, false) = (&mut d_weight, rows, accumulate) {
        d_weight.fill(S::Real::default());
    }
    let chunk = chunk_rows(rows, num_classes);
    let (real, len) = (S::Real::DTYPE, chunk * num_classes);
    let scratch = compute.allocator.tensor(real, [len], Category::Workspace)?;
    let mut scratch = scratch.write::<S::Real>()?;
    let mut found = vec![(0.0, false); chunk];
    let w = Matrix::new(&w, num_classes, inputs);
    let mut batch = [0.0; SUMS_LEN];
    for begin in (0..rows).step_by(chunk.max(1)) {
        let labels = &labels[begin..rows.min(begin + chunk)];
        let n = labels.len();
        let z = &mut scratch[..n * num_classes];
        let part = begin * inputs..(begin + n) * inputs;
        let x = Matrix::new(&x[part.clone()], n, inputs);
        S::outputs(compute, x, w, z)?;
        let items = batches(compute, z, num_classes, n);
        let items = items.into_iter().zip(batches(compute, &mut found[..n], 1, n)).collect();
        compute.threads.for_each(items, |((first, z), (_, found))| {
            S::Real::rows(compute, num_classes, &labels[first..], scale, z, found);
            Result::Ok(())
        })?;
        for ((loss, is_correct), label) in found.iter().zip(labels) {
            if *label != IGNORED {
                batch[0] += loss;
                batch[1] += f64::from(u8::from(*is_correct));
                batch[2] += 1.0;
            }
        }
        let dz = Matrix::new(z, n, num_classes);
        if let Some(d_input) = &mut d_input {
            S::d_input(compute, dz, w, &mut d_input[part])?;
        }
        if let Some(d_weight) = &mut d_weight {
            S::d_weight(compute, dz, x, d_weight, accumulate)?;
            accumulate = true;
        }
    }
    let mut sums = sums.write::<f64>()?;
    sums.iter_mut().zip(batch).for_each(|(sum, x)| *sum += x);
    Ok(())
}

multiversion! {
    fn rows_f32(classes: usize, labels: &[i64], scale: f64, z: &mut [f32], found: &mut [(f64, bool)]) = rows_body
}

/// Turns outputs into `scale * (softmax(z)[j] - (j == label))`. The largest output is subtracted first, so that nothing
/// overflows. Finds the loss of each row, and whether its label has the largest output; the first one counts if several
/// are equal.
#[inline(always)]
fn rows_body<T: Real>(
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
