//! Matrix products of slices.
//!
//! In: matrices that are row-major, or transposes of such. Out: a row-major product. [`product`] computes in f32 or f64, or
//! rounds its operands to bf16 or f16 and sums in f32. The arithmetic is that of `crate::product`; `emulated` uses it for f16,
//! and `double` has plain loops for f64. Nothing here knows tensors or layers.

mod double;
mod emulated;

use half::bf16;

use crate::Processor;
use crate::activation::Activation;
use crate::product::{self, ElemPtr, InBf16, Output, ProductSizes, RawProduct};
use crate::stored::Stored;

/// A row-major matrix in a slice, or its transpose.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    elems: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// `elems` as (rows, columns), row-major. Panics if the sizes do not agree.
    pub fn new(elems: &'a [T], rows: usize, columns: usize) -> Self {
        let size = rows.checked_mul(columns);
        assert_eq!(Some(elems.len()), size, "a matrix of {rows} x {columns}");
        Self { elems, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The first `columns` of each `row_stride` elements, `rows` times. Panics if `elems` is too short, or rows overlap.
    pub fn strided(elems: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        expect_strided(elems.len(), rows, columns, row_stride);
        Self { elems, rows, columns, row_stride, column_stride: 1 }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The transpose, without moving data.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The matrix with its rows as lanes, as elements of a type, for a product of bf16 or f32. It is only ever read.
    fn rows_as_lanes(&self, elems: fn(*mut T) -> ElemPtr, in_bf16: bool) -> product::RawOperand {
        let elems = elems(self.elems.as_ptr().cast_mut());
        let (lane_stride, k_stride) = (self.row_stride, self.column_stride);
        product::RawOperand { elems, in_bf16, lane_stride, k_stride }
    }
}

fn expect_strided(len: usize, rows: usize, columns: usize, row_stride: usize) {
    assert!(
        columns <= row_stride,
        "rows of {columns} elements overlap at a stride of {row_stride}"
    );
    let needed = match rows {
        0 => Some(0),
        _ => (rows - 1).checked_mul(row_stride).and_then(|start| start.checked_add(columns)),
    };
    assert!(
        needed.is_some_and(|needed| needed <= len),
        "{len} elements for {rows} x {columns} at a stride of {row_stride}"
    );
}

/// An operand of a product of the type `S`.
#[derive(Clone, Copy, Debug)]
pub enum ProductOperand<'a, S: Stored = bf16> {
    /// In the type that is computed with, and rounded to `S` by the product.
    Real(Matrix<'a, S::Real>),
    /// Used exactly.
    Stored(Matrix<'a, S>),
}

impl<'a> From<Matrix<'a, f32>> for ProductOperand<'a, bf16> {
    fn from(matrix: Matrix<'a, f32>) -> Self {
        ProductOperand::Real(matrix)
    }
}

impl<'a, S: Stored> From<Matrix<'a, S>> for ProductOperand<'a, S> {
    fn from(matrix: Matrix<'a, S>) -> Self {
        ProductOperand::Stored(matrix)
    }
}

impl<S: Stored> ProductOperand<'_, S> {
    /// The transpose, without moving data.
    pub fn transposed(self) -> Self {
        match self {
            ProductOperand::Real(matrix) => ProductOperand::Real(matrix.transposed()),
            ProductOperand::Stored(matrix) => ProductOperand::Stored(matrix.transposed()),
        }
    }

    /// Rows and columns.
    fn dims(&self) -> (usize, usize) {
        match self {
            ProductOperand::Real(matrix) => (matrix.rows, matrix.columns),
            ProductOperand::Stored(matrix) => (matrix.rows, matrix.columns),
        }
    }
}

/// The elements that [`product`] writes.
#[derive(Debug)]
pub enum Elements<'a, S: Stored = bf16> {
    /// Sums as they are.
    Real(&'a mut [S::Real]),
    /// Sums rounded to nearest, ties to even.
    Stored(&'a mut [S]),
}

impl<'a> From<&'a mut [f32]> for Elements<'a, bf16> {
    fn from(elems: &'a mut [f32]) -> Self {
        Elements::Real(elems)
    }
}

impl<'a, S: Stored> From<&'a mut [S]> for Elements<'a, S> {
    fn from(elems: &'a mut [S]) -> Self {
        Elements::Stored(elems)
    }
}

/// Where [`product`] writes, and what it does with a sum before.
#[derive(Debug)]
pub struct Destination<'a, S: Stored = bf16> {
    elems: Elements<'a, S>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    bias: Option<&'a [S::Real]>,
    activation: Activation,
}

