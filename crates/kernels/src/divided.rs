//! Operations of layers that are divided into parts, each of which one of several ranks may have (tensor parallelism).
//!
//! A part of a table has some of its rows; a part of a head has some of its classes. What the parts make is added up as the balanced
//! tree of [`paceline_numeric::tree`] over all parts, so that the sum has the same bits whichever rank has which of them.
//!
//! Source of the division: Shoeybi and others, Megatron-LM (2019). There are no kernels for cards yet.

use std::ops::Range;

use paceline_memory::Tensor;
use paceline_numeric::tree;

use crate::activation::Activation;
use crate::error::matrix_sizes;
use crate::loss::SUMS_LEN;
use crate::operands::write_or_update;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::{batches, shares};
use crate::{
    Compute, KernelError, Op, Real, Result, elementwise, lanes, linear_cross_entropy, read, update,
    write,
};

/// Adds up the results of some of the parts in the order of the tree over all parts. They are the parts of one node of the tree.
#[derive(Debug)]
pub struct SumOfParts {
    count: usize,
    pushed: usize,
    stack: Vec<Tensor>,
}

impl SumOfParts {
    /// A sum of `count` results of the same shape and type.
    pub fn new(count: usize) -> Self {
        Self { count, pushed: 0, stack: Vec::new() }
    }

    /// Adds the next result, in whose memory sums may be kept.
    pub fn push(&mut self, compute: &Compute, result: Tensor) -> Result<()> {
        self.stack.push(result);
        let merges = tree::merges_after(self.pushed, self.count);
        self.pushed += 1;
        for _ in 0..merges {
            let right = self.stack.pop().expect("a merge has two halves");
            let left = self.stack.last().expect("a merge has two halves");
            elementwise::add(compute, &right, left)?;
        }
        Ok(())
    }

    /// The sum, once all results have been added. `None` if there were none.
    pub fn finish(mut self) -> Option<Tensor> {
        self.stack.pop()
    }
}

fn check(op: Op, ids: &[i64], len: usize) -> Result<()> {
    match ids.iter().find(|id| !(0..len as i64).contains(id)) {
        Some(&index) => Err(KernelError::Index { op: op.name, index, len }),
        None => Ok(()),
    }
}

/// `output[i] = table[ids[i] - rows.start]`, and zeros for the rows of other parts. Shapes: ids any, table (rows, width), which has the
/// rows `rows` of a table of `len`; output (ids, width). f32, f64 and 16 bits; overwrites. Errors if an id is not below `len`.
pub fn embedding(
    compute: &Compute,
    ids: &Tensor,
    table: &Tensor,
    (rows, len): (Range<usize>, usize),
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("embedding_part_forward").touching(ids.num_bytes() + 2 * output.num_bytes());
    let [_, width] = matrix_sizes(op.name, "table", table)?;
    dispatch!(op.name, table.dtype(), S => {
        let operands = (
            read::<i64>("ids", ids, ids.shape()),
            read::<S>("table", table, [rows.len(), width]),
            write::<S>("output", output, [ids.num_elems(), width]),
        );
        compute.launch(op, operands, move |cpu, (ids, table, output)| {
            check(op, ids, len)?;
            let touched = output.len();
            cpu.threads.for_each(shares(cpu, output, width, ids.len(), touched), |(first, output)| {
                for (row, &id) in output.chunks_exact_mut(width.max(1)).zip(&ids[first..]) {
                    match (id as usize).checked_sub(rows.start).filter(|own| *own < rows.len()) {
                        Some(own) => row.copy_from_slice(&table[own * width..][..width]),
                        None => row.fill(S::default()),
                    }
                }
            });
            Ok(())
        })
    })
}

