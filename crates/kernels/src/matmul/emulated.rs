//! Products in fp16 on a processor that computes none.
//!
//! In and out as for [`product`](super::product), with f16 in the place of bf16. Operands are rounded to f16 and widened to
//! f32, which is exact, and multiplied in f32. So the numbers are those of fp16 with sums in f32, up to the order of
//! the sums. The time is that of f32 and of the conversions.

use half::f16;

use super::{Activation, Destination, Elements, Matrix, Multiply, ProductOperand};
use crate::Processor;
use crate::cast::in_blocks;
use crate::simd::vectorized;
use crate::stored::{SinglePrecision, Stored, operand};

impl Multiply for f16 {
    fn product(
        cpu: &Processor,
        a: ProductOperand<'_, f16>,
        b: ProductOperand<'_, f16>,
        c: Destination<'_, f16>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let ((m, k), (_, n)) = (a.dims(), b.dims());
        let adds = accumulate && matches!(c.elems, Elements::Real(_));
        let (scratch, rest) = scratch.split_at_mut(f32::scratch_len(cpu, [m, n, k], false, adds));
        let (wide_a, rest) = rest.split_at_mut(m * k);
        let (wide_b, sums) = rest.split_at_mut(k * n);
        let (a, b) = (widened(cpu, a, wide_a), widened(cpu, b, wide_b));
        let Destination { rows, columns, row_stride, bias, activation, .. } = c;
        match c.elems {
            Elements::Real(c) => {
                let elems = Elements::<f32>::Stored(c);
                let c = Destination { elems, rows, columns, row_stride, bias, activation };
                f32::product(cpu, a.into(), b.into(), c, accumulate, scratch);
            }
            Elements::Stored(c) => {
                let to = Destination::<f32>::new(&mut sums[..m * n], m, n);
                f32::product(cpu, a.into(), b.into(), to, false, scratch);
                let rows = sums.chunks_exact(n.max(1)).zip(c.chunks_mut(row_stride.max(1)));
                let with_relu = activation == Activation::Relu;
                rows.for_each(|(sums, c)| {
                    vectorized!(cpu.simd, store_row, sums, bias, with_relu, accumulate, c)
                });
            }
        }
    }

    /// Both operands in f32, and the sums if c is f16, beside what a product of f32 takes.
    fn scratch_len(
        cpu: &Processor,
        [m, n, k]: [usize; 3],
        is_c_f16: bool,
        accumulate: bool,
    ) -> usize {
        let sums = if is_c_f16 { (m, n) } else { (0, 0) };
        let sizes = [(m, k), (k, n), sums].map(|(rows, columns)| rows.saturating_mul(columns));
        let of_product = f32::scratch_len(cpu, [m, n, k], false, accumulate && !is_c_f16);
        sizes.into_iter().fold(of_product, usize::saturating_add)
    }
}

/// A matrix without gaps, rounded to f16, in f32.
fn widened<'a>(cpu: &Processor, of: ProductOperand<'_, f16>, to: &'a mut [f32]) -> Matrix<'a, f32> {
    fn copy<'a, X: SinglePrecision>(
        cpu: &Processor,
        from: Matrix<'_, X>,
        to: &'a mut [f32],
    ) -> Matrix<'a, f32> {
        assert_eq!(from.elems.len(), to.len(), "a matrix without gaps");
        in_blocks(cpu, from.elems, to, |from, to| vectorized!(cpu.simd, round_all::<X>, from, to));
        let Matrix { rows, columns, row_stride, column_stride, .. } = from;
        Matrix { elems: to, rows, columns, row_stride, column_stride }
    }
    match of {
        ProductOperand::Real(from) => copy(cpu, from, to),
        ProductOperand::Stored(from) => copy(cpu, from, to),
    }
}

#[inline(always)]
fn round_all<X: SinglePrecision>(from: &[X], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = operand::<X, f16>(*x));
}

/// `c = activation(sums + c + bias)`, with the old `c` if `accumulate`.
#[inline(always)]
fn store_row(sums: &[f32], bias: Option<&[f32]>, with_relu: bool, accumulate: bool, c: &mut [f16]) {
    for (at, (c, sum)) in c.iter_mut().zip(sums).enumerate() {
        let mut x = if accumulate { sum + c.load() } else { *sum };
        if let Some(bias) = bias {
            x += bias[at];
        }
        // Not less or equal: above zero, or NaN.
        *c = f16::store(if with_relu && x <= 0.0 { 0.0 } else { x });
    }
}
