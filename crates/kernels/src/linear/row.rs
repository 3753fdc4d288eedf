//! The layer for a single row, as when text is generated token by token.
//!
//! The time is that of reading the weights, so each is read once and in the order of memory. A product of matrices would
//! bring them into another order first.

use paceline_memory::{Element, Tensor};

use super::LinearSizes;
use crate::operands::Either;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::batches;
use crate::{Compute, Op, Processor, Result, lanes, read, scratch, write};

/// `y = x w^T`. Shapes: x (1, k), w (n, k), y (1, n). Types: x and w f32, f64, bf16 or f16; y like them, or of the type that
/// is computed with, f32 for 16 bits. The order of the sums does not depend on the processor. A card has no kernel for it.
pub fn forward_row(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("linear_forward_row");
    let LinearSizes { n, k, .. } = LinearSizes::of(op, input, weight)?;
    let op = op.forward_product([1, n, k]);
    dispatch!(op.name, input.dtype(), S => {
        let y = if output.dtype() == <<S as Stored>::Real as Element>::DTYPE {
            Either::A(write::<<S as Stored>::Real>("output", output, [1, n]))
        } else {
            Either::B(write::<S>("output", output, [1, n]))
        };
        let operands = (
            read::<S>("input", input, [1, k]),
            read::<S>("weight", weight, [n, k]),
            y,
            scratch::<<S as Stored>::Real>(k),
        );
        compute.launch(op, operands, move |cpu, (x, w, y, wide)| {
            wide.iter_mut().zip(x).for_each(|(wide, x)| *wide = x.load());
            match y {
                Either::A(y) => on_threads::<S, <S as Stored>::Real>(cpu, wide, w, y),
                Either::B(y) => on_threads::<S, S>(cpu, wide, w, y),
            }
            Ok(())
        })
    })
}

fn on_threads<S: Stored, Y: Stored<Real = S::Real>>(
    cpu: &Processor,
    x: &[S::Real],
    w: &[S],
    y: &mut [Y],
) {
    let count = y.len();
    cpu.threads.for_each(batches(cpu, y, 1, count), |(first, y)| {
        vectorized!(cpu.simd, products::<S, Y>, x, &w[first * x.len()..][..y.len() * x.len()], y);
    });
}

#[inline(always)]
fn products<S: Stored, Y: Stored<Real = S::Real>>(x: &[S::Real], w: &[S], y: &mut [Y]) {
    for (row, y) in y.iter_mut().enumerate() {
        let w = &w[row * x.len()..][..x.len()];
        *y = Y::store(lanes::dot(x, w));
    }
}
