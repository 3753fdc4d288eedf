//! The fully connected layer whose operands or results are of 16 bits: bf16 or f16, called `H` here.
//!
//! In and out: tensors of f32 or `H`, in any mixture. Everything is summed in f32, and rounded once if the result is `H`.

use paceline_memory::{DType, Tensor};

use super::{Activation, Sizes};
use crate::launch::{Either, write_or_update};
use crate::matmul::{Destination, Elements, Half, Matrix, Operand};
use crate::{Compute, KernelError, Op, Processor, Read, Result, Write, elementwise, read, scratch};

/// See [`super::forward`].
pub(super) fn forward<H: Half>(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (input, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let has_half_bias = bias.is_some_and(is_half::<H>);
    let operands = (
        read_either::<H, _>(op, "input", input, [m, k])?,
        read_either::<H, _>(op, "weight", weight, [n, k])?,
        bias.map(|bias| read_either::<H, _>(op, "bias", bias, [n])).transpose()?,
        write_either::<H, _>(op, "output", output, [m, n], false)?,
        has_half_bias.then(|| scratch::<f32>(n)),
        scratch::<f32>(H::scratch_len(compute.processor(), m, n, k, is_half::<H>(output))),
    );
    compute.launch(op, operands, move |cpu, (x, w, bias, y, widened, packed)| {
        let bias = match (bias, widened) {
            (Some(Either::B(bias)), Some(widened)) => {
                widened.iter_mut().zip(bias).for_each(|(wide, x)| *wide = x.load());
                Some(&*widened)
            }
            (Some(Either::A(bias)), _) => Some(bias),
            _ => None,
        };
        let y = destination(y, m, n).with_bias(bias).with_activation(activation);
        H::product(cpu, matrix(&x, m, k), matrix(&w, n, k).transposed(), y, false, packed);
        Ok(())
    })
}

/// See [`super::backward_weight`].
pub(super) fn backward_weight<H: Half>(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (input, d_output): (&Tensor, &Tensor),
    (d_weight, d_bias): (&Tensor, Option<&Tensor>),
    accumulate: bool,
) -> Result<()> {
    let has_half_bias = d_bias.is_some_and(is_half::<H>);
    let operands = (
        read_either::<H, _>(op, "input", input, [m, k])?,
        read_either::<H, _>(op, "d_output", d_output, [m, n])?,
        write_either::<H, _>(op, "d_weight", d_weight, [n, k], accumulate)?,
        d_bias.map(|db| write_either::<H, _>(op, "d_bias", db, [n], accumulate)).transpose()?,
        has_half_bias.then(|| scratch::<f32>(n)),
        scratch::<f32>(H::scratch_len(compute.processor(), n, k, m, is_half::<H>(d_weight))),
    );
    compute.launch(op, operands, move |cpu, (x, dy, dw, db, sums, packed)| {
        match (db, sums) {
            (Some(Either::A(db)), _) => add_rows(cpu, &dy, db, accumulate),
            (Some(Either::B(db)), Some(sums)) => {
                add_rows(cpu, &dy, sums, false);
                for (db, sum) in db.iter_mut().zip(sums) {
                    *db = H::store(if accumulate { db.load() + *sum } else { *sum });
                }
            }
            _ => {}
        }
        let (dy, x) = (matrix(&dy, m, n).transposed(), matrix(&x, m, k));
        H::product(cpu, dy, x, destination(dw, n, k), accumulate, packed);
        Ok(())
    })
}

/// See [`super::backward_input`].
pub(super) fn backward_input<H: Half>(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (weight, d_output): (&Tensor, &Tensor),
    d_input: &Tensor,
) -> Result<()> {
    let operands = (
        read_either::<H, _>(op, "weight", weight, [n, k])?,
        read_either::<H, _>(op, "d_output", d_output, [m, n])?,
        write_either::<H, _>(op, "d_input", d_input, [m, k], false)?,
        scratch::<f32>(H::scratch_len(compute.processor(), m, k, n, is_half::<H>(d_input))),
    );
    compute.launch(op, operands, move |cpu, (w, dy, dx, packed)| {
        let (dy, w) = (matrix(&dy, m, n), matrix(&w, n, k));
        H::product(cpu, dy, w, destination(dx, m, k), false, packed);
        Ok(())
    })
}

/// `sums (+)= sum over rows of dy`.
fn add_rows<H: Half>(cpu: &Processor, dy: &Elems<H>, sums: &mut [f32], accumulate: bool) {
    match dy {
        Either::A(dy) => elementwise::add_rows(cpu.simd, dy, sums, accumulate),
        Either::B(dy) => elementwise::add_rows(cpu.simd, dy, sums, accumulate),
    }
}

fn is_half<H: Half>(tensor: &Tensor) -> bool {
    tensor.dtype() == H::DTYPE
}

/// Elements of f32 or `H`.
type Elems<'a, H> = Either<&'a [f32], &'a [H]>;

fn matrix<'a, H: Half>(elems: &Elems<'a, H>, rows: usize, columns: usize) -> Operand<'a, H> {
    match elems {
        Either::A(elems) => Operand::F32(Matrix::new(elems, rows, columns)),
        Either::B(elems) => Operand::Half(Matrix::new(elems, rows, columns)),
    }
}

fn destination<'a, H: Half>(
    elems: Either<&'a mut [f32], &'a mut [H]>,
    rows: usize,
    columns: usize,
) -> Destination<'a, H> {
    match elems {
        Either::A(elems) => Destination::new(Elements::F32(elems), rows, columns),
        Either::B(elems) => Destination::new(Elements::Half(elems), rows, columns),
    }
}

/// A tensor of f32 or `H` that is read.
fn read_either<'t, H: Half, const N: usize>(
    op: Op,
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
) -> Result<Either<Read<'t, f32>, Read<'t, H>>> {
    match tensor.dtype() {
        DType::F32 => Ok(Either::A(read(operand, tensor, shape))),
        dtype if dtype == H::DTYPE => Ok(Either::B(read(operand, tensor, shape))),
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}

/// A tensor of f32 or `H` that is written, or added to if `accumulate`.
fn write_either<'t, H: Half, const N: usize>(
    op: Op,
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
    accumulate: bool,
) -> Result<Either<Write<'t, f32>, Write<'t, H>>> {
    match tensor.dtype() {
        DType::F32 => Ok(Either::A(write_or_update(accumulate, operand, tensor, shape))),
        dtype if dtype == H::DTYPE => {
            Ok(Either::B(write_or_update(accumulate, operand, tensor, shape)))
        }
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}