/// `d_table[ids[i] - rows.start] (+)= d_output[i]`, row after row, for the ids of this part. Shapes and types as for [`embedding`].
/// Overwrites, or adds to what is there if `accumulate`.
pub fn embedding_backward(
    compute: &Compute,
    ids: &Tensor,
    d_output: &Tensor,
    d_table: &Tensor,
    rows: Range<usize>,
    accumulate: bool,
) -> Result<()> {
    let op = Op::new("embedding_part_backward").elementwise([d_output.num_elems()]);
    let [_, width] = matrix_sizes(op.name, "table", d_table)?;
    dispatch!(op.name, d_table.dtype(), S => {
        let operands = (
            read::<i64>("ids", ids, ids.shape()),
            read::<S>("d_output", d_output, [ids.num_elems(), width]),
            write_or_update::<S>(accumulate, "d_table", d_table, [rows.len(), width]),
        );
        compute.launch(op, operands, move |cpu, (ids, d_output, d_table)| {
            let touched = d_output.len() + if accumulate { 0 } else { d_table.len() };
            cpu.threads.for_each(shares(cpu, d_table, width, rows.len(), touched), |(first, d_table)| {
                if !accumulate {
                    d_table.fill(S::default());
                }
                let begin = rows.start + first;
                let own = begin..begin + d_table.len() / width.max(1);
                for (row, &id) in d_output.chunks_exact(width.max(1)).zip(ids) {
                    if own.contains(&(id as usize)) {
                        let sums = &mut d_table[(id as usize - begin) * width..][..width];
                        elementwise::add_of(row, sums);
                    }
                }
            });
            Ok(())
        })
    })
}

/// `output[i, j] = input[i, begin + j]`. Shapes: input (n, columns), output (n, fewer). Any floating-point type; overwrites.
pub fn copy_columns(
    compute: &Compute,
    input: &Tensor,
    begin: usize,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("copy_columns").touching(2 * output.num_bytes());
    let ([_, all], [rows, columns]) =
        (matrix_sizes(op.name, "input", input)?, matrix_sizes(op.name, "output", output)?);
    dispatch!(op.name, input.dtype(), S => {
        let operands = (read::<S>("input", input, [rows, all]), write::<S>("output", output, [rows, columns]));
        compute.launch(op, operands, move |cpu, (input, output)| {
            cpu.threads.for_each(batches(cpu, output, columns, rows), |(first, output)| {
                let rows = input[first * all..].chunks_exact(all.max(1));
                for (to, from) in output.chunks_exact_mut(columns.max(1)).zip(rows) {
                    to.copy_from_slice(&from[begin..][..columns]);
                }
            });
            Ok(())
        })
    })
}

/// `output[i, begin + j] = input[i, j]`, and zeros in the other columns. Shapes: input (n, columns), output (n, more). Any
/// floating-point type; overwrites.
pub fn place_columns(
    compute: &Compute,
    input: &Tensor,
    begin: usize,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("place_columns").touching(input.num_bytes() + output.num_bytes());
    let ([_, columns], [rows, all]) =
        (matrix_sizes(op.name, "input", input)?, matrix_sizes(op.name, "output", output)?);
    dispatch!(op.name, input.dtype(), S => {
        let operands = (read::<S>("input", input, [rows, columns]), write::<S>("output", output, [rows, all]));
        compute.launch(op, operands, move |cpu, (input, output)| {
            cpu.threads.for_each(batches(cpu, output, all, rows), |(first, output)| {
                let rows = input[first * columns..].chunks_exact(columns.max(1));
                for (to, from) in output.chunks_exact_mut(all.max(1)).zip(rows) {
                    to.fill(S::default());
                    to[begin..][..columns].copy_from_slice(from);
                }
            });
            Ok(())
        })
    })
}

