//! The fully connected layer: `y = x w^T + b`, optionally without `b`, and optionally followed by ReLU.
//!
//! Shapes: x (m, k), w (n, k), b (n), y (m, n).
//!
//! Element types: all f32, all f64, or mixed with bf16 or f16. The mixed form is chosen by the activations, which are x and
//! y or their gradients: if at least one of the two is of 16 bits, each other tensor is f32 or of that type. Products then
//! round their operands to it and sum in f32, see [`crate::matmul::product`]; a bias is added in f32.
//!
//! On a card the products are those of cuBLASLt, whose sums have another order: results in f32 differ from the processor's
//! by at most 1e-6 of the sum of the absolute values of a result's products, those in f64 by 1e-14, and those in 16 bits by
//! one rounding more. A card rounds a bias to the type of y before it is added, and ReLU may make zero of NaN.

mod mixed;
mod row;

use paceline_memory::{DType, Tensor};

pub use self::row::forward_row;
pub use crate::activation::Activation;
use crate::card::products::{self, CardMatrix, RowParts};
use crate::error::matrix_sizes;
use crate::matmul::{Destination, Matrix, Multiply, product};
use crate::operands::write_or_update;
use crate::real::for_real;
use crate::{Compute, Op, Result, Scratch, elementwise, read, scratch, write};

/// Rows of x, outputs, inputs. The weight has the last two.
#[derive(Clone, Copy, Debug)]
struct LinearSizes {
    m: usize,
    n: usize,
    k: usize,
}

impl LinearSizes {
    /// `rows` has the rows of x.
    fn of(op: Op, rows: &Tensor, weight: &Tensor) -> Result<Self> {
        let [n, k] = matrix_sizes(op.name, "weight", weight)?;
        Ok(Self { m: rows.dims().first().copied().unwrap_or(0), n, k })
    }
}

/// Returns what the body returns with the type of 16 bits of an activation under a name, if one of the two has such a type.
macro_rules! if_mixed {
    ($activations:expr, $H:ident => $body:expr) => {
        for tensor in $activations {
            match tensor.dtype() {
                DType::BF16 => {
                    type $H = half::bf16;
                    return $body;
                }
                DType::F16 => {
                    type $H = half::f16;
                    return $body;
                }
                _ => {}
            }
        }
    };
}

/// Writes `output` (m, n). f32, f64, or mixed with bf16 or f16; overwrites.
pub fn forward(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("linear_forward");
    let sizes @ LinearSizes { m, n, k } = LinearSizes::of(op, input, weight)?;
    let op = op.forward_product([m, n, k]);
    if_mixed!([input, output], H => {
        mixed::forward::<H>(compute, op, sizes, (input, weight, bias), activation, output)
    });
    for_real!(op.name, input.dtype(), T => {
        let operands = (
            read::<T>("input", input, [m, k]),
            read::<T>("weight", weight, [n, k]),
            bias.map(|bias| read::<T>("bias", bias, [n])),
            write::<T>("output", output, [m, n]),
            packed::<T>(compute, [m, n, k], output, false),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, bias, y, packed)| {
            let (x, w) = (Matrix::new(x, m, k), Matrix::new(w, n, k));
            let y = Destination::<T>::new(y, m, n).with_bias(bias).with_activation(activation);
            product(cpu, x, w.transposed(), y, false, packed);
            Ok(())
        }, move |card, (x, w, bias, y, _)| {
            let (x, w) = (CardMatrix::new(x, m, k), CardMatrix::new(w, n, k));
            // SAFETY: the operands have these shapes.
            unsafe { products::linear(card, x, w, bias, activation, y) }
        })
    })
}

/// The processor's scratch memory for a product of these sizes, written to `result`. Cards need none.
fn packed<T: Multiply>(
    compute: &Compute,
    sizes: [usize; 3],
    result: &Tensor,
    accumulate: bool,
) -> Scratch<f32> {
    let is_result_stored = result.dtype() == T::DTYPE;
    scratch(if compute.is_card() {
        0
    } else {
        T::scratch_len(compute.processor(), sizes, is_result_stored, accumulate)
    })
}

