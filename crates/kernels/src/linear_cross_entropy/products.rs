//! The three products of a head: its outputs, and the gradients of its input and of its weight.
//!
//! In and out: matrices. An input of bf16 or f16 makes products whose operands are rounded to it; outputs and the gradient of
//! the weight are f32. This file knows nothing of losses or chunks.
//!
//! Shapes: x (n, inputs), w (classes, inputs), z (n, classes). `packed` is scratch memory of at least [`scratch_len`] elements.

use crate::Processor;
use crate::matmul::{Destination, Elements, Matrix, Multiply, ProductOperand, product};

/// Elements of scratch memory of the largest of the products, for these n, classes and inputs. `wants` says whether there are
/// gradients of the input and of the weight.
pub(super) fn scratch_len<S: Multiply>(
    cpu: &Processor,
    [n, classes, inputs]: [usize; 3],
    (wants_input, wants_weight): (bool, bool),
) -> usize {
    let outputs = S::scratch_len(cpu, [n, classes, inputs], false, false);
    let d_input = wants_input.then(|| S::scratch_len(cpu, [n, inputs, classes], true, false));
    let d_weight = wants_weight.then(|| S::scratch_len(cpu, [classes, inputs, n], false, true));
    outputs.max(d_input.unwrap_or(0)).max(d_weight.unwrap_or(0))
}

/// `z = x w^T`
pub(super) fn outputs<S: Multiply>(
    cpu: &Processor,
    x: Matrix<'_, S>,
    w: Matrix<'_, S::Real>,
    z: &mut [S::Real],
    packed: &mut [f32],
) {
    let z = Destination::<S>::new(Elements::Real(z), x.rows(), w.rows());
    product(cpu, ProductOperand::Stored(x), ProductOperand::Real(w.transposed()), z, false, packed);
}

/// `dx = dz w`
pub(super) fn d_input<S: Multiply>(
    cpu: &Processor,
    dz: Matrix<'_, S::Real>,
    w: Matrix<'_, S::Real>,
    dx: &mut [S],
    packed: &mut [f32],
) {
    let dx = Destination::<S>::new(Elements::Stored(dx), dz.rows(), w.columns());
    product(cpu, ProductOperand::Real(dz), ProductOperand::Real(w), dx, false, packed);
}

/// `dw (+)= dz^T x`
pub(super) fn d_weight<S: Multiply>(
    cpu: &Processor,
    dz: Matrix<'_, S::Real>,
    x: Matrix<'_, S>,
    dw: &mut [S::Real],
    accumulate: bool,
    packed: &mut [f32],
) {
    let dw = Destination::<S>::new(Elements::Real(dw), dz.columns(), x.columns());
    product(
        cpu,
        ProductOperand::Real(dz.transposed()),
        ProductOperand::Stored(x),
        dw,
        accumulate,
        packed,
    );
}
