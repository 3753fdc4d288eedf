//! Matrix products of slices.
//!
//! In: matrices that are row-major, or transposes of such. Out: a row-major product. [`matmul`] computes in f32 or f64, by
//! the `gemm` crate; [`product`] rounds its operands to bf16 and sums in f32, by code of this crate. `emulated` does the
//! same for f16. Nothing here knows tensors or layers.

mod emulated;

use std::ops::Range;

use half::bf16;

use crate::activation::Activation;
use crate::card::products::Multiplied;
use crate::product::{self, Elems, Output, Product, Sizes};
use crate::stored::SinglePrecision;
use crate::{Processor, Real};

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

    /// Some of its columns. Panics if it has not so many.
    pub(crate) fn some_columns(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.columns,
            "columns {range:?} of {}",
            self.columns
        );
        let first = if self.rows == 0 { 0 } else { range.start * self.column_stride };
        Self { elems: &self.elems[first..], columns: range.len(), ..self }
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
}

/// `c = a * b`, or `c += a * b` if `accumulate`; `c` is row-major (rows of a, columns of b). Panics
/// if the sizes do not agree. The order of summation over the inner dimension is `gemm`'s own; it
/// depends on the sizes and the processor, not on the values or their place in memory.
pub fn matmul<T: Real>(
    cpu: &Processor,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    c: &mut [T],
    accumulate: bool,
) {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    assert_eq!(Some(c.len()), a.rows.checked_mul(b.columns), "size of the product");
    if a.columns == 0 {
        // An empty sum, as on a rank without samples.
        if !accumulate {
            c.fill(T::default());
        }
        return;
    }
    let one = T::from_f64(1.0);
    let threads = cpu.threads.count();
    let parallelism = match threads {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    let out = Out(c.as_mut_ptr());
    cpu.threads.install(move || {
        let out = out;
        // SAFETY: the strides describe exactly the elements of the three slices, whose sizes were
        // checked, and `c` is borrowed for writing. With `read_dst` false the old contents of `c`
        // are not used.
        unsafe {
            gemm::gemm(
                a.rows,
                b.columns,
                a.columns,
                out.0,
                1,
                b.columns as isize,
                accumulate,
                a.elems.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.elems.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                one,
                one,
                false,
                false,
                false,
                parallelism,
            )
        }
    });
}

/// The address of the destination, which is sent to the thread pool.
#[derive(Clone, Copy)]
struct Out<T>(*mut T);

// SAFETY: the address points into a slice that `matmul` borrows for writing until the pool is done.
unsafe impl<T: Send> Send for Out<T> {}

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

/// An operand of [`product`].
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a, H = bf16> {
    /// Rounded to `H` by the product.
    F32(Matrix<'a, f32>),
    /// Used exactly.
    Half(Matrix<'a, H>),
}

impl<'a, H> From<Matrix<'a, f32>> for Operand<'a, H> {
    fn from(matrix: Matrix<'a, f32>) -> Self {
        Operand::F32(matrix)
    }
}

impl<'a> From<Matrix<'a, bf16>> for Operand<'a> {
    fn from(matrix: Matrix<'a, bf16>) -> Self {
        Operand::Half(matrix)
    }
}

impl<H> Operand<'_, H> {
    /// The transpose, without moving data.
    pub fn transposed(self) -> Self {
        match self {
            Operand::F32(matrix) => Operand::F32(matrix.transposed()),
            Operand::Half(matrix) => Operand::Half(matrix.transposed()),
        }
    }

    /// Rows and columns.
    fn dims(&self) -> (usize, usize) {
        match self {
            Operand::F32(matrix) => (matrix.rows, matrix.columns),
            Operand::Half(matrix) => (matrix.rows, matrix.columns),
        }
    }
}

impl Operand<'_> {
    /// The operand with its rows as lanes. It is only ever read.
    fn rows_as_lanes(&self) -> product::Operand {
        let (elems, lane_stride, k_stride) = match self {
            Operand::F32(m) => {
                (Elems::F32(m.elems.as_ptr().cast_mut()), m.row_stride, m.column_stride)
            }
            Operand::Half(m) => {
                (Elems::Bf16(m.elems.as_ptr().cast_mut()), m.row_stride, m.column_stride)
            }
        };
        product::Operand { elems, lane_stride, k_stride }
    }

    /// The operand with its columns as lanes.
    fn columns_as_lanes(&self) -> product::Operand {
        let product::Operand { elems, lane_stride, k_stride } = self.rows_as_lanes();
        product::Operand { elems, lane_stride: k_stride, k_stride: lane_stride }
    }
}

/// The elements that [`product`] writes.
#[derive(Debug)]
pub enum Elements<'a, H = bf16> {
    /// Sums as they are.
    F32(&'a mut [f32]),
    /// Sums rounded to nearest, ties to even.
    Half(&'a mut [H]),
}

impl<'a, H> From<&'a mut [f32]> for Elements<'a, H> {
    fn from(elems: &'a mut [f32]) -> Self {
        Elements::F32(elems)
    }
}

