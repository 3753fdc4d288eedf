//! The three products of a head: its outputs, and the gradients of its input and of its weight.
//!
//! In and out: matrices. f32 and f64 are multiplied as they are. An input of bf16 makes products whose operands are rounded
//! to bf16; outputs and the gradient of the weight are f32. This file knows nothing of losses or chunks.

use half::bf16;
use paceline_memory::DType;

use super::{OP, Softmax};
use crate::matmul::{Destination, Matrix, Operand, matmul, product, scratch_len};
use crate::meta::MetaScratch;
use crate::stored::Stored;
use crate::{Compute, Result};

/// The most classes whose gradients one product of f32 or f64 computes. `gemm` copies the first operand as a whole, into
/// memory that nobody counts; that of all classes would be as large as the outputs.
const CLASSES: usize = 1024;

/// The type of the input of a head, and of its gradient. Shapes: x (n, inputs), w (classes, inputs), z (n, classes).
pub(super) trait Products: Stored<Real: Softmax> {
    /// `z = x w^T`
    fn outputs(
        compute: &Compute,
        x: Matrix<'_, Self>,
        w: Matrix<'_, Self::Real>,
        z: &mut [Self::Real],
    ) -> Result<()>;

    /// `dx = dz w`
    fn d_input(
        compute: &Compute,
        dz: Matrix<'_, Self::Real>,
        w: Matrix<'_, Self::Real>,
        dx: &mut [Self],
    ) -> Result<()>;

    /// `dw (+)= dz^T x`
    fn d_weight(
        compute: &Compute,
        dz: Matrix<'_, Self::Real>,
        x: Matrix<'_, Self>,
        dw: &mut [Self::Real],
        accumulate: bool,
    ) -> Result<()>;
}

macro_rules! products_as_they_are {
    ($float:ident) => {
        impl Products for $float {
            fn outputs(
                compute: &Compute,
                x: Matrix<'_, Self>,
                w: Matrix<'_, Self>,
                z: &mut [Self],
            ) -> Result<()> {
                matmul(compute, x, w.transposed(), z, false);
                Ok(())
            }

            fn d_input(
                compute: &Compute,
                dz: Matrix<'_, Self>,
                w: Matrix<'_, Self>,
                dx: &mut [Self],
            ) -> Result<()> {
                matmul(compute, dz, w, dx, false);
                Ok(())
            }

            fn d_weight(
                compute: &Compute,
                dz: Matrix<'_, Self>,
                x: Matrix<'_, Self>,
                dw: &mut [Self],
                accumulate: bool,
            ) -> Result<()> {
                for (at, dw) in dw.chunks_mut((CLASSES * x.columns()).max(1)).enumerate() {
                    let first = at * CLASSES;
                    let dz = dz.some_columns(first..first + dw.len() / x.columns());
                    matmul(compute, dz.transposed(), x, dw, accumulate);
                }
                Ok(())
            }
        }
    };
}
products_as_they_are!(f32);
products_as_they_are!(f64);

impl Products for bf16 {
    fn outputs(
        compute: &Compute,
        x: Matrix<'_, bf16>,
        w: Matrix<'_, f32>,
        z: &mut [f32],
    ) -> Result<()> {
        let z = Destination::new(z, x.rows(), w.rows());
        product(compute, Operand::from(x), Operand::from(w.transposed()), z, false)
    }

    fn d_input(
        compute: &Compute,
        dz: Matrix<'_, f32>,
        w: Matrix<'_, f32>,
        dx: &mut [bf16],
    ) -> Result<()> {
        let dx = Destination::new(dx, dz.rows(), w.columns());
        product(compute, dz, w, dx, false)
    }

    fn d_weight(
        compute: &Compute,
        dz: Matrix<'_, f32>,
        x: Matrix<'_, bf16>,
        dw: &mut [f32],
        accumulate: bool,
    ) -> Result<()> {
        let dw = Destination::new(dw, dz.columns(), x.columns());
        product(compute, dz.transposed(), Operand::from(x), dw, accumulate)
    }
}

/// Takes the scratch memory of the products of a chunk of `n` rows, one after the other.
pub(super) fn pretend_bf16(
    compute: &Compute,
    (n, classes, inputs): (usize, usize, usize),
    (wants_input, wants_weight): (bool, bool),
) -> Result<()> {
    let take = |len| MetaScratch::new(compute, OP).scratch(DType::F32, len);
    take(scratch_len(compute, n, classes, inputs, false))?;
    if wants_input {
        take(scratch_len(compute, n, inputs, classes, true))?;
    }
    if wants_weight {
        take(scratch_len(compute, classes, inputs, n, false))?;
    }
    Ok(())
}
