//! The three products of a head: its outputs, and the gradients of its input and of its weight.
//!
//! In and out: matrices. f32 and f64 are multiplied as they are. An input of bf16 or f16 makes products whose operands are
//! rounded to it; outputs and the gradient of the weight are f32. This file knows nothing of losses or chunks.

use half::{bf16, f16};

use crate::Processor;
use crate::matmul::{Destination, Elements, Half, Matrix, Operand, matmul};
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

macro_rules! products_in_16_bits {
    ($half:ident) => {
        impl Products for $half {
            fn scratch_len(
                cpu: &Processor,
                [n, classes, inputs]: [usize; 3],
                (wants_input, wants_weight): (bool, bool),
            ) -> usize {
                let d_input = if wants_input {
                    <$half as Half>::scratch_len(cpu, n, inputs, classes, true)
                } else {
                    0
                };
                let d_weight = if wants_weight {
                    <$half as Half>::scratch_len(cpu, classes, inputs, n, false)
                } else {
                    0
                };
                <$half as Half>::scratch_len(cpu, n, classes, inputs, false)
                    .max(d_input)
                    .max(d_weight)
            }

            fn outputs(
                cpu: &Processor,
                x: Matrix<'_, $half>,
                w: Matrix<'_, f32>,
                z: &mut [f32],
                packed: &mut [f32],
            ) {
                let z = Destination::new(Elements::F32(z), x.rows(), w.rows());
                let (x, w) = (Operand::Half(x), Operand::F32(w.transposed()));
                <$half>::product(cpu, x, w, z, false, packed);
            }

            fn d_input(
                cpu: &Processor,
                dz: Matrix<'_, f32>,
                w: Matrix<'_, f32>,
                dx: &mut [$half],
                packed: &mut [f32],
            ) {
                let dx = Destination::new(Elements::Half(dx), dz.rows(), w.columns());
                let (dz, w) = (Operand::F32(dz), Operand::F32(w));
                <$half>::product(cpu, dz, w, dx, false, packed);
            }

            fn d_weight(
                cpu: &Processor,
                dz: Matrix<'_, f32>,
                x: Matrix<'_, $half>,
                dw: &mut [f32],
                accumulate: bool,
                packed: &mut [f32],
            ) {
                let dw = Destination::new(Elements::F32(dw), dz.columns(), x.columns());
                let (dz, x) = (Operand::F32(dz.transposed()), Operand::Half(x));
                <$half>::product(cpu, dz, x, dw, accumulate, packed);
            }
        }
    };
}
products_in_16_bits!(bf16);
products_in_16_bits!(f16);