/// Gradients of weight and bias from `d_output` (m, n), the gradient before the activation:
/// `dw = dy^T x`, `db = sum over rows of dy`. Overwrites, or adds to what is there if `accumulate`.
/// f32, f64, or mixed with bf16 or f16.
pub fn backward_weight(
    compute: &Compute,
    input: &Tensor,
    d_output: &Tensor,
    d_weight: &Tensor,
    d_bias: Option<&Tensor>,
    accumulate: bool,
) -> Result<()> {
    let op = Op::new("linear_backward_weight");
    let sizes @ LinearSizes { m, n, k } = LinearSizes::of(op, input, d_weight)?;
    let op = op.backward_product([m, n, k]);
    if_mixed!([input, d_output], H => {
        let (operands, results) = ((input, d_output), (d_weight, d_bias));
        mixed::backward_weight::<H>(compute, op, sizes, operands, results, accumulate)
    });
    for_real!(op.name, input.dtype(), T => {
        let parts = RowParts::new(m, n);
        let operands = (
            read::<T>("input", input, [m, k]),
            read::<T>("d_output", d_output, [m, n]),
            write_or_update::<T>(accumulate, "d_weight", d_weight, [n, k]),
            d_bias.map(|d_bias| write_or_update::<T>(accumulate, "d_bias", d_bias, [n])),
            (compute.is_card() && d_bias.is_some()).then(|| scratch::<T>(parts.scratch_len())),
            packed::<T>(compute, [n, k, m], d_weight, accumulate),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, dy, dw, db, _, packed)| {
            let (a, b) = (Matrix::new(dy, m, n).transposed(), Matrix::new(x, m, k));
            product(cpu, a, b, Destination::<T>::new(dw, n, k), accumulate, packed);
            if let Some(db) = db {
                elementwise::add_rows(cpu, dy, db, accumulate);
            }
            Ok(())
        }, move |card, (x, dy, dw, db, partials, _)| {
            let (a, b) = (CardMatrix::new(dy, m, n).transposed(), CardMatrix::new(x, m, k));
            // SAFETY: the operands have these shapes, and the scratch memory is that of the parts.
            unsafe {
                products::multiply(card, a, b, dw, accumulate)?;
                match (db, partials) {
                    (Some(db), Some(partials)) => {
                        let partials = products::untyped(partials);
                        products::sum_over_rows(card, parts, dy, partials, accumulate, db)
                    }
                    _ => Ok(()),
                }
            }
        })
    })
}

/// Gradient of the input: `dx = dy w`, (m, k). f32, f64, or mixed with bf16 or f16; overwrites.
pub fn backward_input(
    compute: &Compute,
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let op = Op::new("linear_backward_input");
    let sizes @ LinearSizes { m, n, k } = LinearSizes::of(op, d_output, weight)?;
    let op = op.backward_product([m, n, k]);
    if_mixed!([d_output, d_input], H => {
        mixed::backward_input::<H>(compute, op, sizes, (weight, d_output), d_input)
    });
    for_real!(op.name, d_output.dtype(), T => {
        let operands = (
            read::<T>("weight", weight, [n, k]),
            read::<T>("d_output", d_output, [m, n]),
            write::<T>("d_input", d_input, [m, k]),
            packed::<T>(compute, [m, k, n], d_input, false),
        );
        compute.launch_with_card(op, operands, move |cpu, (w, dy, dx, packed)| {
            let (dy, w) = (Matrix::new(dy, m, n), Matrix::new(w, n, k));
            product(cpu, dy, w, Destination::<T>::new(dx, m, k), false, packed);
            Ok(())
        }, move |card, (w, dy, dx, _)| {
            let (dy, w) = (CardMatrix::new(dy, m, n), CardMatrix::new(w, n, k));
            // SAFETY: the operands have these shapes.
            unsafe { products::multiply(card, dy, w, dx, false) }
        })
    })
}