/// `y = activation(x + bias)`. Shapes: x and y (n, columns), bias (columns). x and bias f32, or all f64; y may be of 16 bits.
pub fn add_bias(
    compute: &Compute,
    x: &Tensor,
    bias: &Tensor,
    activation: Activation,
    y: &Tensor,
) -> Result<()> {
    let op = Op::new("add_bias").elementwise([2, x.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "input", x)?;
    let with_relu = activation == Activation::Relu;
    dispatch!(op.name, y.dtype(), Y => {
        let operands = (
            read::<<Y as Stored>::Real>("input", x, x.shape()),
            read::<<Y as Stored>::Real>("bias", bias, [columns]),
            write::<Y>("output", y, x.shape()),
        );
        compute.launch(op, operands, move |cpu, (x, bias, y)| {
            cpu.threads.for_each(batches(cpu, y, columns, rows), |(first, y)| {
                let x = &x[first * columns..][..y.len()];
                vectorized!(cpu.simd, add_bias_of::<Y>, x, bias, with_relu, y);
            });
            Ok(())
        })
    })
}

#[inline(always)]
fn add_bias_of<Y: Stored>(x: &[Y::Real], bias: &[Y::Real], with_relu: bool, y: &mut [Y]) {
    let columns = bias.len().max(1);
    for (x, y) in x.chunks_exact(columns).zip(y.chunks_exact_mut(columns)) {
        for ((y, x), bias) in y.iter_mut().zip(x).zip(bias) {
            let sum = *x + *bias;
            let is_cut = with_relu && sum < Y::Real::default();
            *y = Y::store(if is_cut { Y::Real::default() } else { sum });
        }
    }
}

/// `sums[j] = sum over rows of x[i, j]`, row after row. Shapes: x (n, columns), sums (columns). Sums f32, or f64; x may be of 16 bits.
pub fn sum_rows(compute: &Compute, x: &Tensor, sums: &Tensor) -> Result<()> {
    let op = Op::new("sum_rows").elementwise([1, x.num_elems()]);
    let [_, columns] = matrix_sizes(op.name, "input", x)?;
    dispatch!(op.name, x.dtype(), X => {
        let operands = (
            read::<X>("input", x, x.shape()),
            write::<<X as Stored>::Real>("sums", sums, [columns]),
        );
        compute.launch(op, operands, move |cpu, (x, sums)| {
            elementwise::add_rows(cpu, x, sums, false);
            Ok(())
        })
    })
}

/// The numbers of each row of a head that the ranks share: the sum of the exponentials, the output of the label, and the number of classes
/// before the label with the largest output.
pub const OF_ROW: usize = 3;

/// `most[i] = max(most[i], max over j of z[i, j])`, or without what is there, if the part is the first one. Shapes: z (n, classes of
/// the part), most (n). f32, f64.
pub fn largest_outputs(compute: &Compute, z: &Tensor, is_first: bool, most: &Tensor) -> Result<()> {
    let op = Op::new("largest_outputs").elementwise([1, z.num_elems()]);
    let [rows, classes] = matrix_sizes(op.name, "outputs", z)?;
    dispatch!(op.name, z.dtype(), T: f32 | f64 => {
        let operands = (
            read::<T>("outputs", z, z.shape()),
            write_or_update::<T>(!is_first, "most", most, [rows]),
        );
        compute.launch(op, operands, move |cpu, (z, most)| {
            cpu.threads.for_each(batches(cpu, most, 1, rows), |(first, most)| {
                vectorized!(cpu.simd, largest_of::<T>, &z[first * classes..], classes, is_first, most);
            });
            Ok(())
        })
    })
}

#[inline(always)]
fn largest_of<T: Real>(z: &[T], classes: usize, is_first: bool, most: &mut [T]) {
    for (most, z) in most.iter_mut().zip(z.chunks_exact(classes.max(1))) {
        let largest = lanes::max(z);
        if is_first || largest > *most || largest.is_nan() {
            *most = largest;
        }
    }
}

/// Turns outputs into `exp(z - most)`, and writes to `of_rows` what the ranks share. `classes` are those of this part, of `count`.
/// Shapes: z (n, classes), most (n), labels (n) of i64, of_rows (n, [`OF_ROW`]). f32, f64. Errors if a label is no class.
pub fn exponentials(
    compute: &Compute,
    z: &Tensor,
    (most, labels): (&Tensor, &Tensor),
    (classes, count): (Range<usize>, usize),
    of_rows: &Tensor,
) -> Result<()> {
    let op = Op::new("head_exponentials").elementwise([Op::EXP + 2, z.num_elems()]);
    let [rows, _] = matrix_sizes(op.name, "outputs", z)?;
    dispatch!(op.name, z.dtype(), T: f32 | f64 => {
        let operands = (
            update::<T>("outputs", z, [rows, classes.len()]),
            read::<T>("most", most, [rows]),
            read::<i64>("labels", labels, [rows]),
            write::<T>("of_rows", of_rows, [rows, OF_ROW]),
        );
        compute.launch(op, operands, move |cpu, (z, most, labels, of_rows)| {
            for (row, &label) in labels.iter().enumerate() {
                if label != linear_cross_entropy::IGNORED && !(0..count as i64).contains(&label) {
                    return Err(KernelError::Label { row, label, num_classes: count });
                }
            }
            let parts = batches(cpu, z, classes.len(), rows).into_iter();
            let parts = parts.zip(batches(cpu, of_rows, OF_ROW, rows)).collect();
            cpu.threads.for_each(parts, |((first, z), (_, of_rows))| {
                let of = (&most[first..], &labels[first..]);
                vectorized!(cpu.simd, exponentials_of::<T>, z, of, classes.clone(), of_rows);
            });
            Ok(())
        })
    })
}

#[inline(always)]
fn exponentials_of<T: Real>(
    z: &mut [T],
    (most, labels): (&[T], &[i64]),
    classes: Range<usize>,
    of_rows: &mut [T],
) {
    let rows = z.chunks_exact_mut(classes.len().max(1)).zip(of_rows.chunks_exact_mut(OF_ROW));
    for ((z, found), (most, label)) in rows.zip(most.iter().zip(labels)) {
        let label = usize::try_from(*label).unwrap_or(0);
        let own = label.checked_sub(classes.start).filter(|own| *own < classes.len());
        let before = label.clamp(classes.start, classes.end) - classes.start;
        let ties = z[..before].iter().filter(|x| **x >= *most).count();
        let of_label = own.map_or(T::default(), |own| z[own]);
        for x in z.iter_mut() {
            *x = (*x - *most).fast_exp();
        }
        let total = lanes::sum(z.len(), |j| z[j]);
        found.copy_from_slice(&[total, of_label, T::from_f64(ties as f64)]);
    }
}

/// Adds to `sums`, f64 (3), what [`linear_cross_entropy::evaluate`] adds. Shapes: of_rows (n, [`OF_ROW`]), summed over all parts, most
/// (n), labels (n) of i64. f32, f64.
pub fn losses(
    compute: &Compute,
    of_rows: &Tensor,
    (most, labels): (&Tensor, &Tensor),
    sums: &Tensor,
) -> Result<()> {
    let op = Op::new("head_losses");
    let [rows, _] = matrix_sizes(op.name, "of_rows", of_rows)?;
    dispatch!(op.name, of_rows.dtype(), T: f32 | f64 => {
        let operands = (
            read::<T>("of_rows", of_rows, [rows, OF_ROW]),
            read::<T>("most", most, [rows]),
            read::<i64>("labels", labels, [rows]),
            update::<f64>("sums", sums, [SUMS_LEN]),
        );
        compute.launch(op, operands, move |_, (of_rows, most, labels, sums)| {
            let mut batch = [0.0; SUMS_LEN];
            for ((of, most), label) in of_rows.chunks_exact(OF_ROW).zip(most).zip(labels) {
                if *label != linear_cross_entropy::IGNORED {
                    let (total, of_label, ties) = (of[0], of[1], of[2]);
                    let is_correct = of_label == *most && ties == T::default() && !total.is_nan();
                    batch[0] += (total.ln() + *most - of_label).to_f64();
                    batch[1] += f64::from(u8::from(is_correct));
                    batch[2] += 1.0;
                }
            }
            sums.iter_mut().zip(batch).for_each(|(sum, x)| *sum += x);
            Ok(())
        })
    })
}

/// Turns exponentials into `scale * (softmax(z)[j] - (j == label))`, and zeros in a row without a target. Shapes and types as for
/// [`exponentials`]; `of_rows` are summed over all parts.
pub fn head_gradient(
    compute: &Compute,
    z: &Tensor,
    (of_rows, labels): (&Tensor, &Tensor),
    classes: Range<usize>,
    scale: f64,
) -> Result<()> {
    let op = Op::new("head_gradient").elementwise([1, z.num_elems()]);
    let [rows, _] = matrix_sizes(op.name, "outputs", z)?;
    dispatch!(op.name, z.dtype(), T: f32 | f64 => {
        let operands = (
            update::<T>("outputs", z, [rows, classes.len()]),
            read::<T>("of_rows", of_rows, [rows, OF_ROW]),
            read::<i64>("labels", labels, [rows]),
        );
        compute.launch(op, operands, move |cpu, (z, of_rows, labels)| {
            cpu.threads.for_each(batches(cpu, z, classes.len(), rows), |(first, z)| {
                let of = (&of_rows[first * OF_ROW..], &labels[first..]);
                vectorized!(cpu.simd, gradient_of::<T>, z, of, classes.clone(), scale);
            });
            Ok(())
        })
    })
}

#[inline(always)]
fn gradient_of<T: Real>(
    z: &mut [T],
    (of_rows, labels): (&[T], &[i64]),
    classes: Range<usize>,
    scale: f64,
) {
    let of = of_rows.chunks_exact(OF_ROW).zip(labels);
    for (z, (of, &label)) in z.chunks_exact_mut(classes.len().max(1)).zip(of) {
        if label == linear_cross_entropy::IGNORED {
            z.fill(T::default());
            continue;
        }
        let factor = T::from_f64(scale) / of[0];
        for x in z.iter_mut() {
            *x = *x * factor;
        }
        let own = usize::try_from(label).ok().filter(|label| classes.contains(label));
        if let Some(label) = own {
            z[label - classes.start] = z[label - classes.start] - T::from_f64(scale);
        }
    }
}
