//! The fully connected layer whose operands or results are of 16 bits: bf16 or f16, called `H` here.
//!
//! In and out: tensors of f32 or `H`, in any mixture. Everything is summed in f32, and rounded once if the result is `H`.

use paceline_cuda::Grid;
use paceline_cuda::kernel::{In, Out};
use paceline_memory::{DType, Tensor};

use super::{Activation, LinearSizes, packed};
use crate::card::products::{self, CardMatrix, Multiplied, RowParts, narrow, widen};
use crate::matmul::{Destination, Elements, HalfFloat, Matrix, ProductOperand, product};
use crate::operands::{Either, write_or_update};
use crate::{
    Compute, KernelError, OnCard, Op, Processor, Read, Result, Scratch, Write, elementwise, read,
    scratch,
};

/// See [`super::forward`].
pub(super) fn forward<H: HalfFloat>(
    compute: &Compute,
    op: Op,
    LinearSizes { m, n, k }: LinearSizes,
    (input, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let has_half_bias = bias.is_some_and(is_half::<H>);
    // A card adds a bias of the output's type.
    let narrows_bias =
        compute.is_card() && is_half::<H>(output) && bias.is_some() && !has_half_bias;
    let operands = (
        read_either::<H, _>(op, "input", input, [m, k])?,
        read_either::<H, _>(op, "weight", weight, [n, k])?,
        bias.map(|bias| read_either::<H, _>(op, "bias", bias, [n])).transpose()?,
        write_either::<H, _>(op, "output", output, [m, n], false)?,
        has_half_bias.then(|| scratch::<f32>(n)),
        packed::<H>(compute, [m, n, k], output, false),
        (
            rounded::<H>(compute, input),
            rounded::<H>(compute, weight),
            narrows_bias.then(|| scratch::<H>(n)),
        ),
    );
    compute.launch_with_card(
        op,
        operands,
        move |cpu, (x, w, bias, y, widened, packed, _)| {
            let bias = match (bias, widened) {
                (Some(Either::B(bias)), Some(widened)) => {
                    widened.iter_mut().zip(bias).for_each(|(wide, x)| *wide = x.load());
                    Some(&*widened)
                }
                (Some(Either::A(bias)), _) => Some(bias),
                _ => None,
            };
            let y = destination(y, m, n).with_bias(bias).with_activation(activation);
            product(cpu, matrix::<H>(&x, m, k), matrix(&w, n, k).transposed(), y, false, packed);
            Ok(())
        },
        move |card, (x, w, bias, y, widened, _, (x_rounded, w_rounded, narrowed))| {
            // SAFETY: the operands have these shapes, and each scratch memory is as long as what is converted into it.
            unsafe {
                let x = CardMatrix::new(round(card, x, x_rounded, m * k)?, m, k);
                let w = CardMatrix::new(round(card, w, w_rounded, n * k)?, n, k);
                match y {
                    Either::A(y) => {
                        let bias = bias.map(|bias| wide(card, bias, widened, n)).transpose()?;
                        products::linear(card, x, w, bias, activation, y)
                    }
                    Either::B(y) => {
                        let bias = bias.map(|bias| round(card, bias, narrowed, n)).transpose()?;
                        products::linear(card, x, w, bias, activation, y)
                    }
                }
            }
        },
    )
}

/// See [`super::backward_weight`].
pub(super) fn backward_weight<H: HalfFloat>(
    compute: &Compute,
    op: Op,
    LinearSizes { m, n, k }: LinearSizes,
    (input, d_output): (&Tensor, &Tensor),
    (d_weight, d_bias): (&Tensor, Option<&Tensor>),
    accumulate: bool,
) -> Result<()> {
    let has_half_bias = d_bias.is_some_and(is_half::<H>);
    let parts = RowParts::new(m, n);
    let partials =
        (compute.is_card() && d_bias.is_some()).then(|| scratch::<f32>(parts.scratch_len()));
    let operands = (
        read_either::<H, _>(op, "input", input, [m, k])?,
        read_either::<H, _>(op, "d_output", d_output, [m, n])?,
        write_either::<H, _>(op, "d_weight", d_weight, [n, k], accumulate)?,
        d_bias.map(|db| write_either::<H, _>(op, "d_bias", db, [n], accumulate)).transpose()?,
        has_half_bias.then(|| scratch::<f32>(n)),
        packed::<H>(compute, [n, k, m], d_weight, accumulate),
        (rounded::<H>(compute, input), rounded::<H>(compute, d_output), partials),
    );
    compute.launch_with_card(
        op,
        operands,
        move |cpu, (x, dy, dw, db, sums, packed, _)| {
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
            product(cpu, dy, x, destination::<H>(dw, n, k), accumulate, packed);
            Ok(())
        },
        move |card, (x, dy, dw, db, _, _, (x_rounded, dy_rounded, partials))| {
            // SAFETY: the operands have these shapes, each scratch memory is as long as what is converted into it, and that
            // for partial sums is that of the parts.
            unsafe {
                if let (Some(db), Some(partials)) = (db, partials) {
                    match dy {
                        Either::A(dy) => sum_rows(card, parts, dy, partials, accumulate, db)?,
                        Either::B(dy) => sum_rows(card, parts, dy, partials, accumulate, db)?,
                    }
                }
                let x = CardMatrix::new(round(card, x, x_rounded, m * k)?, m, k);
                let dy = CardMatrix::new(round(card, dy, dy_rounded, m * n)?, m, n).transposed();
                multiply(card, dy, x, dw, accumulate)
            }
        },
    )
}

/// See [`super::backward_input`].
pub(super) fn backward_input<H: HalfFloat>(
    compute: &Compute,
    op: Op,
    LinearSizes { m, n, k }: LinearSizes,
    (weight, d_output): (&Tensor, &Tensor),
    d_input: &Tensor,
) -> Result<()> {
    let operands = (
        read_either::<H, _>(op, "weight", weight, [n, k])?,
        read_either::<H, _>(op, "d_output", d_output, [m, n])?,
        write_either::<H, _>(op, "d_input", d_input, [m, k], false)?,
        packed::<H>(compute, [m, k, n], d_input, false),
        (rounded::<H>(compute, weight), rounded::<H>(compute, d_output)),
    );
    compute.launch_with_card(
        op,
        operands,
        move |cpu, (w, dy, dx, packed, _)| {
            let (dy, w) = (matrix(&dy, m, n), matrix(&w, n, k));
            product(cpu, dy, w, destination::<H>(dx, m, k), false, packed);
            Ok(())
        },
        move |card, (w, dy, dx, _, (w_rounded, dy_rounded))| {
            // SAFETY: the operands have these shapes, and each scratch memory is as long as what is converted into it.
            unsafe {
                let w = CardMatrix::new(round(card, w, w_rounded, n * k)?, n, k);
                let dy = CardMatrix::new(round(card, dy, dy_rounded, m * n)?, m, n);
                multiply(card, dy, w, dx, false)
            }
        },
    )
}

/// A card's scratch memory for an operand that a product rounds.
fn rounded<H: HalfFloat>(compute: &Compute, operand: &Tensor) -> Option<Scratch<H>> {
    (compute.is_card() && !is_half::<H>(operand)).then(|| scratch(operand.num_elems()))
}

/// The operand in 16 bits.
///
/// # Safety
///
/// The operand has `len` elements, and so has the scratch memory, if the operand is f32.
unsafe fn round<H: HalfFloat>(
    card: &OnCard,
    operand: Either<In<f32>, In<H>>,
    rounded: Option<Out<H>>,
    len: usize,
) -> paceline_cuda::Result<In<H>> {
    match operand {
        Either::B(operand) => Ok(operand),
        Either::A(operand) => {
            let rounded = rounded.expect("an operand of f32 has scratch memory");
            // SAFETY: the caller's.
            unsafe { card.launch(narrow(operand, rounded, len as u64)?, Grid::fours(len))? };
            Ok(rounded.as_in())
        }
    }
}

/// The operand in f32.
///
/// # Safety
///
/// The operand has `len` elements, and so has the scratch memory, if the operand is of 16 bits.
unsafe fn wide<H: HalfFloat>(
    card: &OnCard,
    operand: Either<In<f32>, In<H>>,
    widened: Option<Out<f32>>,
    len: usize,
) -> paceline_cuda::Result<In<f32>> {
    match operand {
        Either::A(operand) => Ok(operand),
        Either::B(operand) => {
            let widened = widened.expect("an operand of 16 bits has scratch memory");
            // SAFETY: the caller's.
            unsafe { card.launch(widen(operand, widened, len as u64)?, Grid::fours(len))? };
            Ok(widened.as_in())
        }
    }
}

/// # Safety
///
/// As for [`products::multiply`].
unsafe fn multiply<H: HalfFloat>(
    card: &OnCard,
    a: CardMatrix<H>,
    b: CardMatrix<H>,
    c: Either<Out<f32>, Out<H>>,
    accumulate: bool,
) -> paceline_cuda::Result<()> {
    // SAFETY: the caller's.
    unsafe {
        match c {
            Either::A(c) => products::multiply(card, a, b, c, accumulate),
            Either::B(c) => products::multiply(card, a, b, c, accumulate),
        }
    }
}

/// # Safety
///
/// As for [`products::sum_over_rows`].
unsafe fn sum_rows<S: Multiplied, H: HalfFloat>(
    card: &OnCard,
    parts: RowParts,
    dy: In<S>,
    partials: Out<f32>,
    accumulate: bool,
    db: Either<Out<f32>, Out<H>>,
) -> paceline_cuda::Result<()> {
    let partials = products::untyped(partials);
    // SAFETY: the caller's.
    unsafe {
        match db {
            Either::A(db) => products::sum_over_rows(card, parts, dy, partials, accumulate, db),
            Either::B(db) => products::sum_over_rows(card, parts, dy, partials, accumulate, db),
        }
    }
}

/// `sums (+)= sum over rows of dy`.
fn add_rows<H: HalfFloat>(cpu: &Processor, dy: &Elems<H>, sums: &mut [f32], accumulate: bool) {
    match dy {
        Either::A(dy) => elementwise::add_rows(cpu, dy, sums, accumulate),
        Either::B(dy) => elementwise::add_rows(cpu, dy, sums, accumulate),
    }
}

fn is_half<H: HalfFloat>(tensor: &Tensor) -> bool {
    tensor.dtype() == H::DTYPE
}

/// Elements of f32 or `H`.
type Elems<'a, H> = Either<&'a [f32], &'a [H]>;

fn matrix<'a, H: HalfFloat>(
    elems: &Elems<'a, H>,
    rows: usize,
    columns: usize,
) -> ProductOperand<'a, H> {
    match elems {
        Either::A(elems) => ProductOperand::Real(Matrix::new(elems, rows, columns)),
        Either::B(elems) => ProductOperand::Stored(Matrix::new(elems, rows, columns)),
    }
}

fn destination<'a, H: HalfFloat>(
    elems: Either<&'a mut [f32], &'a mut [H]>,
    rows: usize,
    columns: usize,
) -> Destination<'a, H> {
    match elems {
        Either::A(elems) => Destination::new(Elements::Real(elems), rows, columns),
        Either::B(elems) => Destination::new(Elements::Stored(elems), rows, columns),
    }
}

/// A tensor of f32 or `H` that is read.
fn read_either<'t, H: HalfFloat, const N: usize>(
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
fn write_either<'t, H: HalfFloat, const N: usize>(
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