impl<'a> From<&'a mut [bf16]> for Elements<'a> {
    fn from(elems: &'a mut [bf16]) -> Self {
        Elements::Half(elems)
    }
}

/// Where [`product`] writes, and what it does with a sum before.
#[derive(Debug)]
pub struct Destination<'a, H = bf16> {
    elems: Elements<'a, H>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    bias: Option<&'a [f32]>,
    activation: Activation,
}

impl<'a, H> Destination<'a, H> {
    /// `elems` as (rows, columns), row-major. Panics if the sizes do not agree.
    pub fn new(elems: impl Into<Elements<'a, H>>, rows: usize, columns: usize) -> Self {
        let elems = elems.into();
        let len = match &elems {
            Elements::F32(elems) => elems.len(),
            Elements::Half(elems) => elems.len(),
        };
        assert_eq!(Some(len), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Self { elems, rows, columns, row_stride: columns, bias: None, activation: Activation::None }
    }

    /// The first `columns` of each `row_stride` elements; the others are left alone. Panics if `elems` is too short, or
    /// rows overlap.
    pub fn strided(
        elems: impl Into<Elements<'a, H>>,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        let elems = elems.into();
        let len = match &elems {
            Elements::F32(elems) => elems.len(),
            Elements::Half(elems) => elems.len(),
        };
        expect_strided(len, rows, columns, row_stride);
        Self { elems, rows, columns, row_stride, bias: None, activation: Activation::None }
    }

    /// Adds a number to each column, in f32. Panics if there is not one for each column.
    pub fn with_bias(self, bias: Option<&'a [f32]>) -> Self {
        assert!(bias.is_none_or(|bias| bias.len() == self.columns), "a bias for each column");
        Self { bias, ..self }
    }

    /// Applies an activation function last.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }
}

/// `c = a * b`, or `c += a * b` if `accumulate`, with `a` and `b` rounded to bf16 (to nearest, ties to even; NaN stays
/// NaN), and products and sums in f32. Bias and activation of `c` follow, then one rounding if `c` is bf16. `scratch` has
/// [`scratch_len`] elements, and begins at a multiple of 64 bytes, as memory of an allocator does. Panics if the sizes do not
/// agree, or if the scratch memory begins elsewhere.
///
/// The order of the sum of an element depends on the length of the sum only, so a row of `c` has the same bits whatever
/// the other rows are, and for any number of threads. An f32 `c` is the first addend of its sum, a bf16 `c` the last.
/// With AVX512-BF16, denormal numbers count as zero; other instructions give other bits.
pub fn product<'a>(
    cpu: &Processor,
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    c: Destination<'_>,
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (a, b) = (a.into(), b.into());
    let ((m, k), (b_rows, n)) = (a.dims(), b.dims());
    assert_eq!(k, b_rows, "inner dimensions");
    assert_eq!((c.rows, c.columns), (m, n), "size of the product");
    assert!(scratch.as_ptr().addr().is_multiple_of(64), "scratch memory begins on a cache line");
    let elems = match c.elems {
        Elements::F32(elems) => Elems::F32(elems.as_mut_ptr()),
        Elements::Half(elems) => Elems::Bf16(elems.as_mut_ptr()),
    };
    let c = Output {
        elems,
        row_stride: c.row_stride,
        accumulate,
        bias: c.bias.map(<[f32]>::as_ptr),
        with_relu: c.activation == Activation::Relu,
    };
    let (a, b) = (a.rows_as_lanes(), b.columns_as_lanes());
    // SAFETY: the constructors of matrices and destinations checked sizes and strides, the sizes agree, and the slices
    // are borrowed until the product is done, that of `c` for writing.
    unsafe { product::run(cpu, Product { sizes: Sizes { m, n, k }, a, b, c }, scratch) }
}

/// The number of f32 elements of scratch memory that [`product`] takes for `c` (m, n) and sums of k products.
pub fn scratch_len(cpu: &Processor, m: usize, n: usize, k: usize, is_c_bf16: bool) -> usize {
    product::scratch_len(cpu, Sizes { m, n, k }, is_c_bf16)
}

/// A number of 16 bits to which products round their operands, with sums in f32.
pub(crate) trait Half: SinglePrecision + Multiplied {
    /// What [`product`] does, for this type.
    fn product(
        cpu: &Processor,
        a: Operand<'_, Self>,
        b: Operand<'_, Self>,
        c: Destination<'_, Self>,
        accumulate: bool,
        scratch: &mut [f32],
    );

    /// The elements of scratch memory that [`Half::product`] takes, as [`scratch_len`].
    fn scratch_len(cpu: &Processor, m: usize, n: usize, k: usize, is_c_half: bool) -> usize;
}

impl Half for bf16 {
    fn product(
        cpu: &Processor,
        a: Operand<'_>,
        b: Operand<'_>,
        c: Destination<'_>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        product(cpu, a, b, c, accumulate, scratch);
    }

    fn scratch_len(cpu: &Processor, m: usize, n: usize, k: usize, is_c_half: bool) -> usize {
        scratch_len(cpu, m, n, k, is_c_half)
    }
}
