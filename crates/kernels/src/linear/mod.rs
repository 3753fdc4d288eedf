//! The fully connected layer: `y = x w^T + b`, optionally without `b`, and optionally followed by ReLU.
//!
//! Shapes: x (m, k), w (n, k), b (n), y (m, n).
//!
//! Element types: all f32, all f64, or mixed with bf16 or f16. The mixed form is chosen by the activations, which are x and
//! y or their gradients: if at least one of the two is of 16 bits, each other tensor is f32 or of that type. Products then
//! round their operands to it and sum in f32, see [`crate::matmul::product`]; a bias is added in f32. Here `S` is the type of
//! products' operands, and each tensor is of `S` or of the type that is computed in, f32 for 16 bits.
//!
//! On a card the products are those of cuBLASLt, whose sums have another order: results in f32 differ from the processor's
//! by at most 1e-6 of the sum of the absolute values of a result's products, those in f64 by 1e-14, and those in 16 bits by
//! one rounding more. A card rounds a bias to the type of y before it is added, and ReLU may make zero of NaN.

mod row;

use paceline_cuda::kernel::{In, Out};
use paceline_cuda::{Epilogue, Grid};
use paceline_memory::{DType, Tensor};

pub use self::row::forward_row;
pub use crate::activation::Activation;
use crate::card::products::{self, CardMatrix, Multiplied, RowParts, retyped};
use crate::error::matrix_sizes;
use crate::matmul::{Destination, Elements, Matrix, Multiply, ProductOperand, product};
use crate::operands::{Either, write_or_update};
use crate::stored::{Stored, dispatch};
use crate::{
    Compute, OnCard, Op, Processor, Read, Result, Scratch, Write, elementwise, read, scratch, write,
};

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

/// A type of products' operands.
trait LinearElement: Multiply<Real: Multiplied> + Multiplied {
    /// Whether sums are rounded when they become `Self`.
    const IS_ROUNDED: bool = size_of::<Self>() < size_of::<Self::Real>();

    /// Whether a tensor has elements that are rounded.
    fn has(tensor: &Tensor) -> bool {
        Self::IS_ROUNDED && tensor.dtype() == Self::DTYPE
    }
}
impl<S: Multiply<Real: Multiplied> + Multiplied> LinearElement for S {}

/// The type of 16 bits of an activation, if one of the two has such a type; else that of the first.
fn factors_of(activations: [&Tensor; 2]) -> DType {
    let [first, second] = activations.map(Tensor::dtype);
    if matches!(second, DType::BF16 | DType::F16) && first == DType::F32 { second } else { first }
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
    let LinearSizes { m, n, k } = LinearSizes::of(op, input, weight)?;
    let op = op.forward_product([m, n, k]);
    dispatch!(op.name, factors_of([input, output]), S => {
        // A card adds a bias of the output's type.
        let narrows_bias = compute.is_card()
            && S::has(output)
            && bias.is_some_and(|bias| !S::has(bias));
        let operands = (
            read_either::<S, _>("input", input, [m, k]),
            read_either::<S, _>("weight", weight, [n, k]),
            bias.map(|bias| read_either::<S, _>("bias", bias, [n])),
            write_either::<S, _>("output", output, [m, n], false),
            bias.filter(|bias| S::has(bias)).map(|_| scratch::<<S as Stored>::Real>(n)),
            packed::<S>(compute, [m, n, k], output, false),
            (rounded::<S>(compute, input), rounded::<S>(compute, weight), narrows_bias.then(|| scratch::<S>(n))),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, bias, y, widened, packed, _)| {
            let bias = match (bias, widened) {
                (Some(Either::B(bias)), Some(widened)) => {
                    widened.iter_mut().zip(bias).for_each(|(wide, x)| *wide = x.load());
                    Some(&*widened)
                }
                (Some(Either::A(bias)), _) => Some(bias),
                _ => None,
            };
            let y = destination::<S>(y, m, n).with_bias(bias).with_activation(activation);
            product(cpu, matrix::<S>(&x, m, k), matrix(&w, n, k).transposed(), y, false, packed);
            Ok(())
        }, move |card, (x, w, bias, y, widened, _, (x_rounded, w_rounded, narrowed))| {
            // SAFETY: the operands have these shapes, and each scratch memory is as long as what is converted into it.
            unsafe {
                let x = CardMatrix::new(factor::<S>(card, x, x_rounded, m * k)?, m, k);
                let w = CardMatrix::new(factor::<S>(card, w, w_rounded, n * k)?, n, k);
                match y {
                    Either::A(y) => {
                        let bias = bias.map(|bias| wide::<S>(card, bias, widened, n)).transpose()?;
                        products::linear(card, x, w, bias, activation, y)
                    }
                    Either::B(y) => {
                        let bias = bias.map(|bias| factor::<S>(card, bias, narrowed, n)).transpose()?;
                        products::linear(card, x, w, bias, activation, y)
                    }
                }
            }
        })
    })
}

