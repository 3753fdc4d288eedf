//! Products in fp16 on a processor that computes none.
//!
//! In and out as for [`product`](super::product), with f16 in the place of bf16. Operands are rounded to f16 and widened to
//! f32, which is exact, and [`matmul`] multiplies these. So the numbers are those of fp16 with sums in f32, up to the order of
//! the sums. The time is that of f32 and of the conversions.

use half::f16;

use super::{Activation, Destination, Elements, Half, Matrix, Operand, matmul};
use crate::cast::in_blocks;
use crate::simd::multiversion;
use crate::stored::{SinglePrecision, operand};
use crate::{Processor, SimdLevel};

impl Half for f16 {
    fn product(
        cpu: &Processor,
        a: Operand<'_, f16>,
        b: Operand<'_, f16>,
        c: Destination<'_, f16>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let ((m, k), (_, n)) = (a.dims(), b.dims());
        assert_eq!((c.rows, c.columns), (m, n), "size of the product");
        let (wide_a, rest) = scratch.split_at_mut(m * k);
        let (wide_b, rest) = rest.split_at_mut(k * n);
        let sums = &mut rest[..m * n];
        matmul(cpu, widened(cpu, a, wide_a), widened(cpu, b, wide_b), sums, false);
        let Destination { row_stride, bias, activation, .. } = c;
        let with_relu = activation == Activation::Relu;
        match c.elems {
            Elements::F32(c) => {
                store(cpu.simd, sums, n, bias, with_relu, accumulate, row_stride, c);
            }
            Elements::Half(c) => {
                store(cpu.simd, sums, n, bias, with_relu, accumulate, row_stride, c);
            }
        }
    }

    /// Both operands and the sums in f32.
    fn scratch_len(_: &Processor, m: usize, n: usize, k: usize, _: bool) -> usize {
        let sizes = [(m, k), (k, n), (m, n)].map(|(rows, columns)| rows.saturating_mul(columns));
        sizes.into_iter().fold(0, usize::saturating_add)
    }
}

/// A matrix without gaps, rounded to f16, in f32.
fn widened<'a>(cpu: &Processor, of: Operand<'_, f16>, to: &'a mut [f32]) -> Matrix<'a, f32> {
    fn copy<'a, X: SinglePrecision>(
        cpu: &Processor,
        from: Matrix<'_, X>,
        to: &'a mut [f32],
    ) -> Matrix<'a, f32> {
        assert_eq!(from.elems.len(), to.len(), "a matrix without gaps");
        in_blocks(cpu, from.elems, to, |from, to| round_all::<X>(cpu.simd, from, to));
        let Matrix { rows, columns, row_stride, column_stride, .. } = from;
        Matrix { elems: to, rows, columns, row_stride, column_stride }
    }
    match of {
        Operand::F32(from) => copy(cpu, from, to),
        Operand::Half(from) => copy(cpu, from, to),
    }
}

multiversion! {
    fn round_all<X: SinglePrecision>(from: &[X], to: &mut [f32]) = round_body
}

#[inline(always)]
fn round_body<X: SinglePrecision>(from: &[X], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = operand::<X, f16>(*x));
}

/// Writes sums (rows, columns) to rows of `c` that begin `stride` elements after each other.
#[allow(clippy::too_many_arguments, reason = "what is done with a sum")]
fn store<C: SinglePrecision>(
    level: SimdLevel,
    sums: &[f32],
    columns: usize,
    bias: Option<&[f32]>,
    with_relu: bool,
    accumulate: bool,
    stride: usize,
    c: &mut [C],
) {
    let rows = sums.chunks_exact(columns.max(1)).zip(c.chunks_mut(stride.max(1)));
    rows.for_each(|(sums, c)| store_row(level, sums, bias, with_relu, accumulate, c));
}

multiversion! {
    /// `c = activation(sums + c + bias)`, with the old `c` if `accumulate`.
    fn store_row<C: SinglePrecision>(
        sums: &[f32],
        bias: Option<&[f32]>,
        with_relu: bool,
        accumulate: bool,
        c: &mut [C],
    ) = store_row_body
}

#[inline(always)]
fn store_row_body<C: SinglePrecision>(
    sums: &[f32],
    bias: Option<&[f32]>,
    with_relu: bool,
    accumulate: bool,
    c: &mut [C],
) {
    for (at, (c, sum)) in c.iter_mut().zip(sums).enumerate() {
        let mut x = if accumulate { sum + c.load() } else { *sum };
        if let Some(bias) = bias {
            x += bias[at];
        }
        // Not less or equal: above zero, or NaN.
        *c = C::store(if with_relu && x <= 0.0 { 0.0 } else { x });
    }
}
