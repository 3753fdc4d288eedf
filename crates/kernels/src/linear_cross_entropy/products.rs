//! The three products of a head: its outputs, and the gradients of its input and of its weight.
//!
//! In and out: matrices. f32 and f64 are multiplied as they are. An input of bf16 makes products whose operands are rounded
//! to bf16; outputs and the gradient of the weight are f32. This file knows nothing of losses or chunks.

use half::bf16;

use crate::Processor;
use crate::matmul::{Destination, Matrix, Operand, matmul, product, scratch_len};
use crate::stored::Stored;

/// The most classes whose gradients one product of f32 or f64 computes. `gemm` copies the first operand as a whole, into
/// memory that nobody counts; that of all classes would be as large as the outputs.
const CLASSES: usize = 1024;

/// The type of the input of a head, and of its gradient. Shapes: x (n, inputs), w (classes, inputs), z (n, classes).
/// `packed` is scratch memory of at least [`Products::scratch_len`] elements.
pub(super) trait Products: Stored {
    /// Elements of scratch memory of the largest of the products, for these n, classes and inputs. `wants` says whether
    /// there are gradients of the input and of the weight.
    fn scratch_len(cpu: &Processor, sizes: [usize; 3], wants: (bool, bool)) -> usize;

    /// `z = x w^T`
    fn outputs(
        cpu: &Processor,
        x: Matrix<'_, Self>,
        w: Matrix<'_, Self::Real>,
        z: &mut [Self::Real],
        packed: &mut [f32],
    );

    /// `dx = dz w`
    fn d_input(
        cpu: &Processor,
        dz: Matrix<'_, Self::Real>,
        w: Matrix<'_, Self::Real>,
        dx: &mut [Self],
        packed: &mut [f32],
    );

    /// `dw (+)= dz^T x`
    fn d_weight(
        cpu: &Processor,
        dz: Matrix<'_, Self::Real>,
        x: Matrix<'_, Self>,
        dw: &mut [Self::Real],
        accumulate: bool,
        packed: &mut [f32],
    );
}

macro_rules! products_as_they_are {
    ($float:ident) => {
        impl Products for $float {
            fn scratch_len(_: &Processor, _: [usize; 3], _: (bool, bool)) -> usize {
                0
            }

            fn outputs(
                cpu: &Processor,
                x: Matrix<'_, Self>,
                w: Matrix<'_, Self>,
                z: &mut [Self],
                _: &mut [f32],
            ) {
                matmul(cpu, x, w.transposed(), z, false);
            }

            fn d_input(
                cpu: &Processor,
                dz: Matrix<'_, Self>,
                w: Matrix<'_, Self>,
                dx: &mut [Self],
                _: &mut [f32],
            ) {
                matmul(cpu, dz, w, dx, false);
            }

            fn d_weight(
                cpu: &Processor,
                dz: Matrix<'_, Self>,
                x: Matrix<'_, Self>,
                dw: &mut [Self],
                accumulate: bool,
                _: &mut [f32],
            ) {
                for (at, dw) in dw.chunks_mut((CLASSES * x.columns()).max(1)).enumerate() {
                    let first = at * CLASSES;
                    let dz = dz.some_columns(first..first + dw.len() / x.columns());
                    matmul(cpu, dz.transposed(), x, dw, accumulate);
                }
            }
        }
    };
}
products_as_they_are!(f32);
products_as_they_are!(f64);

impl Products for bf16 {
    fn scratch_len(
        cpu: &Processor,
        [n, classes, inputs]: [usize; 3],
        (wants_input, wants_weight): (bool, bool),
    ) -> usize {
        let d_input = if wants_input { scratch_len(cpu, n, inputs, classes, true) } else { 0 };
        let d_weight = if wants_weight { scratch_len(cpu, classes, inputs, n, false) } else { 0 };
        scratch_len(cpu, n, classes, inputs, false).max(d_input).max(d_weight)
    }

    fn outputs(
        cpu: &Processor,
        x: Matrix<'_, bf16>,
        w: Matrix<'_, f32>,
        z: &mut [f32],
        packed: &mut [f32],
    ) {
        let z = Destination::new(z, x.rows(), w.rows());
        product(cpu, Operand::from(x), Operand::from(w.transposed()), z, false, packed);
    }

    fn d_input(
        cpu: &Processor,
        dz: Matrix<'_, f32>,
        w: Matrix<'_, f32>,
        dx: &mut [bf16],
        packed: &mut [f32],
    ) {
        let dx = Destination::new(dx, dz.rows(), w.columns());
        product(cpu, dz, w, dx, false, packed);
    }

    fn d_weight(
        cpu: &Processor,
        dz: Matrix<'_, f32>,
        x: Matrix<'_, bf16>,
        dw: &mut [f32],
        accumulate: bool,
        packed: &mut [f32],
    ) {
        let dw = Destination::new(dw, dz.columns(), x.columns());
        product(cpu, dz.transposed(), Operand::from(x), dw, accumulate, packed);
    }
}