/// `y = x w^T + z` with z (m, n), without bias and activation: a residual connection in one pass. Writes `output` (m, n), which is, like
/// `onto`, of the type that is computed in; the other types as for [`forward`]. The bits are those of a product, rounded, and a sum.
pub fn forward_onto(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    onto: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let op = Op::new("linear_forward");
    let LinearSizes { m, n, k } = LinearSizes::of(op, input, weight)?;
    let op = op.forward_product([m, n, k]);
    dispatch!(op.name, factors_of([input, output]), S => {
        let operands = (
            read_either::<S, _>("input", input, [m, k]),
            read_either::<S, _>("weight", weight, [n, k]),
            read::<<S as Stored>::Real>("onto", onto, [m, n]),
            write::<<S as Stored>::Real>("output", output, [m, n]),
            packed::<S>(compute, [m, n, k], output, false),
            (rounded::<S>(compute, input), rounded::<S>(compute, weight)),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, onto, y, packed, _)| {
            let to = destination::<S>(Either::A(&mut *y), m, n);
            product(cpu, matrix::<S>(&x, m, k), matrix(&w, n, k).transposed(), to, false, packed);
            elementwise::add_to(cpu, onto, y);
            Ok(())
        }, move |card, (x, w, onto, y, _, (x_rounded, w_rounded))| {
            // SAFETY: the operands have these shapes, and each scratch memory is as long as what is converted into it.
            unsafe {
                let x = CardMatrix::new(factor::<S>(card, x, x_rounded, m * k)?, m, k);
                let w = CardMatrix::new(factor::<S>(card, w, w_rounded, n * k)?, n, k);
                products::multiply_with(card, x, w.transposed(), y, Some(onto), Epilogue::None)
            }
        })
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
    let LinearSizes { m, n, k } = LinearSizes::of(op, input, d_weight)?;
    let op = op.backward_product([m, n, k]);
    let parts = RowParts::new(m, n);
    dispatch!(op.name, factors_of([input, d_output]), S => {
        let operands = (
            read_either::<S, _>("input", input, [m, k]),
            read_either::<S, _>("d_output", d_output, [m, n]),
            write_either::<S, _>("d_weight", d_weight, [n, k], accumulate),
            d_bias.map(|db| write_either::<S, _>("d_bias", db, [n], accumulate)),
            d_bias.filter(|db| S::has(db)).map(|_| scratch::<<S as Stored>::Real>(n)),
            packed::<S>(compute, [n, k, m], d_weight, accumulate),
            (
                rounded::<S>(compute, input),
                rounded::<S>(compute, d_output),
                d_bias
                    .filter(|_| compute.is_card())
                    .map(|_| scratch::<<S as Stored>::Real>(parts.scratch_len())),
            ),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, dy, dw, db, sums, packed, _)| {
            match (db, sums) {
                (Some(Either::A(db)), _) => add_rows::<S>(cpu, &dy, db, accumulate),
                (Some(Either::B(db)), Some(sums)) => {
                    add_rows::<S>(cpu, &dy, sums, false);
                    for (db, sum) in db.iter_mut().zip(sums) {
                        *db = S::store(if accumulate { db.load() + *sum } else { *sum });
                    }
                }
                _ => {}
            }
            let (dy, x) = (matrix(&dy, m, n).transposed(), matrix(&x, m, k));
            product(cpu, dy, x, destination::<S>(dw, n, k), accumulate, packed);
            Ok(())
        }, move |card, (x, dy, dw, db, _, _, (x_rounded, dy_rounded, partials))| {
            // SAFETY: the operands have these shapes, each scratch memory is as long as what is converted into it, and that
            // for partial sums is that of the parts.
            unsafe {
                if let (Some(db), Some(partials)) = (db, partials) {
                    match dy {
                        Either::A(dy) => sum_rows::<_, S>(card, parts, dy, partials, accumulate, db)?,
                        Either::B(dy) => sum_rows::<_, S>(card, parts, dy, partials, accumulate, db)?,
                    }
                }
                let x = CardMatrix::new(factor::<S>(card, x, x_rounded, m * k)?, m, k);
                let dy = CardMatrix::new(factor::<S>(card, dy, dy_rounded, m * n)?, m, n).transposed();
                multiply(card, dy, x, dw, accumulate)
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
    let LinearSizes { m, n, k } = LinearSizes::of(op, d_output, weight)?;
    let op = op.backward_product([m, n, k]);
    dispatch!(op.name, factors_of([d_output, d_input]), S => {
        let operands = (
            read_either::<S, _>("weight", weight, [n, k]),
            read_either::<S, _>("d_output", d_output, [m, n]),
            write_either::<S, _>("d_input", d_input, [m, k], false),
            packed::<S>(compute, [m, k, n], d_input, false),
            (rounded::<S>(compute, weight), rounded::<S>(compute, d_output)),
        );
        compute.launch_with_card(op, operands, move |cpu, (w, dy, dx, packed, _)| {
            let (dy, w) = (matrix(&dy, m, n), matrix(&w, n, k));
            product(cpu, dy, w, destination::<S>(dx, m, k), false, packed);
            Ok(())
        }, move |card, (w, dy, dx, _, (w_rounded, dy_rounded))| {
            // SAFETY: the operands have these shapes, and each scratch memory is as long as what is converted into it.
            unsafe {
                let w = CardMatrix::new(factor::<S>(card, w, w_rounded, n * k)?, n, k);
                let dy = CardMatrix::new(factor::<S>(card, dy, dy_rounded, m * n)?, m, n);
                multiply(card, dy, w, dx, false)
            }
        })
    })
}

/// The processor's scratch memory for a product of these sizes, written to `result`. Cards need none.
fn packed<S: Multiply>(
    compute: &Compute,
    sizes: [usize; 3],
    result: &Tensor,
    accumulate: bool,
) -> Scratch<f32> {
    let is_result_stored = result.dtype() == S::DTYPE;
    scratch(if compute.is_card() {
        0
    } else {
        S::scratch_len(compute.processor(), sizes, is_result_stored, accumulate)
    })
}

/// A card's scratch memory for an operand that a product rounds.
fn rounded<S: LinearElement>(compute: &Compute, operand: &Tensor) -> Option<Scratch<S>> {
    let is_wide = S::IS_ROUNDED && !S::has(operand);
    (compute.is_card() && is_wide).then(|| scratch(operand.num_elems()))
}

/// The operand as a factor of a product: rounded, if it has scratch memory for that.
///
/// # Safety
///
/// The operand has `len` elements, and so has the scratch memory.
unsafe fn factor<S: LinearElement>(
    card: &OnCard,
    operand: Either<In<S::Real>, In<S>>,
    rounded: Option<Out<S>>,
    len: usize,
) -> paceline_cuda::Result<In<S>> {
    match (operand, rounded) {
        (Either::B(operand), _) => Ok(operand),
        (Either::A(operand), None) => Ok(retyped(operand)),
        (Either::A(operand), Some(rounded)) => {
            // SAFETY: the caller's.
            unsafe { products::narrow(card, retyped(operand), rounded, len)? };
            Ok(rounded.as_in())
        }
    }
}

/// The operand in the type that is computed in.
///
/// # Safety
///
/// The operand has `len` elements, and so has the scratch memory, if the operand is of 16 bits.
unsafe fn wide<S: LinearElement>(
    card: &OnCard,
    operand: Either<In<S::Real>, In<S>>,
    widened: Option<Out<S::Real>>,
    len: usize,
) -> paceline_cuda::Result<In<S::Real>> {
    match operand {
        Either::A(operand) => Ok(operand),
        Either::B(operand) => {
            let widened = widened.expect("an operand of 16 bits has scratch memory");
            let arguments = (operand, widened, len as u64);
            // SAFETY: the caller's.
            unsafe { card.launch(products::CARD.of::<S>("widen"), arguments, Grid::fours(len))? };
            Ok(widened.as_in())
        }
    }
}

/// # Safety
///
/// As for [`products::multiply`].
unsafe fn multiply<S: LinearElement>(
    card: &OnCard,
    a: CardMatrix<S>,
    b: CardMatrix<S>,
    c: Either<Out<S::Real>, Out<S>>,
    accumulate: bool,
) -> paceline_cuda::Result<()> {
    // SAFETY: the caller's.
    unsafe {
        match c {
            Either::A(c) => products::multiply(card, a, b, c, accumulate),
            Either::B(c) => products::multiply(card, a, b, c, accumulate),
        }
    }
}

/// # Safety
///
/// As for [`products::sum_over_rows`].
unsafe fn sum_rows<X: Multiplied<Wide = S::Real>, S: LinearElement>(
    card: &OnCard,
    parts: RowParts,
    dy: In<X>,
    partials: Out<S::Real>,
    accumulate: bool,
    db: Either<Out<S::Real>, Out<S>>,
) -> paceline_cuda::Result<()> {
    // SAFETY: the caller's.
    unsafe {
        match db {
            Either::A(db) => products::sum_over_rows(card, parts, dy, partials, accumulate, db),
            Either::B(db) => products::sum_over_rows(card, parts, dy, partials, accumulate, db),
        }
    }
}

/// `sums (+)= sum over rows of dy`.
fn add_rows<S: Stored>(cpu: &Processor, dy: &Elems<S>, sums: &mut [S::Real], accumulate: bool) {
    match dy {
        Either::A(dy) => elementwise::add_rows(cpu, dy, sums, accumulate),
        Either::B(dy) => elementwise::add_rows(cpu, dy, sums, accumulate),
    }
}

/// Elements of the type that is computed in, or `S`.
type Elems<'a, S> = Either<&'a [<S as Stored>::Real], &'a [S]>;

fn matrix<'a, S: Stored>(
    elems: &Elems<'a, S>,
    rows: usize,
    columns: usize,
) -> ProductOperand<'a, S> {
    match elems {
        Either::A(elems) => ProductOperand::Real(Matrix::new(elems, rows, columns)),
        Either::B(elems) => ProductOperand::Stored(Matrix::new(elems, rows, columns)),
    }
}

fn destination<'a, S: Stored>(
    elems: Either<&'a mut [S::Real], &'a mut [S]>,
    rows: usize,
    columns: usize,
) -> Destination<'a, S> {
    match elems {
        Either::A(elems) => Destination::new(Elements::Real(elems), rows, columns),
        Either::B(elems) => Destination::new(Elements::Stored(elems), rows, columns),
    }
}

/// A tensor that is read.
fn read_either<'t, S: LinearElement, const N: usize>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
) -> Either<Read<'t, S::Real>, Read<'t, S>> {
    if S::has(tensor) {
        Either::B(read(operand, tensor, shape))
    } else {
        Either::A(read(operand, tensor, shape))
    }
}

/// A tensor that is written, or added to if `accumulate`.
fn write_either<'t, S: LinearElement, const N: usize>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: [usize; N],
    accumulate: bool,
) -> Either<Write<'t, S::Real>, Write<'t, S>> {
    if S::has(tensor) {
        Either::B(write_or_update(accumulate, operand, tensor, shape))
    } else {
        Either::A(write_or_update(accumulate, operand, tensor, shape))
    }
}