impl<'a, S: Stored> Destination<'a, S> {
    /// `elems` as (rows, columns), row-major. Panics if the sizes do not agree.
    pub fn new(elems: impl Into<Elements<'a, S>>, rows: usize, columns: usize) -> Self {
        let elems = elems.into();
        let len = match &elems {
            Elements::Real(elems) => elems.len(),
            Elements::Stored(elems) => elems.len(),
        };
        assert_eq!(Some(len), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Self { elems, rows, columns, row_stride: columns, bias: None, activation: Activation::None }
    }

    /// The first `columns` of each `row_stride` elements; the others are left alone. Panics if `elems` is too short, or
    /// rows overlap.
    pub fn strided(
        elems: impl Into<Elements<'a, S>>,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        let elems = elems.into();
        let len = match &elems {
            Elements::Real(elems) => elems.len(),
            Elements::Stored(elems) => elems.len(),
        };
        expect_strided(len, rows, columns, row_stride);
        Self { elems, rows, columns, row_stride, bias: None, activation: Activation::None }
    }

    /// Adds a number to each column, in the type that is computed with. Panics if there is not one for each column.
    pub fn with_bias(self, bias: Option<&'a [S::Real]>) -> Self {
        assert!(bias.is_none_or(|bias| bias.len() == self.columns), "a bias for each column");
        Self { bias, ..self }
    }

    /// Applies an activation function last.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }
}

/// `c = a * b`, or `c += a * b` if `accumulate`. Products of f32 and f64 are computed in that type; those of bf16 and f16 round
/// `a` and `b` to it (to nearest, ties to even; NaN stays NaN), and have products and sums in f32. Bias and activation of `c`
/// follow, then one rounding if `c` is of 16 bits. `scratch` has [`Multiply::scratch_len`] elements, and begins at a multiple of
/// 64 bytes, as memory of an allocator does. Panics if the sizes do not agree, or if the scratch memory begins elsewhere.
///
/// The order of the sum of an element depends on the length of the sum only, so a row of `c` has the same bits whatever
/// the other rows are, and for any number of threads. What `c` holds is added to the sum of the products. With AVX512-BF16 or
/// AMX, denormal numbers count as zero in products of bf16; other instructions give other bits.
pub fn product<'a, S: Multiply>(
    cpu: &Processor,
    a: impl Into<ProductOperand<'a, S>>,
    b: impl Into<ProductOperand<'a, S>>,
    c: Destination<'_, S>,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (a, b) = (a.into(), b.into());
    let ((m, k), (b_rows, n)) = (a.dims(), b.dims());
    assert_eq!(k, b_rows, "inner dimensions");
    assert_eq!((c.rows, c.columns), (m, n), "size of the product");
    assert!(scratch.as_ptr().addr().is_multiple_of(64), "scratch memory begins on a cache line");
    S::product(cpu, a, b, c, accumulate, scratch);
}

/// A type of numbers that [`product`] multiplies.
pub trait Multiply: Stored {
    /// [`product`] for sizes that agree.
    #[doc(hidden)]
    fn product(
        cpu: &Processor,
        a: ProductOperand<'_, Self>,
        b: ProductOperand<'_, Self>,
        c: Destination<'_, Self>,
        accumulate: bool,
        scratch: &mut [f32],
    );

    /// The number of f32 elements of scratch memory that [`product`] takes for sizes m, n and k: `c` is (m, n), and of the type
    /// `Self` if `is_c_stored`.
    fn scratch_len(
        cpu: &Processor,
        sizes: [usize; 3],
        is_c_stored: bool,
        accumulate: bool,
    ) -> usize;
}

impl<S: Stored<Real = f32>> Destination<'_, S> {
    /// The same as an address.
    fn output(self, accumulate: bool, elems: impl FnOnce(Elements<'_, S>) -> ElemPtr) -> Output {
        Output {
            elems: elems(self.elems),
            row_stride: self.row_stride,
            accumulate,
            bias: self.bias.map(<[f32]>::as_ptr),
            with_relu: self.activation == Activation::Relu,
        }
    }
}

impl Multiply for f32 {
    fn product(
        cpu: &Processor,
        a: ProductOperand<'_, f32>,
        b: ProductOperand<'_, f32>,
        c: Destination<'_, f32>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let sizes = ProductSizes { m: c.rows, n: c.columns, k: a.dims().1 };
        let [a, b] = [a, b.transposed()].map(|of| match of {
            ProductOperand::Real(of) | ProductOperand::Stored(of) => {
                of.rows_as_lanes(ElemPtr::F32, false)
            }
        });
        let c = c.output(accumulate, |elems| match elems {
            Elements::Real(elems) | Elements::Stored(elems) => ElemPtr::F32(elems.as_mut_ptr()),
        });
        // SAFETY: the constructors of matrices and destinations checked sizes and strides, the sizes agree, and the slices
        // are borrowed until the product is done, that of `c` for writing.
        unsafe { product::run(cpu, RawProduct { sizes, a, b, c }, scratch) }
    }

    fn scratch_len(cpu: &Processor, [m, n, k]: [usize; 3], _: bool, accumulate: bool) -> usize {
        let in_bf16 = InBf16 { operands: false, c: false };
        product::scratch_len(cpu, ProductSizes { m, n, k }, in_bf16, accumulate)
    }
}

impl Multiply for bf16 {
    fn product(
        cpu: &Processor,
        a: ProductOperand<'_>,
        b: ProductOperand<'_>,
        c: Destination<'_>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let sizes = ProductSizes { m: c.rows, n: c.columns, k: a.dims().1 };
        let [a, b] = [a, b.transposed()].map(|of| match of {
            ProductOperand::Real(of) => of.rows_as_lanes(ElemPtr::F32, true),
            ProductOperand::Stored(of) => of.rows_as_lanes(ElemPtr::Bf16, true),
        });
        let c = c.output(accumulate, |elems| match elems {
            Elements::Real(elems) => ElemPtr::F32(elems.as_mut_ptr()),
            Elements::Stored(elems) => ElemPtr::Bf16(elems.as_mut_ptr()),
        });
        // SAFETY: as for f32.
        unsafe { product::run(cpu, RawProduct { sizes, a, b, c }, scratch) }
    }

    fn scratch_len(
        cpu: &Processor,
        [m, n, k]: [usize; 3],
        is_c_bf16: bool,
        accumulate: bool,
    ) -> usize {
        let in_bf16 = InBf16 { operands: true, c: is_c_bf16 };
        product::scratch_len(cpu, ProductSizes { m, n, k }, in_bf16, accumulate)
    }
}
