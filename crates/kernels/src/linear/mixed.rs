//! The fully connected layer whose operands or results are bf16.
//!
//! In and out: tensors of f32 or bf16, in any mixture. Everything is summed in f32, and rounded once if the result is bf16.

use half::bf16;
use paceline_memory::{DType, Tensor};
use paceline_numeric::bf16::{round, widen};

use super::{Activation, Sizes};
use crate::launch::{Either, write_or_update};
use crate::matmul::{Destination, Matrix, Operand, product, scratch_len};
use crate::{Compute, KernelError, Op, Processor, Read, Result, Write, elementwise, read, scratch};

/// See [`super::forward`].
pub(super) fn forward(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (input, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let has_bf16_bias = bias.is_some_and(is_bf16);
    let operands = (
        read_either(op, "input", input, [m, k])?,
        read_either(op, "weight", weight, [n, k])?,
        bias.map(|bias| read_either(op, "bias", bias, [n])).transpose()?,
        write_either(op, "output", output, [m, n], false)?,
        has_bf16_bias.then(|| scratch::<f32>(n)),
        scratch::<f32>(scratch_len(compute.processor(), m, n, k, is_bf16(output))),
    );
    compute.launch(op, operands, move |cpu, (x, w, bias, y, widened, packed)| {
        let bias = match (bias, widened) {
            (Some(Either::B(bias)), Some(widened)) => {
                widened.iter_mut().zip(bias).for_each(|(wide, x)| *wide = widen(*x));
                Some(&*widened)
            }
            (Some(Either::A(bias)), _) => Some(bias),
            _ => None,
        };
        let y = destination(y, m, n).with_bias(bias).with_activation(activation);
        product(cpu, matrix(&x, m, k), matrix(&w, n, k).transposed(), y, false, packed);
        Ok(())
    })
}

/// See [`super::backward_weight`].
pub(super) fn backward_weight(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (input, d_output): (&Tensor, &Tensor),
    (d_weight, d_bias): (&Tensor, Option<&Tensor>),
    accumulate: bool,
) -> Result<()> {
    let has_bf16_bias = d_bias.is_some_and(is_bf16);
    let operands = (
        read_either(op, "input", input, [m, k])?,
        read_either(op, "d_output", d_output, [m, n])?,
        write_either(op, "d_weight", d_weight, [n, k], accumulate)?,
        d_bias.map(|db| write_either(op, "d_bias", db, [n], accumulate)).transpose()?,
        has_bf16_bias.then(|| scratch::<f32>(n)),
        scratch::<f32>(scratch_len(compute.processor(), n, k, m, is_bf16(d_weight))),
    );
    compute.launch(op, operands, move |cpu, (x, dy, dw, db, sums, packed)| {
        match (db, sums) {
            (Some(Either::A(db)), _) => add_rows(cpu, &dy, db, accumulate),
            (Some(Either::B(db)), Some(sums)) => {
                add_rows(cpu, &dy, sums, false);
                for (db, sum) in db.iter_mut().zip(sums) {
                    *db = round(if accumulate { widen(*db) + *sum } else { *sum });
                }
            }
            _ => {}
        }
        let (dy, x) = (matrix(&dy, m, n).transposed(), matrix(&x, m, k));
        product(cpu, dy, x, destination(dw, n, k), accumulate, packed);
        Ok(())
    })
}

/// See [`super::backward_input`].
pub(super) fn backward_input(
    compute: &Compute,
    op: Op,
    Sizes { m, n, k }: Sizes,
    (weight, d_output): (&Tensor, &Tensor),
    d_input: &Tensor,
) -> Result<()> {
    let operands = (
        read_either(op, "weight", weight, [n, k])?,
        read_either(op, "d_output", d_output, [m, n])?,
        write_either(op, "d_input", d_input, [m, k], false)?,
        scratch::<f32>(scratch_len(compute.processor(), m, k, n, is_bf16(d_input))),
    );
    compute.launch(op, operands, move |cpu, (w, dy, dx, packed)| {
        let (dy, w) = (matrix(&dy, m, n), matrix(&w, n, k));
        product(cpu, dy, w, destination(dx, m, k), false, packed);
        Ok(())
    })
}

/// `sums (+)= sum over rows of dy`.
fn add_rows(cpu: &Processor, dy: &Elems, sums: &mut [f32], accumulate: bool) {
    match dy {
        Either::A(dy) => elementwise::add_rows(cpu.simd, dy, sums, accumulate),
        Either::B(dy) => elementwise::add_rows(cpu.simd, dy, sums, accumulate),
    }
}

fn is_bf16(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::BF16
}

/// Elements of f32 or bf16.
type Elems<'a> = Either<&'a [f32], &'a [bf16]>;

fn matrix<'a>(elems: &Elems<'a>, rows: usize, columns: usize) -> Operand<'a> {
    match elems {
        Either::A(elems) => Matrix::new(elems, rows, columns).into(),
        Either::B(elems) => Matrix::new(elems, rows, columns).into(),
    }
}

fn destination<'a>(
    elems: Either<&'a mut [f32], &'a mut [bf16]>,
    rows: usize,
    columns: usize,
) -> Destination<'a> {
    match elems {
        Either::A(elems) => Destination::new(elems, rows, columns),
        Either::B(elems) => Destination::new(elems, rows, columns),
    }
}

/// A tensor of f32 or bf16 that is read.
fn read_either<'t, const N: usize>(
    op: Op,
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
) -> Result<Either<Read<'t, f32>, Read<'t, bf16>>> {
    match tensor.dtype() {
        DType::F32 => Ok(Either::A(read(operand, tensor, shape))),
        DType::BF16 => Ok(Either::B(read(operand, tensor, shape))),
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}

/// A tensor of f32 or bf16 that is written, or added to if `accumulate`.
fn write_either<'t, const N: usize>(
    op: Op,
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
    accumulate: bool,
) -> Result<Either<Write<'t, f32>, Write<'t, bf16>>> {
    match tensor.dtype() {
        DType::F32 => Ok(Either::A(write_or_update(accumulate, operand, tensor, shape))),
        DType::BF16 => Ok(Either::B(write_or_update(accumulate, operand, tensor, shape))),
        dtype => Err(KernelError::DType { op: op.name, dtype }),
    }
}
