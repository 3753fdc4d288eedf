//! Products in f64, in plain loops: only tests compute in f64, with small sizes.
//!
//! In and out as for [`product`](super::product). A sum starts at zero, or at the old `c`, and adds one product after the other.

use super::{Activation, Destination, Elements, Multiply, ProductOperand};
use crate::Processor;

impl Multiply for f64 {
    fn product(
        cpu: &Processor,
        a: ProductOperand<'_, f64>,
        b: ProductOperand<'_, f64>,
        c: Destination<'_, f64>,
        accumulate: bool,
        _: &mut [f32],
    ) {
        let [
            ProductOperand::Real(a) | ProductOperand::Stored(a),
            ProductOperand::Real(b) | ProductOperand::Stored(b),
        ] = [a, b];
        let Destination { elems, rows, columns, row_stride, bias, activation } = c;
        let (Elements::Real(c) | Elements::Stored(c)) = elems;
        let rows = c.chunks_mut(row_stride.max(1)).take(rows).enumerate().collect();
        cpu.threads.for_each(rows, |(i, c)| {
            let c = &mut c[..columns];
            if !accumulate {
                c.fill(0.0);
            }
            for k in 0..a.columns {
                let factor = a.elems[i * a.row_stride + k * a.column_stride];
                let row = b.elems[k * b.row_stride..].iter().step_by(b.column_stride.max(1));
                c.iter_mut().zip(row).for_each(|(c, x)| *c += factor * x);
            }
            if let Some(bias) = bias {
                c.iter_mut().zip(bias).for_each(|(c, x)| *c += x);
            }
            if activation == Activation::Relu {
                // Not less or equal: above zero, or NaN.
                c.iter_mut().filter(|c| **c <= 0.0).for_each(|c| *c = 0.0);
            }
        });
    }

    fn scratch_len(_: &Processor, _: [usize; 3], _: bool, _: bool) -> usize {
        0
    }
}
