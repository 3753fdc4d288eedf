//! The fully connected layer whose operands or results are bf16.
//!
//! In and out: tensors of f32 or bf16, in any mixture, whose shapes the parent module has checked. Everything is summed
//! in f32, and rounded once if the result is bf16.

use half::bf16;
use paceline_memory::{DType, Device, ReadGuard, Tensor, WriteGuard};
use paceline_numeric::bf16::{round, widen};

use super::{Activation, OP};
use crate::matmul::{Destination, Matrix, Operand, product, scratch_len};
use crate::meta::MetaScratch;
use crate::{Compute, KernelError, Result, elementwise};

/// See [`super::forward`]. `sizes` are m, n and k.
pub(super) fn forward(
    compute: &Compute,
    sizes: (usize, usize, usize),
    (input, weight): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let (m, n, k) = sizes;
    let has_bf16_bias = bias.is_some_and(|bias| bias.dtype() == DType::BF16);
    match compute.device_of(OP, [input, weight, output].into_iter().chain(bias))? {
        Device::Cpu => {
            let (x, w) = (Elems::read(input)?, Elems::read(weight)?);
            let bias = bias.map(Elems::read).transpose()?;
            let mut widened = compute.scratch(if has_bf16_bias { n } else { 0 })?;
            let bias = match &bias {
                None => None,
                Some(Elems::F32(bias)) => Some(&bias[..]),
                Some(Elems::Bf16(bias)) => {
                    widened.iter_mut().zip(&bias[..]).for_each(|(wide, x)| *wide = widen(*x));
                    Some(&widened[..])
                }
            };
            let mut y = ElemsMut::write(output)?;
            let y = y.destination(m, n).with_bias(bias).with_activation(activation);
            product(compute, x.matrix(m, k), w.matrix(n, k).transposed(), y, false)
        }
        Device::Meta => {
            compute.count_products([m, n, k]);
            let mut pretended = claims(compute, [input, weight].into_iter().chain(bias), output)?;
            pretended.scratch(DType::F32, if has_bf16_bias { n } else { 0 })?;
            pretended.scratch(DType::F32, scratch_len(compute, m, n, k, is_bf16(output)))
        }
    }
}

/// See [`super::backward_weight`].
pub(super) fn backward_weight(
    compute: &Compute,
    sizes: (usize, usize, usize),
    (input, d_output): (&Tensor, &Tensor),
    d_weight: &Tensor,
    d_bias: Option<&Tensor>,
    accumulate: bool,
) -> Result<()> {
    let (m, n, k) = sizes;
    match compute.device_of(OP, [input, d_output, d_weight].into_iter().chain(d_bias))? {
        Device::Cpu => {
            let (x, dy) = (Elems::read(input)?, Elems::read(d_output)?);
            let mut dw = ElemsMut::write(d_weight)?;
            match d_bias.map(ElemsMut::write).transpose()? {
                None => {}
                Some(ElemsMut::F32(mut db)) => add_rows(compute, &dy, &mut db, accumulate),
                Some(ElemsMut::Bf16(mut db)) => {
                    let mut sums = compute.scratch(n)?;
                    add_rows(compute, &dy, &mut sums, false);
                    for (db, sum) in db.iter_mut().zip(&sums[..]) {
                        *db = round(if accumulate { widen(*db) + sum } else { *sum });
                    }
                }
            }
            let (dy, x) = (dy.matrix(m, n).transposed(), x.matrix(m, k));
            product(compute, dy, x, dw.destination(n, k), accumulate)
        }
        Device::Meta => {
            compute.count_backward([m, n, k]);
            if let Some(d_bias) = d_bias {
                let mut pretended = claims(compute, [d_output], d_bias)?;
                if is_bf16(d_bias) {
                    pretended.scratch(DType::F32, n)?;
                }
            }
            let mut pretended = claims(compute, [input, d_output], d_weight)?;
            pretended.scratch(DType::F32, scratch_len(compute, n, k, m, is_bf16(d_weight)))
        }
    }
}

/// See [`super::backward_input`].
pub(super) fn backward_input(
    compute: &Compute,
    sizes: (usize, usize, usize),
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let (m, n, k) = sizes;
    match compute.device_of(OP, [weight, d_output, d_input])? {
        Device::Cpu => {
            let (w, dy) = (Elems::read(weight)?, Elems::read(d_output)?);
            let mut dx = ElemsMut::write(d_input)?;
            product(compute, dy.matrix(m, n), w.matrix(n, k), dx.destination(m, k), false)
        }
        Device::Meta => {
            compute.count_backward([m, n, k]);
            let mut pretended = claims(compute, [weight, d_output], d_input)?;
            pretended.scratch(DType::F32, scratch_len(compute, m, k, n, is_bf16(d_input)))
        }
    }
}

/// `sums (+)= sum over rows of dy`.
fn add_rows(compute: &Compute, dy: &Elems, sums: &mut [f32], accumulate: bool) {
    match dy {
        Elems::F32(dy) => elementwise::add_rows(compute.simd, dy, sums, accumulate),
        Elems::Bf16(dy) => elementwise::add_rows(compute.simd, dy, sums, accumulate),
    }
}

/// Claims operands and a result on the device without contents.
fn claims<'a, 't>(
    compute: &'a Compute,
    operands: impl IntoIterator<Item = &'t Tensor>,
    result: &'t Tensor,
) -> Result<MetaScratch<'a>> {
    let mut pretended = MetaScratch::new(compute, OP);
    for operand in operands {
        pretended = pretended.reads(dtype(operand)?, [operand])?;
    }
    pretended.writes(dtype(result)?, [result])
}

fn is_bf16(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::BF16
}

/// The element type of a tensor that must be f32 or bf16.
fn dtype(tensor: &Tensor) -> Result<DType> {
    match tensor.dtype() {
        dtype @ (DType::F32 | DType::BF16) => Ok(dtype),
        dtype => Err(KernelError::DType { op: OP, dtype }),
    }
}

/// A tensor of f32 or bf16 that is held for reading.
enum Elems {
    F32(ReadGuard<f32>),
    Bf16(ReadGuard<bf16>),
}

impl Elems {
    fn read(tensor: &Tensor) -> Result<Self> {
        Ok(match dtype(tensor)? {
            DType::F32 => Elems::F32(tensor.read()?),
            _ => Elems::Bf16(tensor.read()?),
        })
    }

    fn matrix(&self, rows: usize, columns: usize) -> Operand<'_> {
        match self {
            Elems::F32(elems) => Matrix::new(&elems[..], rows, columns).into(),
            Elems::Bf16(elems) => Matrix::new(&elems[..], rows, columns).into(),
        }
    }
}

/// A tensor of f32 or bf16 that is held for writing.
enum ElemsMut {
    F32(WriteGuard<f32>),
    Bf16(WriteGuard<bf16>),
}

impl ElemsMut {
    fn write(tensor: &Tensor) -> Result<Self> {
        Ok(match dtype(tensor)? {
            DType::F32 => ElemsMut::F32(tensor.write()?),
            _ => ElemsMut::Bf16(tensor.write()?),
        })
    }

    fn destination(&mut self, rows: usize, columns: usize) -> Destination<'_> {
        match self {
            ElemsMut::F32(elems) => Destination::new(&mut elems[..], rows, columns),
            ElemsMut::Bf16(elems) => Destination::new(&mut elems[..], rows, columns),
        }
    }
}
